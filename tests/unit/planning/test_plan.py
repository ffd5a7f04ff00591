from dataclasses import replace

import pytest

from megatron_bapo.planning.plan import Plan
from megatron_bapo.planning.weight_transfer import LAYER_S
from tests.unit.planning.examples import recipe

NAME = "qwen2.5-7b_8gpus"
STAYS = "trainer.offload=false"
"""The trainer's state stays on the GPUs while engines generate."""
HALF = "rollout.gpu_memory_utilization=0.53"


@pytest.mark.parametrize(
    ("plan", "problem"),
    [
        (recipe(NAME, gpu="A100", placement="separate"), None),
        (
            recipe(
                *(NAME, STAYS, HALF, "parallel.use_distributed_optimizer=false"),
                "parallel.overlap_param_gather=false",
            ),
            "pipeline stage 0 (ranks 0 to 7) keeps 63.8 GiB while the engine on its GPU takes 42.0 GiB",
        ),
        (
            recipe(NAME, STAYS, "rollout.gpu_memory_utilization=0.9"),
            "pipeline stage 0 (ranks 0 to 7) keeps 31.9 GiB while the engine on its GPU takes 71.3 GiB",
        ),
        (recipe(NAME, "rollout.gpu_memory_utilization=0.9", placement="separate"), None),
        (
            recipe(NAME, "rollout.kv_cache_gib=0.25"),
            "a KV cache of 4,681 tokens, beside 14.2 GiB of weights; the longest prompt and response have 9,216",
        ),
        (
            recipe(NAME, "rollout.num_engines=16"),
            "rollout.num_engines=16 engines of 1 GPUs (tensor_parallel_size x pipeline_parallel_size) do not fit on "
            "the trainer's 8",
        ),
        (
            recipe(NAME, "rollout.tensor_parallel_size=16", "rollout.num_engines=1", placement="separate"),
            "on rollout.nodes_per_engine=1 nodes, and a node has 8; set nodes_per_engine=2",
        ),
        (
            recipe(
                *(NAME, "rollout.tensor_parallel_size=4", "rollout.num_engines=1", "rollout.nodes_per_engine=2"),
                placement="separate",
            ),
            None,
        ),
        (
            recipe(NAME, "rollout.tensor_parallel_size=4", "rollout.num_engines=2", "rollout.nodes_per_engine=2"),
            "rollout.nodes_per_engine=2 places each engine on as many nodes, but the run has 1",
        ),
        (
            recipe("qwen2.5-7b_64gpus", "weight_sync.transport=cuda_ipc"),
            "weight_sync.transport=cuda_ipc works only on one machine; set transport=store, which copies weights",
        ),
        (recipe(NAME, "weight_sync.transport=nccl", placement="separate"), None),
        (
            recipe(NAME, "rollout.tensor_parallel_size=1", "model.path=Qwen2.5-32B"),
            "(ranks 0 to 7) keeps 30.5 GiB while the engine on its GPU takes 62.5 GiB to load new weights: together",
        ),
        (
            recipe(NAME, "parallel.world_size=20"),
            "parallel.world_size=20 trainer ranks do not spread evenly over 3 nodes of 8 GPUs; take a multiple of 8",
        ),
        (recipe(NAME, "parallel.world_size=12"), None),
    ],
    ids=range(14),
)
def test_a_problem_names_the_sizes_that_do_not_fit(plan: Plan, problem: str | None) -> None:
    assert plan.fits == (problem is None)
    if problem is not None:
        assert any(problem in found for found in plan.problems), plan.problems


def test_colocated_engines_share_the_trainers_gpus_and_separate_ones_add_theirs() -> None:
    assert recipe(NAME).num_gpus == 8
    assert recipe(NAME, placement="separate").num_gpus == 16
    colocated, separate = recipe(NAME, STAYS), recipe(NAME, placement="separate")
    (stage,) = colocated.stages
    assert colocated.while_training(stage) - separate.while_training(stage) == 1.5 * 2**30
    engine = colocated.engine.total + 1.5 * 2**30
    assert colocated.while_generating(stage) - separate.while_generating(stage) == engine


