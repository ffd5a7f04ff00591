from dataclasses import replace

import pytest

from megatron_bapo.config.checks import check_planned
from megatron_bapo.planning.advice import advice, obstacles
from megatron_bapo.planning.hardware import Assumptions
from megatron_bapo.planning.placement import alike_nodes, place_run
from megatron_bapo.planning.plan import Plan
from megatron_bapo.planning.rendering import layout_name
from megatron_bapo.planning.search import search
from megatron_bapo.planning.settings import Placement, changes
from tests.unit.planning.examples import changed, recipe

NAME = "qwen2.5-7b_8gpus"


def overrides_that_fit(plan: Plan) -> list[str]:
    fitting = advice(plan)
    assert fitting is not None
    return changes(plan.config, fitting.config)


@pytest.mark.slow
def test_a_search_ranks_layouts_that_keep_the_rules_and_fit() -> None:
    plan = recipe(NAME)
    found = search(plan, 16)
    assert len(found) > 50
    for each in found:
        assert each.problems == []
        assert each.config.parallel.world_size == each.num_gpus == 16
        check_planned(each.config, each.architecture, "the model")
    assert found[0].time.total <= 1.02 * recipe("qwen2.5-7b_16gpus").time.total


def test_layouts_that_are_clearly_slower_than_the_best_follow_by_step_time() -> None:
    seconds = [each.time.total for each in search(recipe(NAME), 16)]
    num_near = sum(each <= 1.02 * min(seconds) for each in seconds)
    assert 1 < num_near < len(seconds)
    assert max(seconds[:num_near]) <= 1.02 * min(seconds)
    assert seconds[num_near:] == sorted(seconds[num_near:])


@pytest.mark.slow
def test_of_layouts_that_are_about_as_fast_the_one_with_the_most_free_memory_comes_first() -> None:
    found = search(recipe("qwen2.5-32b_64gpus"), 64)
    fastest = min(found, key=lambda each: each.time.total)
    assert [layout_name(each.config) for each in found[:2]] == [
        "TP4 PP2 DP8 offload trainer offload",
        "TP4 PP2 DP8 trainer offload",
    ]
    assert found[0].time.total > fastest.time.total
    near = found[: found.index(fastest) + 1]
    memory = [round(each.while_training(each.worst_stage) / 2**30) for each in near]
    assert memory == sorted(memory)


def test_of_layouts_that_are_about_as_fast_and_as_full_the_one_with_fewer_parallel_dimensions_comes_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("megatron_bapo.planning.search.NEAR_BEST", 0.15)
    found = search(recipe(NAME), 8)
    fastest = min(each.time.total for each in found)
    near = [each for each in found if each.time.total <= 1.15 * fastest]
    sizes = ("tensor", "pipeline", "virtual_pipeline", "expert")
    keys = [
        (
            round(each.while_training(each.worst_stage) / 2**30),
            sum(getattr(each.config.parallel, f"{size}_model_parallel_size") > 1 for size in sizes)
            + (each.config.parallel.context_parallel_size > 1),
        )
        for each in near
    ]
    assert keys == sorted(keys)
    assert len({memory for memory, _ in keys}) < len(set(keys))  # some need as much memory with other dimensions


@pytest.mark.parametrize("name", [NAME, "qwen3-30b-a3b_8gpus"])
@pytest.mark.slow
def test_the_overrides_of_a_layout_lead_to_it(name: str) -> None:
    plan = recipe(name)
    for found in search(plan, 8)[:20]:
        assert changed(plan, changes(plan.config, found.config), name).config == found.config


def test_separate_engines_and_trainer_share_the_gpus_between_them() -> None:
    found = search(recipe(NAME, placement="separate"), 16)
    assert found
    assert {each.num_gpus for each in found} == {16}
    assert {each.config.parallel.world_size for each in found} == {4, 8, 12}


