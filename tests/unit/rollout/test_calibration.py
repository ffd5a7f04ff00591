import json
from pathlib import Path

import numpy as np
import pytest
import yaml

from megatron_bapo.config.loading import load_config
from megatron_bapo.errors import UserError
from megatron_bapo.planning.hardware import Assumptions
from megatron_bapo.planning.known_models import architecture_of
from megatron_bapo.planning.plan import Plan
from megatron_bapo.rollout.calibration import planned_workload, recorded_workload
from megatron_bapo.rollout.simulation import simulate

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
FIXED_S, PER_SEQUENCE_S, TRAIN_S, SYNC_S = 0.01, 0.001, 2.0, 0.25


def recorded(folder: Path, **rollout: object) -> Path:
    """A run whose generation takes a fixed time a step and another one a token."""
    config = RUN | {"run_dir": str(folder), "rollout": RUN["rollout"] | rollout}
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    rng, rows = np.random.default_rng(0), []
    for step in range(1, 40):
        lengths = np.minimum(255, np.rint(np.exp(rng.normal(3.5, 0.6, 32))))
        generate = FIXED_S * lengths.max() + PER_SEQUENCE_S * lengths.sum()
        late = 100.0 * (step == 1)  # the first step warms up
        metrics = {
            "response_length/mean": lengths.mean(),
            "response_length/max": lengths.max(),
            "response_length/clip_ratio": 0.0,
            "perf/total_num_tokens": lengths.sum() + 32 * 12,
            "timing_s/generate": generate + late,
            "timing_s/weight_sync": SYNC_S,
            "timing_s/step": generate + TRAIN_S + SYNC_S + late,
        }
        rows.append({"step": step, "phase": "train", "time_s": 0.0, "metrics": metrics})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def test_what_a_run_was_recorded_with_is_found_again(tmp_path: Path):
    config, workload = recorded_workload(recorded(tmp_path))

    assert workload.engine.decode.overhead == pytest.approx(FIXED_S)
    assert workload.engine.decode.per_sequence == pytest.approx(PER_SEQUENCE_S)
    assert (workload.train_s, workload.engine.load_s) == pytest.approx((TRAIN_S, SYNC_S))
    assert (workload.prompt_tokens, workload.groups_per_batch, config.rollout.n) == (12, 8, 4)


def test_a_run_whose_longest_answers_are_all_alike_is_told_apart_by_one_with_other_batches(tmp_path: Path):
    folders = [tmp_path / name for name in ("small", "large")]
    for num, folder in zip((32, 96), folders, strict=True):
        folder.mkdir()
        recorded(folder)
        rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        for row in rows:
            row["metrics"] |= {
                "response_length/max": 256,
                "timing_s/generate": FIXED_S * 256 + PER_SEQUENCE_S * num * row["metrics"]["response_length/mean"],
            }
        (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        config = (folder / "config.yaml").read_text()
        config = config.replace("train_batch_size: 32", f"train_batch_size: {num}")
        (folder / "config.yaml").write_text(config)

    _, workload = recorded_workload(*folders)

    assert workload.engine.decode.overhead == pytest.approx(FIXED_S)
    assert workload.engine.decode.per_sequence == pytest.approx(PER_SEQUENCE_S)
    assert workload.groups_per_batch == 8


def test_a_simulated_sync_run_takes_as_long_as_the_recorded_one(tmp_path: Path):
    config, workload = recorded_workload(recorded(tmp_path))
    rows = [json.loads(line)["metrics"] for line in (tmp_path / "metrics.jsonl").read_text().splitlines()[1:]]

    simulated = simulate(config.rollout, workload, num_steps=len(rows))

    assert simulated.seconds == pytest.approx(sum(row["timing_s/step"] for row in rows), rel=0.05)


def test_runs_that_cannot_tell_how_long_generation_takes_are_refused(tmp_path: Path):
    with pytest.raises(UserError, match="calibrate from a synchronous run"):
        recorded_workload(recorded(tmp_path, mode="async"))


def test_a_short_run_is_refused(tmp_path: Path):
    metrics = recorded(tmp_path) / "metrics.jsonl"
    metrics.write_text("".join(metrics.read_text().splitlines(keepends=True)[:3]))

    with pytest.raises(UserError, match="has 2 steps after its first"):
        recorded_workload(tmp_path)


def test_a_plan_gives_its_times_and_the_lengths_that_are_asked_for():
    config = load_config(RECIPE, [])
    architecture, _ = architecture_of(config.model)
    plan = Plan(config, architecture, "H100", "separate", Assumptions())

    workload = planned_workload(plan, mean_response=16_000, sigma=1.0)

    assert workload.lengths.mean() == pytest.approx(16_000, rel=0.01)
    assert workload.engine.kv_tokens == plan.engine.kv_tokens
    assert workload.train_s < plan.time.training  # whose answers are half of the longest
    with pytest.raises(UserError, match="--mean-response"):
        planned_workload(plan, mean_response=70_000, sigma=1.0)