def test_host_memory_counts_the_store_the_offloaded_optimizer_and_the_processes() -> None:
    plan = recipe(NAME, STAYS, "optimizer.cpu_offload=true", "checkpoint.async_save=false")
    version = 2 * 7_615_616_512
    offloaded = 8 * plan.stages[0].state.offloaded
    assert plan.host_bytes == offloaded + 8 * plan.engine.weights + 2 * version + 16 * 6 * 2**30
    assert offloaded == pytest.approx(16 * 7_615_616_512, rel=1e-3)  # fp32 copy, two moments and gradient


def test_host_memory_counts_the_copy_of_the_state_that_a_checkpoint_is_written_from() -> None:
    writing, waiting = (recipe(NAME, f"checkpoint.async_save={value}") for value in ("true", "false"))
    added = writing.host_bytes - waiting.host_bytes
    assert added == 8 * writing.checkpoint_copy(writing.stages[0])
    assert added == pytest.approx(12 * 7_615_616_512, rel=1e-3)  # fp32 parameters and two moments


def test_an_engine_that_does_not_sleep_keeps_its_memory_while_the_trainer_trains() -> None:
    asleep, awake = recipe(NAME), recipe(NAME, "rollout.sleep_level=0")
    (stage,) = awake.stages
    assert awake.while_training(stage) == stage.peak + awake.engine.total + 1.5 * 2**30
    assert asleep.while_training(stage) == stage.peak + 1.5 * 2**30
    assert asleep.host_bytes - awake.host_bytes == 8 * awake.engine.weights
    assert (asleep.fits, awake.fits) == (True, False)


def test_pipeline_stages_of_an_engine_share_layers_keys_values_and_time() -> None:
    whole = recipe(NAME, "rollout.num_engines=4", placement="separate")
    staged = recipe(NAME, "rollout.num_engines=4", "rollout.pipeline_parallel_size=2", placement="separate")
    assert (whole.num_gpus, staged.num_gpus) == (8 + 4, 8 + 8)
    assert staged.engine.kv_per_token == whole.engine.kv_per_token / 2
    embedding = 2 * 152064 * 3584
    assert 2 * (staged.engine.weights - embedding) == pytest.approx(whole.engine.weights - 2 * embedding, rel=1e-4)
    assert 0.5 * whole.time.generation < staged.time.generation < whole.time.generation
    twice = recipe(NAME, "rollout.num_engines=8", "rollout.pipeline_parallel_size=2")
    assert any("8 engines of 2 GPUs" in problem for problem in twice.problems)


def test_tensor_parallelism_over_two_nodes_decodes_at_the_speed_of_the_network() -> None:
    # With few responses at once, because the host hides the network otherwise.
    four = ("rollout.num_engines=4", "rollout.tensor_parallel_size=4", "rollout.max_num_seqs=32")
    inside, across = (
        recipe(NAME, *four, *more, placement="separate") for more in ((), ("rollout.nodes_per_engine=2",))
    )
    assert across.time.generation > 1.1 * inside.time.generation
    staged = ("rollout.num_engines=4", "rollout.tensor_parallel_size=2", "rollout.pipeline_parallel_size=2")
    inside, across = (
        recipe(NAME, *staged, *more, placement="separate") for more in ((), ("rollout.nodes_per_engine=2",))
    )
    assert across.time.generation == inside.time.generation


def test_a_direct_weight_transfer_needs_no_store_and_takes_less_time() -> None:
    stored, direct = recipe(NAME), recipe(NAME, "weight_sync.transport=cuda_ipc")
    assert stored.host_bytes - direct.host_bytes == 2 * 2 * 7_615_616_512
    # Every GPU reads all weights over NVLink, layer by layer.
    link = 450e9 * direct.assumptions.link_efficiency
    assert direct.time.weight_sync == pytest.approx(2 * 7_615_616_512 / link + 28 * LAYER_S)
    assert direct.time.weight_sync < stored.time.weight_sync / 10


def test_reused_groups_are_not_generated_again() -> None:
    once, twice = recipe(NAME), recipe(NAME, "rollout.max_reuse=2", "rollout.max_staleness=8")
    assert once.time.generation / 2 <= twice.time.generation < once.time.generation


