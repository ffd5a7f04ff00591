from collections import Counter

import pytest

from megatron_bapo.config.schema import ParallelConfig
from megatron_bapo.planning.known_models import teacher_of
from megatron_bapo.planning.parameters import num_parameters
from megatron_bapo.planning.response_lengths import Lengths, lengths_of
from megatron_bapo.planning.trainer_memory import in_flight, largest_micro_batch, num_micro_batches
from tests.unit.planning.examples import recipe


def test_a_pipeline_holds_as_many_micro_batches_as_there_are_stages_to_come() -> None:
    parallel = ParallelConfig(world_size=4, pipeline_model_parallel_size=4)
    assert [in_flight(parallel, stage, 8) for stage in range(4)] == [(4,), (3,), (2,), (1,)]
    assert [in_flight(parallel, stage, 2) for stage in range(4)] == [(2,), (2,), (2,), (1,)]


@pytest.mark.parametrize(("pp", "vpp", "num"), [(2, 2, 4), (2, 3, 2), (4, 2, 8), (4, 2, 4), (4, 4, 12)])
def test_an_interleaved_pipeline_holds_what_its_schedule_starts_before_a_backward_pass(
    pp: int, vpp: int, num: int
) -> None:
    """The schedule runs the warm-up's forward passes, then alternates forward and backward passes in rounds of `pp`."""
    parallel = ParallelConfig(world_size=pp, pipeline_model_parallel_size=pp, virtual_pipeline_model_parallel_size=vpp)
    chunks = [chunk for _ in range(num // pp) for chunk in range(vpp) for _ in range(pp)]
    for stage in range(pp):
        num_warmup = min((pp - stage - 1) * 2 + (vpp - 1) * pp, num * vpp)
        held: Counter[int] = Counter()
        peak: Counter[int] = Counter()
        for step in range(num * vpp + num_warmup):
            if step < num * vpp:
                held[chunks[step]] += 1
            if held.total() > peak.total():
                peak = held.copy()
            if step >= num_warmup:
                held[vpp - 1 - chunks[step - num_warmup]] -= 1
        assert held.total() == 0
        assert in_flight(parallel, stage, num) == tuple(peak[chunk] for chunk in range(vpp))


def test_the_model_state_of_7b_on_8_gpus_matches_hand_arithmetic() -> None:
    (stage,) = recipe("qwen2.5-7b_8gpus").stages
    norms = 28 * 2 * 3584 + 3584
    on_rank = (7_615_616_512 - norms) // 2 + norms  # tensor parallel 2
    assert stage.state.parameters == pytest.approx(2 * on_rank, rel=1e-4)
    assert stage.state.gradients == pytest.approx(4 * on_rank, rel=1e-4)
    assert stage.state.optimizer == pytest.approx(12 * on_rank / 4, rel=1e-4)  # data parallel 4


def test_full_recompute_keeps_only_layer_inputs() -> None:
    (stage,) = recipe("qwen2.5-7b_8gpus", "parallel.recompute_granularity=full").stages
    tokens, hidden, bf16, tensor = 9216, 3584, 2, 2
    assert stage.activations["layer inputs"] == 28 * tokens * hidden * bf16 // tensor
    assert stage.activations["mlp"] == 0
    (without,) = recipe("qwen2.5-7b_8gpus").stages
    assert stage.backward > without.backward
    assert stage.peak < without.peak


def test_the_output_layer_counts_on_the_last_stage_and_grows_with_its_chunk() -> None:
    stages = recipe("r1-distill-qwen-32b_64gpus").stages
    assert [stage.output_layer > 0 for stage in stages] == [False, True]
    larger = recipe("r1-distill-qwen-32b_64gpus", "trainer.logprob_chunk_size=4096").stages
    logits = 4096 * 152064 // 4 * (4 + 4 + 2)  # fp32 logits and exponentials, the gradient rounded to bf16
    assert larger[-1].output_layer - stages[-1].output_layer == pytest.approx(logits * 3 / 4, rel=1e-6)


def test_a_reference_model_is_resident_on_every_stage() -> None:
    without = recipe("r1-distill-qwen-32b_64gpus").stages
    with_it = recipe("r1-distill-qwen-32b_64gpus", "algorithm.kl_loss_coef=0.001").stages
    for before, after in zip(without, with_it, strict=True):
        assert after.resident - before.resident == after.state.reference
        assert after.state.reference == pytest.approx(after.state.parameters, rel=1e-4)


@pytest.mark.parametrize("fp8", [[], ["fp8.recipe=blockwise", "model.transformer_impl=transformer_engine"]], ids=str)
@pytest.mark.parametrize("param", [[], ["fp8.param=true"]], ids=str)
def test_a_teacher_of_the_policys_architecture_takes_as_much_as_a_reference_model(
    fp8: list[str], param: list[str]
) -> None:
    overrides = [*fp8, *param] if fp8 else []
    reference = recipe("r1-distill-qwen-32b_64gpus", "algorithm.kl_loss_coef=0.001", *overrides).stages
    teacher = "algorithm.distillation.teacher=models/DeepSeek-R1-Distill-Qwen-32B"
    layout = "parallel.pipeline_model_parallel_layout=auto"
    taught = recipe("r1-distill-qwen-32b_64gpus", teacher, *overrides).stages
    assert sum(s.state.teacher for s in taught) == pytest.approx(sum(s.state.reference for s in reference), rel=1e-6)
    balanced = recipe("r1-distill-qwen-32b_64gpus", "algorithm.kl_loss_coef=0.001", layout, *overrides).stages
    assert [s.state.teacher for s in taught] == [s.state.reference for s in balanced]
    assert all(s.state.reference == 0 and s.resident > s.state.teacher for s in taught)


def test_gradients_in_bfloat16_take_half_the_memory_and_less_time_to_reduce() -> None:
    in_fp32, in_bf16 = (
        recipe("r1-distill-qwen-32b_64gpus", "optimizer.cpu_offload=false", f"optimizer.grads_dtype={dtype}")
        for dtype in ("float32", "bfloat16")
    )
    for before, after in zip(in_fp32.stages, in_bf16.stages, strict=True):
        assert 2 * after.state.gradients == before.state.gradients
        assert before.peak - after.peak == after.state.gradients
    assert in_bf16.time.trainer.data < in_fp32.time.trainer.data


def test_moments_in_bfloat16_take_half_the_memory_on_the_gpu_and_in_the_copy_for_a_checkpoint() -> None:
    settings = ("optimizer.cpu_offload=false", "optimizer.adam_beta2=0.95")
    in_fp32, in_bf16 = (
        recipe("r1-distill-qwen-32b_64gpus", *settings, f"optimizer.moments_dtype={dtype}")
        for dtype in ("float32", "bfloat16")
    )
    for before, after in zip(in_fp32.stages, in_bf16.stages, strict=True):
        assert 2 * after.state.moments == before.state.moments
        assert before.peak - after.peak == after.state.moments
        assert 3 * in_bf16.checkpoint_copy(after) == 2 * in_fp32.checkpoint_copy(before)


def test_a_larger_teacher_takes_more_memory_and_time() -> None:
    plans = [recipe("qwen2.5-7b_8gpus")]
    for name in ("Qwen2.5-7B", "Qwen2.5-32B"):
        plans.append(recipe("qwen2.5-7b_8gpus", f"algorithm.distillation.teacher={name}"))
    for plan in plans[1:]:
        teacher = teacher_of(plan.config)
        assert teacher is not None
        (stage,), tp = plan.stages, plan.config.parallel.tensor_model_parallel_size
        assert stage.state.teacher == pytest.approx(2 * num_parameters(teacher) / tp, rel=1e-3)
    without, small, large = (plan.time.trainer.teacher for plan in plans)
    assert without == 0.0 < 3 * small < large
    assert plans[1].time.training == pytest.approx(plans[0].time.training + small)
    # One forward pass: a third of a training pass without its recomputation and communication.
    assert small == pytest.approx(plans[0].time.trainer.compute / (3 + 3 / 4), rel=0.25)


def test_the_largest_micro_batch_holds_longest_trajectories_and_one_of_the_rest() -> None:
    plan = recipe("qwen2.5-7b_8gpus", "trainer.max_tokens_per_gpu=20000")
    assert largest_micro_batch(plan.config, plan.assumptions).lengths == (9216, 9216, 20000 - 2 * 9216)


def test_an_update_has_as_many_micro_batches_as_its_mean_tokens_fill() -> None:
    plan = recipe("qwen2.5-7b_8gpus")
    tokens = 1024 / 4 * (1024 * 0.25 + 8192 * 0.5)  # of a data-parallel rank
    fill = lengths_of(plan.config, plan.assumptions).fill(9216)
    assert 0.9 < fill <= 1.0
    assert num_micro_batches(plan.config, plan.assumptions) == -(-tokens // (9216 * fill))


def test_sequences_longer_than_half_a_micro_batch_leave_it_partly_empty() -> None:
    long, short = (Lengths(0.0, (length,) * 2048) for length in (600, 250))
    assert long.fill(1000) == pytest.approx(0.6)
    assert short.fill(1000) == pytest.approx(1.0)
    mixed = Lengths(0.0, tuple(300 + i // 4 for i in range(2048)))
    assert mixed.fill(1000) < mixed.fullest(1000, 8) <= 1.0


def test_a_teacher_on_engines_takes_gpus_of_its_own_and_nothing_of_the_trainers() -> None:
    teacher, engines = "algorithm.distillation.teacher=Qwen2.5-32B", "algorithm.distillation.engines"
    inside, outside = (
        recipe("qwen2.5-7b_8gpus", teacher, *more)
        for more in ((), (f"{engines}.num_engines=2", f"{engines}.tensor_parallel_size=4"))
    )
    without, large = recipe("qwen2.5-7b_8gpus"), teacher_of(outside.config)
    assert large is not None
    assert outside.stages == without.stages
    assert (without.num_gpus, inside.num_gpus, outside.num_gpus) == (8, 8, 16)
    assert inside.teacher_engine is without.teacher_engine is None
    assert outside.teacher_engine is not None
    assert outside.teacher_engine.weights == pytest.approx(2 * num_parameters(large) / 4, rel=1e-3)
    assert outside.time.trainer.teacher == 0 < inside.time.trainer.teacher
    assert outside.time.model_flops == without.time.model_flops < inside.time.model_flops
    assert outside.fits


def test_a_teacher_whose_engines_are_too_small_or_too_slow_is_seen_in_the_plan() -> None:
    teacher = "algorithm.distillation.teacher=Qwen2.5-32B"
    small = recipe("qwen2.5-7b_8gpus", teacher, "algorithm.distillation.engines.kv_cache_gib=0.1")
    (problem,) = small.problems
    assert problem.startswith("an engine of the teacher's GPU has room for a KV cache of")
    wide = recipe("qwen2.5-7b_8gpus", teacher, "algorithm.distillation.engines.tensor_parallel_size=16")
    assert any("an engine of the teacher has 16 GPUs" in problem for problem in wide.problems)
    long = ("data.max_prompt_length=30000", "rollout.max_response_length=1000", "trainer.max_tokens_per_gpu=32768")
    fitting = "algorithm.distillation.engines.tensor_parallel_size=2"
    slow, alone = recipe("qwen2.5-7b_8gpus", teacher, fitting, *long), recipe("qwen2.5-7b_8gpus", *long)
    assert slow.time.generation > 2 * alone.time.generation
