from dataclasses import replace

import pytest

from megatron_bapo.config.checks import check_config
from megatron_bapo.planning.activations import MicroBatch, layer_activations, without_recompute
from megatron_bapo.planning.generation_time import decode_cost
from megatron_bapo.planning.hardware import GPUS, Assumptions
from megatron_bapo.planning.parameters import LayerKind
from megatron_bapo.planning.precision import engine_weight_bytes, fp8_speedup, quantised_elements
from tests.unit.config.examples import config
from tests.unit.planning.examples import Plan, recipe

BF16, FP8, ROLLOUTS = "qwen2.5-7b_8gpus", "qwen2.5-7b_8gpus_fp8", "qwen2.5-7b_8gpus_fp8_rollouts"
FP8_ENGINES = ("rollout.quantization=fp8_per_block",)
# Of Qwen2.5-7B: 28 layers, hidden size 3584, 28 + 2 x 4 heads of 128, MLP 18944.
LAYER = 3584 * (36 * 128 + 28 * 128 + 3 * 18944)


def test_all_matrices_of_the_layers_are_multiplied_in_fp8() -> None:
    plan = recipe(FP8)
    assert quantised_elements(plan.config, plan.architecture, 0) == 28 * LAYER // 2  # TP2
    assert quantised_elements(recipe(BF16).config, plan.architecture, 0) == 0


def test_bfloat16_layers_have_no_fp8_elements() -> None:
    plan = recipe("qwen2.5-32b_64gpus_fp8")
    whole = recipe("qwen2.5-32b_64gpus_fp8", "fp8.first_last_layers_bf16=false")
    for stage in range(2):
        found, of_all = (quantised_elements(each.config, each.architecture, stage) for each in (plan, whole))
        assert found == pytest.approx(of_all * 31 / 32)


def test_layers_of_different_size_count_with_their_own() -> None:
    """The first layer of GLM-4.5-Air is dense; with it in bfloat16, the first stage has five layers of experts."""
    fp8 = ("fp8.recipe=blockwise", "fp8.first_last_layers_bf16=true", "fp8.num_layers_at_start_in_bf16=1")
    eight = ("parallel.tensor_model_parallel_size=1", "parallel.sequence_parallel=false")
    eight += ("parallel.pipeline_model_parallel_size=8", "parallel.pipeline_model_parallel_layout=auto")
    plan = recipe("glm-4.5-air_64gpus", *eight, *fp8)
    experts = 128 // 8 + 1  # with the shared one
    layer = 4096 * (2 * 96 + 2 * 8) * 128 + experts * 3 * 4096 * 1408
    assert quantised_elements(plan.config, plan.architecture, 0) == 5 * layer


def test_fp8_params_take_the_bytes_of_bfloat16_and_fp8_copies_double_them() -> None:
    kept, cached, bf16 = recipe(FP8, "fp8.param=true", "trainer.offload=false"), recipe(FP8), recipe(BF16)
    in_fp8 = 28 * LAYER // 2
    of = [plan.stages[0].state for plan in (kept, cached, bf16)]
    assert of[2].quantised == 0
    assert of[2].parameters == of[1].parameters == of[0].parameters + in_fp8
    assert (of[0].quantised, of[1].quantised) == (in_fp8, 2 * in_fp8)
    assert of[0].on_device == of[2].on_device


def test_fp8_copies_are_not_moved_to_host_memory_with_the_trainer() -> None:
    fp8, bf16 = recipe(FP8, "trainer.offload=true"), recipe(BF16, "trainer.offload=true")
    assert fp8.stages[0].state.on_device > bf16.stages[0].state.on_device
    assert fp8.time.offload == bf16.time.offload > 0.0
    assert fp8.offloaded(fp8.stages[0]) == bf16.offloaded(bf16.stages[0])


def test_fp8_speeds_up_only_the_linear_layers() -> None:
    gpu, assumptions = GPUS["H100"], Assumptions()
    assert fp8_speedup(gpu, assumptions) == pytest.approx(1979 * 0.6 / (989 * 0.6))
    fp8, bf16 = recipe(FP8).time, recipe(BF16).time
    assert bf16.trainer.compute / 2 < fp8.trainer.compute < 0.9 * bf16.trainer.compute
    assert fp8.model_flops == bf16.model_flops