def test_an_offloading_trainer_leaves_the_gpu_to_the_engine_and_uses_host_memory() -> None:
    stays = recipe(NAME, STAYS)
    offloads = recipe(NAME, "trainer.offload=true", "rollout.gpu_memory_utilization=0.9")
    (stage,) = offloads.stages
    state = stage.state
    assert not recipe(NAME, STAYS, "rollout.gpu_memory_utilization=0.9").fits
    assert offloads.fits
    assert offloads.while_training(stage) == stays.while_training(stage)
    assert offloads.while_generating(stage) == offloads.engine.total + 4.5 * 2**30
    moved = state.parameters + state.main_parameters + state.moments
    assert offloads.host_bytes - stays.host_bytes == 8 * moved


def test_trainer_and_engine_both_hold_weights_during_a_weight_update() -> None:
    plan = recipe(NAME, "trainer.offload=true", "rollout.kv_cache_gib=1", "parallel.tensor_model_parallel_size=1",
                  "parallel.sequence_parallel=false")  # fmt: skip
    (stage,) = plan.stages
    embedding = 2 * 152064 * 3584
    loading = stage.state.parameters + plan.engine.weights + embedding // plan.config.rollout.tensor_parallel_size
    assert plan.while_generating(stage) == loading + 4.5 * 2**30
    assert plan.while_generating(stage) > plan.engine.total + 4.5 * 2**30


@pytest.mark.parametrize("expert_parallel", [False, True])
def test_an_engine_holds_whole_tensors_of_a_layer_of_experts_while_it_loads_them(expert_parallel: bool) -> None:
    settings = ("rollout.colocate=false", f"rollout.enable_expert_parallel={expert_parallel}")
    stored, sent = (
        recipe("qwen3-30b-a3b_16gpus", *settings, f"weight_sync.transport={transport}", placement="separate")
        for transport in ("store", "nccl")
    )
    experts = 2 * 128 * 3 * 2048 * 768  # bytes of all of a layer
    num_ranks = sent.config.rollout.tensor_parallel_size
    assert stored.loading_bytes == pytest.approx(experts / num_ranks, rel=0.05)
    embedding = 2 * 151936 * 2048  # larger than a rank's own experts
    expected = embedding * (1 + 1 / num_ranks) if expert_parallel else experts * (1 + 1 / num_ranks)
    assert sent.loading_bytes == pytest.approx(expected, rel=0.05)


def test_an_engine_builds_experts_as_wide_as_it_pads_them_for_fp8_while_it_loads_them() -> None:
    settings = ("rollout.colocate=false", "rollout.enable_expert_parallel=false", "rollout.tensor_parallel_size=4")
    plain, padded = (
        recipe("qwen3-30b-a3b_16gpus", *settings, "weight_sync.transport=store", *more, placement="separate")
        for more in ((), ("rollout.quantization=fp8_per_block",))
    )
    assert padded.loading_bytes == pytest.approx(plain.loading_bytes * 256 / (768 / 4), rel=0.05)


def test_separate_engines_of_a_large_mixture_of_experts_need_gpu_memory_for_a_whole_layer() -> None:
    """16 GPUs per engine: a layer's 256 experts take 21 GiB on each, though only a sixteenth of them stays there."""
    settings = ("rollout.colocate=false", "model.path=models/DeepSeek-V3", "rollout.tensor_parallel_size=16")
    settings += ("rollout.nodes_per_engine=2", "rollout.gpu_memory_utilization=0.9")
    (problem,) = [
        problem
        for problem in recipe(NAME, *settings, "weight_sync.transport=nccl", placement="separate").problems
        if "while it loads new weights" in problem
    ]
    assert "set weight_sync.transport=store" in problem
    stored = recipe(NAME, *settings, "weight_sync.transport=store", placement="separate")
    assert not any("loads new weights" in problem for problem in stored.problems)