@pytest.mark.parametrize(("configured", "large"), [(4, ()), (1, (2, 4))])
def test_engines_may_be_of_the_configured_size_or_larger_where_no_usual_one_holds_the_weights(
    configured: int, large: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("megatron_bapo.planning.search.SIZES", (1,))
    monkeypatch.setattr("megatron_bapo.planning.search.LARGE_SIZES", large)
    plan = recipe("qwen2.5-32b_8gpus", f"rollout.tensor_parallel_size={configured}", placement="separate")
    found = search(replace(plan, separate_gpu_name="L40S"), 16)
    beside = [each.config.rollout for each in found if each.config.parallel.world_size == 8]  # on a node of their own
    assert {rollout.tensor_parallel_size for rollout in beside} == {4}


def test_layouts_that_the_launcher_cannot_place_are_left_out() -> None:
    """It spreads 12 trainer ranks over two nodes, which leaves two GPUs on each and eight on the third."""
    found = search(recipe("qwen3-32b_8gpus", placement="separate"), 24)
    nodes = alike_nodes(3, 8)
    assert {each.config.parallel.world_size for each in found} >= {8, 12, 16}
    for each in found:
        assert len(place_run(each.config, nodes).engine_nodes) == each.config.rollout.num_engines


def test_nothing_is_found_where_nothing_fits() -> None:
    assert search(recipe("qwen2.5-32b_8gpus"), 1) == []


@pytest.mark.parametrize(
    ("name", "overrides", "expected"),
    [
        (
            NAME,
            ["trainer.offload=false", "rollout.gpu_memory_utilization=0.9"],
            ["rollout.gpu_memory_utilization=0.55"],
        ),
        (NAME, ["trainer.max_tokens_per_gpu=40000"], ["trainer.max_tokens_per_gpu=9216"]),
        (NAME, ["rollout.num_engines=16"], None),
    ],
    ids=str,
)
def test_what_is_advised_fits_and_is_the_smallest_change(
    name: str, overrides: list[str], expected: list[str] | None
) -> None:
    plan = recipe(name, *overrides)
    assert not plan.fits
    advised = overrides_that_fit(plan)
    assert changed(plan, [*overrides, *advised], name).problems == []
    if expected is not None:
        assert [override.split("=")[0] for override in advised] == [override.split("=")[0] for override in expected]


LARGE = ("qwen3-235b-a22b_128gpus", "checkpoint.async_save=true")


def test_where_only_host_memory_is_short_checkpoints_are_written_while_training_waits() -> None:
    plan = recipe(*LARGE)
    assert ["host memory" in problem for problem in plan.problems] == [True]
    assert overrides_that_fit(plan) == ["checkpoint.async_save=false"]
    assert recipe(LARGE[0]).fits


def test_where_gpu_and_host_memory_are_short_both_ways_out_are_given() -> None:
    plan = recipe(*LARGE, "trainer.max_tokens_per_gpu=60000")
    assert len(plan.problems) == 2
    assert overrides_that_fit(plan) == ["trainer.max_tokens_per_gpu=9216", "checkpoint.async_save=false"]


@pytest.mark.slow
def test_a_search_lets_training_wait_for_checkpoints_where_host_memory_is_short() -> None:
    """The layout that is searched from fits in neither memory, and no small change of it does."""
    plan = recipe(*LARGE, "parallel.pipeline_model_parallel_size=1")
    assert "checkpoint.async_save=false" in overrides_that_fit(plan)


def test_no_advice_is_given_where_no_layout_fits() -> None:
    two = ("parallel.world_size=2", "parallel.tensor_model_parallel_size=2", "parallel.pipeline_model_parallel_size=1")
    two += ("rollout.num_engines=1", "rollout.tensor_parallel_size=2")
    assert advice(recipe("qwen2.5-32b_8gpus", *two)) is None


def test_sizes_that_are_no_powers_of_two_are_tried_where_they_divide_the_gpus() -> None:
    found = search(recipe(NAME), 6)
    assert {each.config.parallel.pipeline_model_parallel_size for each in found} >= {1, 2, 3, 6}


@pytest.mark.parametrize(
    "overrides",
    [["optimizer.grads_dtype=bfloat16"], ["optimizer.moments_dtype=bfloat16", "optimizer.adam_beta2=0.99"]],
    ids=str,
)
@pytest.mark.slow
def test_an_adam_with_bfloat16_is_not_offloaded(overrides: list[str]) -> None:
    layout = ("optimizer.cpu_offload=false", "parallel.world_size=4")  # no small change fits
    plan = recipe("qwen3-8b_8gpus", *layout, *overrides)
    assert "parallel.world_size=8" in overrides_that_fit(plan)
    assert not any(each.config.optimizer.cpu_offload for each in search(plan, 8))
    near, _ = obstacles(plan, 1)
    assert near is not None
    assert not near.config.optimizer.cpu_offload


@pytest.mark.slow
def test_larger_sizes_are_tried_where_the_usual_ones_do_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megatron_bapo.planning.search.USUAL_SIZE", 1)
    found = search(recipe("qwen2.5-32b_8gpus"), 8)
    assert found
    assert all(each.config.parallel.model_parallel_size > 1 for each in found)


def test_the_nearest_layout_names_host_memory_where_that_is_the_limit() -> None:
    plan = replace(recipe(NAME), assumptions=Assumptions(host_memory_gib=100))
    assert search(plan, 8) == []
    near, lines = obstacles(plan, 8)
    assert near is not None
    assert not near.problems_of_gpus
    assert any("of host memory; it is assumed to have 100 GiB" in line for line in lines)
    assert lines[-1].startswith("Take nodes with more host memory (--host-gib")
    assert not any("GPUs, or shorter" in line for line in lines)


@pytest.mark.parametrize(
    ("placement", "num_gpus", "ways"),
    [
        ("separate", 16, "weight_sync.transport=nccl."),
        ("colocated", 16, "rollout.colocate=false and weight_sync.transport=nccl."),
        ("colocated", 8, "weight_sync.transport=cuda_ipc, or rollout.colocate=false and weight_sync.transport=nccl."),
    ],
)
def test_the_nearest_layout_names_transports_without_a_store_that_its_placement_allows(
    placement: Placement, num_gpus: int, ways: str
) -> None:
    settings = ("rollout.sleep_level=0", "checkpoint.async_save=false", "trainer.offload=false")
    plan = recipe("qwen2.5-32b_16gpus", *settings, gpu="B200", placement=placement)
    plan = replace(plan, assumptions=Assumptions(host_memory_gib=20, process_gib=1))
    (line,) = {line for line in obstacles(plan, num_gpus)[1] if "of weight store" in line}
    assert line.endswith(f" of weight store; it is not needed with {ways}")


def test_the_nearest_layout_names_the_gpus_where_they_are_the_limit() -> None:
    _, lines = obstacles(recipe("qwen2.5-32b_8gpus"), 1)
    assert "while it trains; an H100 has 79.2 GiB" in lines[0]
    assert lines[-1] == "Take more or larger GPUs, or shorter responses."


@pytest.mark.parametrize("num_gpus", [10**6, 10**23])
def test_a_number_of_gpus_on_which_every_layout_breaks_a_rule_names_the_rule(num_gpus: int) -> None:
    near, lines = obstacles(recipe(NAME), num_gpus)
    assert near is None
    assert lines[0].startswith(f"no sizes of the axes that divide {num_gpus} GPUs keep the rules; take another number")
    assert lines[1].startswith("trainer.ppo_mini_batch_size=1024 trajectories must be at least one for each of the ")


def test_a_number_of_gpus_that_the_teachers_engines_take_is_named() -> None:
    teacher = "{teacher: models/Qwen2.5-32B, engines: {num_engines: 1, tensor_parallel_size: 8}}"
    distill = ("algorithm.objective=distill", f"algorithm.distillation={teacher}", "reward.type=none")
    plan = recipe(NAME, *distill)
    near, (line,) = obstacles(plan, 8)
    assert near is None
    assert line.startswith(
        "algorithm.distillation.engines takes 8 of --num-gpus=8, which leaves no GPU for the trainer"
    )
    _, lines = obstacles(plan, 8 + 10**6)
    assert lines[0].startswith("no sizes of the axes that divide 1000000 GPUs keep the rules")


def test_a_search_on_any_number_of_gpus_ends() -> None:
    assert search(recipe(NAME), 10**23) == []
