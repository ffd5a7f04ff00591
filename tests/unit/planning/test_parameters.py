import json
import re

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from megatron_bapo.config.architecture import read_architecture
from megatron_bapo.planning.known_models import FOLDER
from megatron_bapo.planning.parameters import (
    Split,
    chunk_parameters,
    num_active_parameters,
    num_parameters,
    whole_model,
)

BILLIONS = {
    "DeepSeek-V3": 671.026,
    "Moonlight-16B-A3B": 15.960,
    "GLM-4.5-Air": 106.852,
    "GLM-4.7-Flash": 29.943,
    "gpt-oss-20b": 20.91,
    "gpt-oss-120b": 116.83,
    "DeepSeek-R1-Distill-Qwen-1.5B": 1.777,
    "DeepSeek-R1-Distill-Qwen-7B": 7.616,
    "DeepSeek-R1-Distill-Qwen-32B": 32.764,
    "OctoThinker-3B-Long-Zero": 3.213,
    "Qwen2.5-1.5B": 1.544,
    "Qwen2.5-3B": 3.086,
    "Qwen2.5-7B": 7.616,
    "Qwen2.5-14B": 14.770,
    "Qwen2.5-32B": 32.764,
    "Qwen3-8B": 8.191,
    "Qwen3-14B": 14.768,
    "Qwen3-32B": 32.762,
    "Qwen3-30B-A3B": 30.532,
    "Qwen3-235B-A22B": 235.094,
    "Qwen3-Next-80B-A3B": 79.674,
    "Qwen3.5-27B": 26.896,
    "Qwen3.5-35B-A3B": 34.661,
    "Mistral-Small-24B": 23.572,
}
"""Parameter counts on the models' Hugging Face pages; those of GLM-4.5-Air, GLM-4.7-Flash and DeepSeek-V3 without the
layers that predict further tokens. Moonlight's page rounds to 16. Those of gpt-oss are in its model card. The
cards of the models with Gated DeltaNets round to 80, 27 and 35."""
VARIANT = re.compile(r"-(Math|Base|Instruct|Thinking|2501|2507)(?=-|$)")
"""Variants of a model have its shape."""


@pytest.mark.parametrize("name", sorted(folder.name for folder in FOLDER.iterdir() if folder.is_dir()))
def test_a_known_model_has_as_many_parameters_as_hugging_faces(name: str) -> None:
    values = json.loads((FOLDER / name / "config.json").read_text())
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**values))
    expected = sum(parameter.numel() for parameter in model.parameters())
    assert num_parameters(read_architecture(FOLDER / name)) == expected
    assert expected == pytest.approx(BILLIONS[VARIANT.sub("", name)] * 1e9, rel=1e-3)


def test_active_parameters_exclude_the_embedding_and_the_experts_a_token_is_not_routed_to() -> None:
    architecture = read_architecture(FOLDER / "Qwen3-30B-A3B")
    attention = 2 * 2048 * 32 * 128 + 2 * 2048 * 4 * 128 + 2 * 128
    layer = attention + 2 * 2048 + 128 * 2048 + 8 * 3 * 2048 * 768
    assert num_active_parameters(architecture) == 48 * layer + 2048 + 151936 * 2048


@pytest.mark.parametrize("tensor", [2, 4, 8])
def test_tensor_parallel_ranks_hold_the_model_once_and_copies_of_unsplit_parameters(tensor: int) -> None:
    architecture = read_architecture(FOLDER / "Qwen3-8B")
    layers, hidden, head = 36, 4096, 128
    of_rank = chunk_parameters(architecture, Split(tensor, expert_tensor=tensor), whole_model(architecture))
    norms = layers * (2 * hidden + 2 * head) + hidden
    assert sum(p.numel for p in of_rank) * tensor == num_parameters(architecture) + (tensor - 1) * norms


def test_expert_parallel_ranks_hold_whole_experts() -> None:
    architecture = read_architecture(FOLDER / "Qwen3-30B-A3B")
    of_rank = chunk_parameters(architecture, Split(expert=8), whole_model(architecture))
    assert sum(p.numel for p in of_rank if p.is_expert) == 48 * 16 * 3 * 2048 * 768
    of_one = chunk_parameters(architecture, Split(), whole_model(architecture))
    assert not any(p.is_expert for p in of_one)
