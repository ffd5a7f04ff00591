"""Checkpoints that Megatron-Core saves in many layouts are read as the Hugging Face folder they came from."""

from copy import deepcopy
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from megatron_bapo.model.hf_import import SafetensorsFolder
from megatron_bapo.model.megatron_checkpoint import find_megatron_checkpoint
from megatron_bapo.trainer.conversion import hugging_face_from_megatron
from tests.parallel.launching import launch, launch_with_gpu_megatron
from tests.parallel.layouts import LAYOUTS, MODELS
from tests.parallel.tensors import save_random_model

NUMBERED, SINGLE = {"non_homogeneous_layers": True}, {"singleton_local_shards": True}
"""Layers numbered in the names instead of stacked in one tensor; the same of experts and of SwiGLU's halves, too."""
CASES = {
    "qwen3": ("qwen3", "one-process", None),
    "padded-vocabulary": ("qwen3", "tp4-sp", None),
    "numbered": ("qwen3", "pp2-vpp2-cp2", NUMBERED),
    "single": ("qwen2", "tp2-sp-pp2", SINGLE),
    "llama": ("llama", "tp2-sp", None),
    "experts-and-dense-layers": ("qwen3_moe", "tp2-sp-ep4-etp1", None),
    "stacked-layers-and-experts": ("qwen3_moe-94-layers", "ep2-pp2-vpp2-uneven", None),
    "numbered-layers-and-experts": ("qwen3_moe", "ep2-pp2", SINGLE),
    "shared-expert-with-gate": ("qwen2_moe", "tp2-sp-ep2", None),
    "shared-expert": ("glm4_moe", "ep2", SINGLE),
    "latent-attention": ("deepseek_v3", "tp4-sp", None),
    "whole-queries": ("moonlight", "tp2-sp", NUMBERED),
}
"""(model, layout, what Megatron-Core is told about the names)."""
WITH_GPU_MEGATRON = ("padded-vocabulary", "single", "experts-and-dense-layers", "numbered-layers-and-experts")
"""Cases that the Megatron-Core version of the GPU lock saves as well."""


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with `NAME/` for every case, and `gpu-megatron/NAME/`."""
    root = tmp_path_factory.mktemp("megatron")
    for name in {model for model, _, _ in CASES.values()}:
        config = deepcopy(MODELS[name])  # saving a model sets the dtype of its configuration
        model = AutoModelForCausalLM.from_config(config).to(torch.bfloat16)
        save_random_model(model, root / "models" / name)
    cases = {
        name: {
            "name": name,
            "model": str(root / "models" / model),
            "parallel": LAYOUTS[layout].parallel,
            "metadata": metadata,
        }
        for name, (model, layout, metadata) in CASES.items()
    }
    in_order = sorted(cases.values(), key=lambda case: case["parallel"]["world_size"])
    launch("megatron_checkpoint_ranks.py", in_order, root, 4)
    of_gpu = [case for case in in_order if case["name"] in WITH_GPU_MEGATRON]
    launch_with_gpu_megatron("megatron_checkpoint_ranks.py", of_gpu, root, 4)
    return root


@pytest.mark.parametrize("name", [*CASES, *(f"gpu-megatron/{name}" for name in WITH_GPU_MEGATRON)])
def test_every_tensor_has_the_bits_of_the_folder_that_it_came_from(results: Path, name: str) -> None:
    origin = results / "models" / CASES[name.rpartition("/")[2]][0]
    checkpoint = find_megatron_checkpoint(results / name / "iter_0000007")
    assert checkpoint == results / name / "iter_0000007"

    hugging_face_from_megatron(
        checkpoint, origin, results / name / "back", torch.bfloat16, max_file_bytes=1 << 30, advance=lambda _: None
    )

    with SafetensorsFolder(results / name / "back") as back, SafetensorsFolder(origin) as original:
        assert back.shapes().keys() == original.shapes().keys()
        for tensor in original.shapes():
            ours, theirs = back.slice(tensor)[:], original.slice(tensor)[:]
            assert ours.dtype == (torch.float32 if tensor.endswith("e_score_correction_bias") else torch.bfloat16)
            assert torch.equal(ours, theirs.to(ours.dtype)), tensor
