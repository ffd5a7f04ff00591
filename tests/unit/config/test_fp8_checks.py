from typing import Any

import pytest

from megatron_bapo.config.checks import check_config, check_planned, refuse
from megatron_bapo.config.colocation_checks import layer_problems
from megatron_bapo.config.fp8 import ComputeCapability, Fp8Config, Fp8Recipe, capability_problem
from megatron_bapo.config.model import CreateModelConfig
from megatron_bapo.config.model_checks import created_architecture
from megatron_bapo.errors import UserError
from tests.unit.config.examples import config, problems

ENGINE: dict[str, Any] = {"model__transformer_impl": "transformer_engine", "model__dtype": "bfloat16"}
FP8 = ENGINE | {"trainer__max_tokens_per_gpu": 1024}


def fp8(recipe: Fp8Recipe = "tensorwise", **more: Any) -> dict[str, Any]:
    return FP8 | {"fp8": {"recipe": recipe, **more}}


@pytest.mark.parametrize("recipe", ["delayed", "tensorwise", "blockwise", "mxfp8"])
def test_every_recipe_is_accepted_with_its_format_and_padding(recipe: Fp8Recipe) -> None:
    checked = config(**fp8(recipe))
    check_config(checked)
    assert checked.fp8 is not None
    assert checked.fp8.number_format == ("hybrid" if recipe in ("delayed", "tensorwise") else "e4m3")
    assert checked.padding_rule.sequence_multiple == (32 if recipe == "mxfp8" else 16)
    assert checked.padding_rule.total_multiple == 128


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        (
            {"model__transformer_impl": "transformer_engine"},
            ["model.transformer_impl=transformer_engine with model.dtype=float32", "set dtype=bfloat16"],
        ),
        (
            {"parallel__cp_comm_type": "a2a"},
            ["parallel.cp_comm_type=a2a with model.transformer_impl=local", "always all-gathers", "remove it"],
        ),
        (
            fp8() | {"model__transformer_impl": "local"},
            ["fp8.recipe=tensorwise with model.transformer_impl=local", "set transformer_impl=transformer_engine"],
        ),
        (
            fp8("delayed", first_last_layers_bf16=True),
            ["first_last_layers_bf16=true with fp8.recipe=delayed", "set recipe=tensorwise or blockwise"],
        ),
        (
            fp8("delayed") | {"algorithm__clip_bounds": {"method": "speculate"}},
            ["clip_bounds.method=speculate with fp8.recipe=delayed", "set method=score, or recipe=tensorwise"],
        ),
        (
            fp8() | {"optimizer__cpu_offload": True},
            ["optimizer.cpu_offload=true with fp8.recipe=tensorwise", "only recipe=delayed", "cpu_offload=false"],
        ),
        (
            fp8(param=True) | {"parallel__use_distributed_optimizer": False},
            ["fp8.param=true with parallel.use_distributed_optimizer=false", "set use_distributed_optimizer=true"],
        ),
        (fp8("mxfp8", param=True), ["fp8.param=true with fp8.recipe=mxfp8", "set param=false"]),
        (
            fp8("delayed", param=True),
            ["fp8.param=true with fp8.recipe=delayed", "do not contain the scales", "set recipe=tensorwise"],
        ),
        (
            fp8(param=True) | {"rollout__colocate": True, "trainer__offload": True},
            ["fp8.param=true with trainer.offload=true", "set one of the two to false"],
        ),
        (
            fp8(param=True) | {"rollout__colocate": True, "weight_sync__transport": "cuda_ipc"},
            ["fp8.param=true with weight_sync.transport=cuda_ipc", "set transport=store or nccl"],
        ),
        (
            fp8("tensorwise", first_last_layers_bf16=True, num_layers_at_end_in_bf16=3)
            | {"parallel__world_size": 2, "parallel__pipeline_model_parallel_size": 2},
            ["fp8.num_layers_at_end_in_bf16=3 must not exceed the 2 layers of a pipeline stage", "lower it"],
        ),
        (
            fp8() | {"model__create": {"hidden_size": 120, "max_position_embeddings": 4096}},
            ["fp8.recipe=tensorwise: hidden_size=120", "must be a multiple of 16"],
        ),
        (
            fp8("blockwise", param=True) | {"model__create": {"hidden_size": 192, "max_position_embeddings": 4096}},
            ["with fp8.param=true: hidden_size=192", "must be a multiple of 128", "set param=false"],
        ),
        (
            fp8() | {"trainer__max_tokens_per_gpu": 250},
            ["trainer.max_tokens_per_gpu=250 must hold the longest trajectory", "256 with the layout's padding"],
        ),
        (
            ENGINE
            | {"parallel__cp_comm_type": "a2a", "parallel__world_size": 4, "parallel__context_parallel_size": 4}
            | {"model__create": {"num_key_value_heads": 2, "max_position_embeddings": 4096}},
            ["parallel.cp_comm_type=a2a splits heads", "num_key_value_heads=2", "set cp_comm_type=p2p or all_gather"],
        ),
    ],
    ids=str,
)  # fmt: skip
def test_settings_that_contradict_transformer_engine_or_fp8_are_refused(
    values: dict[str, Any], expected: list[str]
) -> None:
    (problem,) = problems(config(**values))
    for part in expected:
        assert part in problem


