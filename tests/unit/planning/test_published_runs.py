"""The planner against published runs of other trainers (bench/published_runs.yaml)."""

from dataclasses import replace
from math import ceil, floor, log

import pytest

from bench.published_folds import EFFICIENCIES, estimated, model_folds, model_spreads
from bench.published_runs import Interval, PublishedRun, geometric_mean, published_runs, summary
from megatron_bapo.planning.hardware import Assumptions
from megatron_bapo.planning.model_state import model_state
from megatron_bapo.planning.spread import PUBLISHED, STEP_SPREAD, step_range

RUNS = published_runs()
PHASES = ("training_s", "generation_s", "sync_s")
"""Parts of a step, which the sources cut differently; only the whole step is held to the tolerance."""


def test_the_geometric_mean_of_planned_over_published_seconds_is_near_1() -> None:
    found = summary({run.name: run.time_ratio() for run in RUNS})
    assert 0.9 < found["steps_geometric_mean"] < 1.1
    assert 0.9 < found["transfers_geometric_mean"] < 1.1
    assert found["steps_within_25_percent"] > 0.9


@pytest.mark.parametrize("run", [run for run in RUNS if not run.exception], ids=lambda run: run.name)
def test_a_published_figure_is_within_a_quarter_of_the_planned_range(run: PublishedRun) -> None:
    off = [each for each in run.comparisons() if not each.agrees and each.figure not in PHASES]
    assert off == []


@pytest.mark.parametrize("run", RUNS, ids=lambda run: run.name)
def test_no_published_layout_is_refused_for_memory(run: PublishedRun) -> None:
    assert run.memory_problems() == []


@pytest.mark.slow
def test_the_spread_that_plans_print_is_that_of_models_that_no_efficiency_has_seen() -> None:
    outwards = {
        has_experts: (floor(100 * low) / 100, ceil(100 * high) / 100)
        for has_experts, (low, high) in model_spreads().items()
    }
    assert outwards == STEP_SPREAD


KEPT = ("mean_prompt_fraction", "mean_response_fraction")


def open_lengths(run: PublishedRun) -> list[float]:
    """Return the mean response lengths that are tried where the source does not publish it; else that of the row."""
    return run.fields.get("open", {}).get("response", [run.fields.get("response")])


RL_STEPS = [run for run in RUNS if "step_s" in run.fields["published"] and not (run.trains_only or run.exception)]


@pytest.mark.parametrize("run", RL_STEPS, ids=lambda run: run.name)
def test_a_published_step_is_in_the_range_that_its_plan_prints(run: PublishedRun) -> None:
    """Also if the plan has this trainer's own assumptions instead of those about the project that published it."""
    assert PUBLISHED.items() <= run.base["assumptions"].items()
    published, plans = Interval.of(run.fields["published"]["step_s"]), [run.plan(response=n) for n in open_lengths(run)]
    own = [
        replace(plan, assumptions=Assumptions(**{name: getattr(plan.assumptions, name) for name in KEPT}))
        for plan in plans
    ]
    for ranges in ([step_range(plan) for plan in plans], [step_range(plan) for plan in own]):
        assert min(shortest for shortest, _ in ranges) <= published.high
        assert max(longest for _, longest in ranges) >= published.low


def test_the_pipeline_stage_with_the_most_state_moves_it_the_longest() -> None:
    """The first stage of DeepSeek-V3 has its three dense layers, and few parameters."""
    plan = next(run for run in RUNS if run.name == "nemo-rl-deepseek-v3-sync").plan()
    first, second = (model_state(plan.config, plan.architecture, n, assumptions=plan.assumptions) for n in (0, 1))
    assert second.optimizer > 5 * first.optimizer
    moved = 2 * (second.on_device - second.gradients) / 20e9 + second.optimizer * (1 / 2.8e9 - 1 / 20e9)
    assert plan.time.offload == pytest.approx(moved)
    assert plan.time.trainer.swap >= 3 * second.parameters / 20e9


