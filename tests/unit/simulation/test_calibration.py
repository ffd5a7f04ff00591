import json
from dataclasses import astuple, replace
from pathlib import Path

import numpy as np
import pytest
import yaml

from megatron_bapo.config.loading import load_config
from megatron_bapo.errors import UserError
from megatron_bapo.planning.hardware import Assumptions
from megatron_bapo.planning.known_models import architecture_of
from megatron_bapo.planning.plan import Plan
from megatron_bapo.simulation.calibration import (
    RecordedRun,
    doubts_of,
    overlapping_run,
    planned_workload,
    recorded_run,
    recorded_workload,
    with_overlap,
)
from megatron_bapo.simulation.simulator import candidates, simulate

RECIPE = Path(__file__).parents[3] / "configs" / "recipes" / "paper_32b_64k.yaml"
RUN = {
    "model": {
        "create": {
            "num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 2,
            "num_key_value_heads": 2, "head_dim": 32,
        }
    },
    "data": {"train": {"reasoning_gym": {"chain_sum": {}}, "size": 60}, "max_prompt_length": 24},
    "reward": {"type": "reasoning_gym"},
    "rollout": {"n": 4, "max_response_length": 256},
    "trainer": {"total_steps": 9, "train_batch_size": 32, "ppo_mini_batch_size": 16, "max_tokens_per_gpu": 512},
}  # fmt: skip
STEP_S, ANSWER_STEP_S, TOKEN_S, ANSWER_S, SCORE_S, TRAIN_TOKEN_S, SYNC_S = 0.01, 0.001, 1e-5, 0.002, 0.1, 1e-3, 0.25
PROMPT_TOKENS = 12


def decode_s(lengths_GN: np.ndarray, num_steps: int) -> float:
    """Return the seconds of `num_steps` steps; the prompt's KV cache counts for the first response."""
    seconds, context_GN = 0.0, np.array([PROMPT_TOKENS, 0, 0, 0])
    for step in range(num_steps):
        runs_GN = lengths_GN > step
        seconds += STEP_S + ANSWER_STEP_S * runs_GN.sum() + TOKEN_S * (runs_GN * (context_GN + step)).sum()
    return seconds