def test_a_plan_refuses_the_same_settings_as_a_run() -> None:
    broken = config(**fp8("delayed", first_last_layers_bf16=True))
    with pytest.raises(UserError, match="reduced once for all layers"):
        check_planned(broken, created_architecture(CreateModelConfig(max_position_embeddings=4096)), "x")


@pytest.mark.parametrize(
    ("recipe", "capability", "expected"),
    [
        ("mxfp8", (9, 0), "mxfp8 needs GPUs of compute capability 10.0 or higher, these have 9.0; set fp8.recipe="),
        ("blockwise", (8, 9), "capability 9.0 or higher, these have 8.9; set fp8.recipe=tensorwise"),
        ("delayed", (8, 0), "capability 8.9 or higher, these have 8.0; remove the section fp8"),
        ("mxfp8", (12, 0), "compute capability 12"),
        ("mxfp8", (10, 0), None),
        ("blockwise", (10, 0), None),
        ("tensorwise", (8, 9), None),
    ],
)
def test_a_recipe_is_refused_on_gpus_that_cannot_run_it(
    recipe: Fp8Recipe, capability: ComputeCapability, expected: str | None
) -> None:
    problem = capability_problem(recipe, capability)
    assert problem is None if expected is None else problem is not None and expected in problem


@pytest.mark.parametrize(
    ("values", "capability", "installed", "expected"),
    [
        (ENGINE, None, False, "transformer_engine on a machine without a GPU: Transformer Engine has only GPU kernels"),
        (ENGINE, (9, 0), False, "needs the package transformer_engine, which is not installed; install the GPU lock"),
        (fp8("mxfp8"), (9, 0), True, "mxfp8 needs GPUs of compute capability 10.0"),
        (fp8("blockwise"), (9, 0), True, None),
        (ENGINE, (8, 0), True, None),
    ],
    ids=str,
)
def test_this_machine_must_support_the_layers(
    values: dict[str, Any], capability: ComputeCapability | None, installed: bool, expected: str | None
) -> None:
    checked = config(**values)
    if expected is None:
        refuse(layer_problems(checked, capability, installed))
        return
    with pytest.raises(UserError, match=expected):
        refuse(layer_problems(checked, capability, installed))


def test_bfloat16_layers_are_counted_only_if_they_are_enabled() -> None:
    assert Fp8Config(num_layers_at_start_in_bf16=2).num_bf16_layers == (0, 0)
    assert Fp8Config(first_last_layers_bf16=True, num_layers_at_start_in_bf16=2).num_bf16_layers == (2, 1)