def test_fp8_saves_smaller_inputs_of_linear_layers() -> None:
    plan = recipe(FP8)
    parallel = without_recompute(plan.config.parallel)

    def bytes_of(batch: MicroBatch) -> dict[str, int]:
        return layer_activations(plan.architecture, parallel, batch, LayerKind())

    fused = MicroBatch((8192,), 2, fused_norms=True, fused_attention=True)
    rounded = replace(fused, product_input_bytes=1)
    # Inputs of fc1 (hidden, split by TP2's sequence parallelism) and of fc2, a byte less for each element.
    assert bytes_of(fused)["mlp"] - bytes_of(rounded)["mlp"] == 4096 * 3584 + 8192 * 18944 // 2
    local = replace(fused, fused_attention=False)
    assert bytes_of(fused)["attention kernel"] < bytes_of(local)["attention kernel"]


def test_an_fp8_engine_has_half_the_layer_bytes_and_a_smaller_kv_cache() -> None:
    bf16, fp8 = recipe(BF16), recipe(ROLLOUTS)
    saved = bf16.engine.weights - fp8.engine.weights
    assert saved == pytest.approx(28 * LAYER, rel=1e-6)
    assert fp8.engine.kv_cache == bf16.engine.kv_cache + saved
    assert fp8.time.generation < bf16.time.generation
    quantised = recipe(ROLLOUTS, "rollout.kv_cache_dtype=fp8_e4m3").engine
    assert quantised.kv_per_token * 2 == fp8.engine.kv_per_token
    assert engine_weight_bytes(bf16.config, bf16.architecture, 10) == 20


@pytest.mark.parametrize(("gpu", "overrides", "num_bytes"), [("H100", FP8_ENGINES, 1), ("B200", (), 2)])
def test_an_engine_has_experts_as_wide_as_vllm_allocates_them(
    gpu: str, overrides: tuple[str, ...], num_bytes: int
) -> None:
    """Qwen3-235B has 94 layers with 128 experts of width 1536. A part of 192 is 256 wide, and a whole one 1536."""
    name = ("qwen3-235b-a22b_128gpus", "rollout.tensor_parallel_size=8", *overrides)
    parts, whole = (
        recipe(*name, f"rollout.enable_expert_parallel={is_whole}", gpu=gpu) for is_whole in ("false", "true")
    )
    added = num_bytes * 94 * 128 * 3 * 4096 * (256 - 192)
    assert parts.engine.weights - whole.engine.weights == pytest.approx(added, rel=1e-4)
    assert parts.engine.kv_cache - whole.engine.kv_cache == pytest.approx(-added, rel=1e-4)
    one, other = (decode_cost(p.config, p.architecture, p.gpu, p.engine, p.assumptions) for p in (parts, whole))
    assert one.experts == pytest.approx(other.experts * 256 / 192)
    assert one.weights == pytest.approx(other.weights, rel=1e-2)


@pytest.mark.parametrize(
    ("plan", "expected"),
    [
        (recipe(FP8, gpu="A100"), "A100: fp8.recipe=blockwise needs GPUs of compute capability 9.0"),
        (recipe(FP8, "fp8.recipe=mxfp8", "fp8.param=false"), "H100: fp8.recipe=mxfp8 needs GPUs of compute capability"),
        (recipe(ROLLOUTS, gpu="A100"), "rollout.quantization=fp8_per_block: an A100 has no FP8 matrix products"),
    ],
    ids=["a100", "mxfp8 on hopper", "engines on a100"],
)
def test_a_plan_refuses_fp8_where_the_gpu_has_none(plan: Plan, expected: str) -> None:
    assert any(expected in problem for problem in plan.problems)


@pytest.mark.parametrize(
    ("values", "tolerance", "warned"),
    [
        ({"rollout__quantization": "fp8_per_block"}, 0.1, True),
        ({"rollout__kv_cache_dtype": "fp8_e4m3"}, 0.1, True),
        ({"rollout__quantization": "fp8_per_block"}, 0.5, False),
        ({"rollout__quantization": "fp8_per_block"}, None, False),
    ],
    ids=str,
)
def test_a_probe_that_fp8_rounding_would_fail_is_warned_of(values: dict, tolerance: float | None, warned: bool) -> None:
    warnings = check_config(config(**values, model__dtype="bfloat16", weight_sync__probe_tolerance=tolerance))
    assert any("so the probe may end the run. Remove probe_tolerance" in line for line in warnings) == warned


def test_fp8_on_a_gpu_without_it_is_a_problem_and_no_error() -> None:
    on_a100 = recipe(FP8, gpu="A100")
    assert "needs GPUs of compute capability 9.0 or higher" in on_a100.problems[0]
    assert on_a100.time.total > 0