def recorded(folder: Path, *, num: int = 32, num_steps: int = 20, alike: bool = False, **rollout: object) -> Path:
    """Write the files of a synchronous run on an engine with these costs; with `alike` all lengths are equal."""
    folder.mkdir(exist_ok=True)
    config = RUN | {"run_dir": str(folder), "rollout": RUN["rollout"] | rollout}
    config["trainer"] = RUN["trainer"] | {"train_batch_size": num}
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    rng, rows, requests, start = np.random.default_rng(0), [], [], 50.0
    for step in range(1, num_steps + 1):
        lengths = np.minimum(255, np.rint(np.exp(rng.normal(3.5, 0.6, (num // 4, 4))))).astype(int)
        lengths = np.full_like(lengths, 40) if alike else lengths
        ends = [ANSWER_S * num + decode_s(lengths, int(longest)) for longest in lengths.max(1)]
        late = 100.0 * (step == 1)  # the first step warms up
        requests += [
            {
                "step": step, "prompt_serial": order, "engine": "engine 0",
                "sent_s": start, "answered_s": start + end + late,
                "num_prompt_tokens": PROMPT_TOKENS, "num_tokens": lengths[order].tolist(),
            }
            for order, end in enumerate(ends)
        ]  # fmt: skip
        generate = max(ends) + SCORE_S + late
        num_tokens = num * PROMPT_TOKENS + int(lengths.sum())
        train = TRAIN_TOKEN_S * num_tokens
        metrics = {
            "perf/cpu_cores": 2,
            "perf/cpu_s/rollouts": 1.5 * generate,
            "perf/cpu_s/update": 1.25 * train,
            "perf/total_num_tokens": num_tokens,
            "timing_s/generate": generate,
            "timing_s/weight_sync": SYNC_S,
            "timing_s/step": generate + train + SYNC_S,
        }
        rows.append({"step": step, "phase": "train", "time_s": 0.0, "metrics": metrics})
        start += 1000.0
    held_out = requests[-1] | {"prompt_serial": -1, "answered_s": 1e6}
    for name, written in (("metrics", rows), ("requests", [*requests, held_out])):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in written))
    return folder


def test_the_costs_of_a_recorded_run_are_recovered(tmp_path: Path):
    run = recorded_run(recorded(tmp_path))

    workload, costs = recorded_workload(run)

    assert astuple(costs.decode) == pytest.approx((STEP_S, ANSWER_STEP_S, TOKEN_S))
    assert (workload.engine.sequence_s, workload.score_s) == pytest.approx((ANSWER_S, SCORE_S))
    batch_s = TRAIN_TOKEN_S * 32 * (PROMPT_TOKENS + workload.lengths.mean())
    assert (workload.train_s, workload.engine.load_s) == pytest.approx((batch_s, SYNC_S))
    assert workload.stale_train_share == pytest.approx(1 / 7)  # two updates, the first of which has no scoring pass
    cores = (workload.num_cores, workload.engine.num_cores, workload.trainer_cores)
    assert cores == pytest.approx((2, 1.5, 1.25))
    assert (workload.prompt_tokens, workload.groups_per_batch, len(workload.lengths)) == (12, 8, 19 * 32)
    assert costs.uncertain == []


def test_a_simulated_sync_run_takes_as_long_as_the_recorded_one(tmp_path: Path):
    run = recorded_run(recorded(tmp_path))

    simulated = simulate(run.config.rollout, recorded_workload(run)[0], num_steps=100)

    assert simulated.seconds / 100 == pytest.approx(run.mean("timing_s/step"), rel=0.03)


def test_responses_of_one_length_do_not_separate_costs_and_another_batch_size_does(tmp_path: Path):
    alike = recorded_run(recorded(tmp_path / "alike", alike=True))
    larger = recorded_run(recorded(tmp_path / "larger", num=96))

    (_, alone), (workload, costs) = recorded_workload(alike), recorded_workload(alike, larger)

    assert "do not separate these costs" in doubts_of(alone, {})[0]
    assert doubts_of(costs, {}) == []
    assert astuple(costs.decode) == pytest.approx((STEP_S, ANSWER_STEP_S, TOKEN_S))
    assert workload.groups_per_batch == 8


def test_settings_with_more_sequences_per_engine_than_the_recorded_run_are_named(tmp_path: Path):
    run = recorded_run(recorded(tmp_path))
    workload, costs = recorded_workload(run)
    found = candidates(run.config.rollout)
    results = {name: simulate(found[name], workload, num_steps=4) for name in ("sync", "async 8")}

    (doubt,) = doubts_of(costs, results)

    assert "the 32 of the recorded runs with: async 8;" in doubt


def test_an_asynchronous_run_is_refused_for_calibration(tmp_path: Path):
    with pytest.raises(UserError, match="calibrate from a synchronous run"):
        recorded_run(recorded(tmp_path, mode="async"))


@pytest.mark.slow
def test_an_asynchronous_run_gives_the_number_of_shared_cores(tmp_path: Path):
    workload, _ = recorded_workload(recorded_run(recorded(tmp_path)))
    settings = load_config(tmp_path / "config.yaml", ["rollout.mode=async"])
    expected = replace(workload, num_cores=1.7)
    seconds = simulate(settings.rollout, expected, num_steps=30, num_first_steps=2).seconds / 30
    overlapping = RecordedRun(tmp_path, settings, 2, [{"timing_s/step": seconds}] * 30, [])

    assert with_overlap(workload, overlapping).num_cores == pytest.approx(1.7, abs=0.1)


def test_a_synchronous_run_is_refused_for_the_number_of_shared_cores(tmp_path: Path):
    with pytest.raises(UserError, match="give a run with mode=async"):
        overlapping_run(recorded(tmp_path))


def test_a_short_run_is_refused(tmp_path: Path):
    with pytest.raises(UserError, match="has 2 steps after its first 1"):
        recorded_run(recorded(tmp_path, num_steps=3))


def test_a_folder_without_a_run_is_refused(tmp_path: Path):
    with pytest.raises(UserError, match=r"metrics\.jsonl is missing; give the directory of a run"):
        recorded_run(tmp_path)


def test_a_run_without_its_requests_is_refused(tmp_path: Path):
    (recorded(tmp_path) / "requests.jsonl").unlink()

    with pytest.raises(UserError, match=r"requests\.jsonl is missing"):
        recorded_run(tmp_path)


def test_a_planned_workload_has_the_plans_times_and_the_requested_lengths():
    config = load_config(RECIPE, [])
    architecture, _ = architecture_of(config.model)
    plan = Plan(config, architecture, "H100", Assumptions())

    workload = planned_workload(plan, mean_response=16_000, sigma=1.0)

    assert workload.lengths.mean() == pytest.approx(16_000, rel=0.01)
    assert workload.engine.kv_tokens == plan.engine.kv_tokens
    assert workload.engine.shares_prompts
    assert workload.train_s < plan.time.training  # the plan assumes a mean of half the longest response
    with pytest.raises(UserError, match="--mean-response"):
        planned_workload(plan, mean_response=70_000, sigma=1.0)
