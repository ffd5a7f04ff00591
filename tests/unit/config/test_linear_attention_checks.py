import re
from pathlib import Path
from typing import Any

import pytest

from megatron_bapo.config.architecture import read_architecture
from megatron_bapo.config.checks import check_config
from megatron_bapo.config.linear_attention_checks import cpu_engine_problems
from tests.unit.config.examples import config, problems
from tests.unit.config.test_model_checks import hf_folder, layout, of

QWEN3_NEXT: dict[str, Any] = {
    "model_type": "qwen3_next",
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 64,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "linear_num_key_heads": 6,
    "linear_num_value_heads": 12,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
    "linear_conv_kernel_dim": 4,
}


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            layout(4, tensor_model_parallel_size=2, context_parallel_size=2, sequence_parallel=True),
            "linear_num_key_heads=6 must be a multiple of parallel.tensor_model_parallel_size=2 x "
            "context_parallel_size=2, .* choose sizes whose product divides 6",
        ),
        (
            {"rollout": {"tensor_parallel_size": 4}},
            "linear_num_key_heads=6 must be a multiple of rollout.tensor_parallel_size=4, .* a size that divides 6",
        ),
        (
            {"rollout": {"pipeline_parallel_size": 4}},
            "vLLM needs a layer of full attention on every pipeline stage of an engine, and with rollout."
            "pipeline_parallel_size=4 there is none on stage 0, counted from 0; choose fewer stages",
        ),
        (
            {"rollout": {"quantization": "fp8_per_block"}},
            "rollout.quantization=fp8_per_block with Gated DeltaNets .* remove it",
        ),
        (
            {"rollout": {"batch_invariant": True}},
            "rollout.batch_invariant=true with Gated DeltaNets .* no batch-invariant kernels; remove it",
        ),
        (
            {"algorithm": {"routing_replay": "rollout"}},
            "algorithm.routing_replay=rollout with Gated DeltaNets .* set it to none",
        ),
    ],
)
def test_what_qwen3_next_cannot_do_is_refused(tmp_path: Path, values: dict[str, Any], message: str) -> None:
    found = problems(of(hf_folder(tmp_path, **QWEN3_NEXT), **values))
    assert any(re.search(message, problem) for problem in found), found


def test_layouts_that_share_the_heads_pass(tmp_path: Path) -> None:
    """Stages of four layers have a layer of attention each: the last one."""
    folder = hf_folder(tmp_path, **QWEN3_NEXT | {"linear_num_key_heads": 4, "linear_num_value_heads": 4})
    rollout = {"rollout__tensor_parallel_size": 4, "rollout__pipeline_parallel_size": 2}
    parallel = layout(4, tensor_model_parallel_size=2, context_parallel_size=2, sequence_parallel=True)
    check_config(of(folder, **rollout, **parallel))


def test_every_stage_of_an_engine_needs_a_layer_with_experts(tmp_path: Path) -> None:
    fields = QWEN3_NEXT | {"mlp_only_layers": [4, 5, 6, 7]}
    (problem,) = problems(of(hf_folder(tmp_path, **fields), rollout__pipeline_parallel_size=2))
    assert "vLLM needs a layer with experts on every pipeline stage of an engine" in problem
    assert "none on stage 1" in problem
    check_config(of(tmp_path))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"model": {"lora": {}}}, "model.lora with Gated DeltaNets .* remove the section"),
        ({"fp8": {}}, "fp8 with Gated DeltaNets .* is not supported; remove the section fp8"),
    ],
)
def test_what_qwen3_next_cannot_do_on_gpus_is_refused(tmp_path: Path, values: dict[str, Any], message: str) -> None:
    fused = {"dtype": "bfloat16", "transformer_impl": "transformer_engine"}
    model = {"path": hf_folder(tmp_path, **QWEN3_NEXT), **fused, **values.get("model", {})}
    found = problems(config(**{**values, "model": model}))
    assert any(re.search(message, problem) for problem in found), found
    check_config(config(model={"path": tmp_path, **fused}))


def test_a_teacher_on_engines_has_the_rules_of_engines(tmp_path: Path) -> None:
    teacher = hf_folder(tmp_path, **QWEN3_NEXT)
    engines = {"tensor_parallel_size": 4}
    found = problems(config(algorithm__distillation={"teacher": teacher, "engines": engines, "coef": 1.0}))
    expected = "linear_num_key_heads=6 must be a multiple of algorithm.distillation.engines.tensor_parallel_size=4"
    assert any(expected in problem for problem in found), found


def test_vllm_does_not_serve_qwen3_next_with_a_tied_output_layer(tmp_path: Path) -> None:
    found = problems(of(hf_folder(tmp_path, **QWEN3_NEXT, tie_word_embeddings=True)))
    assert any("vLLM serves qwen3_next only with an output layer of its own" in problem for problem in found), found


QWEN3_5 = {name: value for name, value in QWEN3_NEXT.items() if "expert" not in name}


@pytest.mark.parametrize(
    ("fields", "dtype", "torchvision", "messages"),
    [
        (QWEN3_NEXT, "bfloat16", False, []),
        (QWEN3_NEXT | {"linear_key_head_dim": 128, "linear_value_head_dim": 128}, "bfloat16", False, []),
        (QWEN3_NEXT, "float32", True, ["model.dtype=float32 with .* only in bfloat16; set model.dtype=bfloat16, or"]),
        (
            QWEN3_NEXT | {"linear_key_head_dim": 128},
            "bfloat16",
            True,
            ["linear_key_head_dim=128 and linear_value_head_dim=64 must be equal, and 64 or 128, .* on a GPU"],
        ),
        (QWEN3_NEXT | {"linear_conv_kernel_dim": 3}, "bfloat16", True, ["linear_conv_kernel_dim=3 must be 4 .* GPU"]),
        (QWEN3_5 | {"model_type": "qwen3_5_text"}, "bfloat16", True, []),
        (QWEN3_5 | {"model_type": "qwen3_5_text"}, "bfloat16", False, ["imports torchvision .* or use Qwen3-Next"]),
    ],
)
def test_engines_on_cpus_need_what_vllms_kernels_take(
    tmp_path: Path, fields: dict[str, Any], dtype: str, torchvision: bool, messages: list[str]
) -> None:
    architecture = read_architecture(hf_folder(tmp_path, **fields))
    found = list(cpu_engine_problems(architecture, dtype, str(tmp_path), torchvision=torchvision))
    assert len(found) == len(messages)
    for problem, message in zip(found, messages, strict=True):
        assert re.search(message, problem), problem