def test_the_way_out_names_the_key_that_sets_the_cache() -> None:
    settings = "rollout.kv_cache_gib=200", "weight_sync.transport=store"
    (separate,) = recipe(NAME, *settings, placement="separate").problems
    assert "lower rollout.kv_cache_gib=200" in separate
    assert "gpu_memory_utilization" not in separate
    assert "weight_sync.transport" not in separate
    (colocated,) = recipe(NAME, *settings).problems
    assert "(rollout.kv_cache_gib=200)" in colocated


def test_an_engine_leaves_room_for_its_cuda_context() -> None:
    """vLLM refuses to start if less than its share of the GPU is free (request_memory in vllm/v1/worker/utils.py)."""
    (problem,) = recipe(NAME, "rollout.gpu_memory_utilization=1.0", placement="separate").problems
    assert problem.startswith("rollout.gpu_memory_utilization=1.0 of an engine's GPU leaves 0.0 GiB")
    assert recipe(NAME, "rollout.gpu_memory_utilization=0.99", placement="separate").fits


def test_what_a_type_of_gpu_lacks_is_a_problem() -> None:
    (problem,) = recipe(NAME, "rollout.batch_invariant=true", gpu="A100", placement="separate").problems
    assert problem.startswith("A100: rollout.batch_invariant=true needs GPUs of compute capability 9.0 or higher")


def test_a_run_has_the_nodes_on_which_the_launcher_places_it() -> None:
    """12 trainer ranks take six GPUs of two nodes each, so that no engine of four GPUs fits beside them."""
    settings = "parallel.world_size=12", "rollout.tensor_parallel_size=4"
    plans = [recipe(NAME, *settings, f"rollout.num_engines={num}", placement="separate") for num in (1, 2, 3)]
    assert [(plan.num_gpus, plan.num_nodes) for plan in plans] == [(16, 3), (20, 3), (24, 4)]


def test_memory_does_not_depend_on_the_mean_response() -> None:
    """A minibatch may be of long responses only, and then a stage holds as many micro-batches as its schedule."""
    settings = "parallel.pipeline_model_parallel_size=4", "trainer.ppo_mini_batch_size=32"
    plans = [
        replace(plan, assumptions=replace(plan.assumptions, mean_response_fraction=mean))
        for plan in [recipe("qwen2.5-32b_64gpus", *settings, "trainer.max_tokens_per_gpu=18432")]
        for mean in (0.1, 0.5, 1.0)
    ]
    assert len({plan.while_training(plan.worst_stage) for plan in plans}) == 1
    assert max(plans[0].stages[0].in_flight) == 4


@pytest.mark.parametrize("settings", [("rollout.max_staleness=0",), ("rollout.colocate=true",)])
def test_generation_takes_time_of_its_own_where_it_does_not_overlap_with_training(settings: tuple[str, ...]) -> None:
    time = recipe("r1-distill-qwen-7b_16gpus_async", *settings).time
    assert time.total == time.generation + time.training + time.between + time.weight_sync + time.offload


def test_overlapped_generation_and_training_take_as_long_as_the_longer_of_the_two() -> None:
    name = "r1-distill-qwen-7b_16gpus_async"
    time = recipe(name, placement="separate").time
    assert time.total == max(time.generation, time.training) + time.between + time.weight_sync
    in_turn = recipe(name, "rollout.mode=sync", placement="separate").time
    assert in_turn.total == in_turn.generation + in_turn.training + in_turn.between + in_turn.weight_sync


def test_a_trainer_that_offloads_its_state_spends_time_on_it() -> None:
    time = recipe(NAME, "trainer.offload=true", "rollout.gpu_memory_utilization=0.9").time
    assert time.total == time.generation + time.training + time.offload + time.between + time.weight_sync
    assert time.offload > 1.0
    assert recipe(NAME, STAYS).time.offload == 0.0


def test_cuda_ipc_counts_the_contexts_of_the_engines_that_read_a_gpus_parameters() -> None:
    stored, direct = recipe(NAME), recipe(NAME, "weight_sync.transport=cuda_ipc")
    (stage,) = stored.stages
    for peak in "while_training", "while_generating":
        assert getattr(direct, peak)(stage) - getattr(stored, peak)(stage) == 7 * 0.5 * 2**30