def test_efficiencies_of_some_runs_plan_the_others() -> None:
    """By model, so that neither the left-out model's layers nor its layouts have been seen."""
    ratios = {run: ratio for values in model_folds().values() for run, ratio in values.items()}
    assert set(ratios) == {run.name for run in RUNS if run.group == "steps"}
    assert sum(0.8 <= ratio <= 1.25 for ratio in ratios.values()) / len(ratios) > 0.9
    assert 0.9 < geometric_mean(list(ratios.values())) < 1.1


def test_estimated_efficiencies_fit_their_runs_better_than_wrong_ones() -> None:
    runs = [run for run in RUNS if run.group == "steps" and not run.exception]

    def error(**values: float) -> float:
        return sum(log(run.time_ratio(**values)) ** 2 for run in runs)

    found = estimated(runs)
    assert set(found) == set(EFFICIENCIES)
    assert error(**found) < error()
    for name in ("compute_efficiency", "fp8_efficiency"):
        assert error(**found) < min(error(**found | {name: found[name] * factor}) for factor in (0.8, 1.25))


def test_held_out_runs_are_planned_as_well_as_those_behind_the_efficiencies() -> None:
    """But for those that the planner cannot express, are off, or do not publish how long responses are."""
    ratios = [run.time_ratio() for run in RUNS if run.is_held_out and not run.exception and len(open_lengths(run)) == 1]
    assert len(ratios) >= 80
    assert all(0.8 <= ratio <= 1.25 for ratio in ratios)
    assert 0.9 < geometric_mean(ratios) < 1.1


def test_every_run_names_its_source_and_has_its_own_name() -> None:
    assert len({run.name for run in RUNS}) == len(RUNS)
    assert all(run.fields["source"] for run in RUNS)


def test_a_step_that_waits_for_the_host_waits_longer_in_fp8() -> None:
    """The host quantizes four tensors of each of 16 experts in 48 layers of 64 micro-batches."""
    run = next(run for run in RUNS if run.name == "qwen3-30b-a3b-mxfp8-b200-mbs1")
    narrow, wide = (run.plan(fp8=recipe).time.trainer for recipe in ("mxfp8", None))
    assert narrow.launch > 0
    assert wide.launch > 0
    assert narrow.total - wide.total == pytest.approx(64 * 48 * 16 * 4 * 30e-6, rel=0.01)


def test_a_step_with_deepep_waits_for_the_host_and_one_in_cuda_graphs_does_not() -> None:
    """256 micro-batches pass the slowest stage, of 11 layers and the output layer; graphs halve the host's time."""
    run = next(run for run in RUNS if run.name == "zoo-235b-tp4")
    kernels, graphs, slow_graphs, slow = (
        run.plan(dispatcher=name, host_expert_layer_ms=ms).time.trainer.launch
        for name, ms in (("deepep", 10), ("hybridep", 10), ("hybridep", 20), ("deepep", 20))
    )
    assert graphs == 0
    assert kernels == slow_graphs > 0
    assert slow - kernels == pytest.approx(256 * 11 * 10e-3)


def test_tokens_of_a_router_with_groups_cross_to_fewer_hosts() -> None:
    """DeepSeek-V3 chooses from 4 of 8 groups, which are the experts of 8 hosts here."""
    plan = next(run for run in RUNS if run.name == "deepseek-v3-bf16").plan()
    free = replace(plan, architecture=replace(plan.architecture, n_group=1, topk_group=1))
    reached = 0.5 * (1 - (1 - 1 / 4) ** 8), 1 - (1 - 1 / 8) ** 8
    assert plan.time.trainer.expert / free.time.trainer.expert == pytest.approx(
        reached[0] / reached[1], rel=0.02
    )  # with the latency


def test_experts_on_other_hosts_cost_what_crosses_hosts() -> None:
    """Of 16 expert-parallel ranks half are on the same host, so that half of the copies cross the network."""
    across, near = (
        next(run for run in RUNS if run.name == "qwen3-30b-a3b-bf16-alltoall").plan(EP=ep) for ep in (16, 8)
    )
    layers, hops, tokens, copies, hidden = 48, 4, 4096, 8, 2048 * 2
    crossing = layers * hops * tokens * copies * hidden * 64 / 2 / (50e9 * 0.7)
    assert across.time.trainer.expert == pytest.approx(crossing, rel=0.06)  # and the latency of 4 collectives a layer
    assert near.time.trainer.expert < across.time.trainer.expert / 4
