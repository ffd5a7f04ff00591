"""Sampled rollouts of real training steps, compared with the metrics of their updates."""

from __future__ import annotations

import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from threading import Event
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from megatron_bapo.config.schema import Config
from megatron_bapo.controller.colocation import ColocationManager
from megatron_bapo.controller.prompt_sets import load_task_prompts
from megatron_bapo.controller.recorded_rollouts import RecordedRollouts
from megatron_bapo.controller.recorder import Recorder
from megatron_bapo.controller.rollout_sampler import RolloutSampler
from megatron_bapo.controller.run import Run, Timer
from megatron_bapo.controller.run_state import RunState
from megatron_bapo.controller.training_loop import prepare_engines, take_groups, update_on_batch
from megatron_bapo.data.rollout_files import RolloutHeader, rollout_files, write_rollouts
from megatron_bapo.data.rollout_samples import read_sample_header
from megatron_bapo.metrics.values import scalars
from megatron_bapo.model.hf_create import create_checkpoint
from megatron_bapo.parallel.groups import ParallelGroups
from megatron_bapo.records import Group, Prompt, Trajectory, VersionSpan
from megatron_bapo.rollout.generation import ScoredGroups
from megatron_bapo.rollout.tokenization import load_tokenizer
from megatron_bapo.run_directory import RunDirectory
from megatron_bapo.trainer.checkpoint_writer import CheckpointWriter
from megatron_bapo.trainer.micro_batches import Example
from megatron_bapo.trainer.token_trace import TokenTrace
from megatron_bapo.trainer.worker import create_worker
from tests.unit.controller.test_training_loop import make_config as make_run_config

# Megatron-Core warns about its own defaults and calls.
pytestmark = pytest.mark.filterwarnings("ignore")

NUM_GROUPS, N, NUM_STEPS = 4, 2, 3


def make_config(run_dir: Path, **sections: Any) -> Config:
    own = {
        "trainer": {"total_steps": NUM_STEPS, "train_batch_size": NUM_GROUPS * N, "ppo_mini_batch_size": 4},
        "rollout": {"n": N, "max_response_length": 8},
        "logging": {"rollouts": {"every_steps": 1, "num_prompts": NUM_GROUPS}},
    }
    return make_run_config(run_dir, **own | sections)


def make_groups(num_tokens: int) -> list[Group]:
    """Return groups whose behaviour log-probs put ratios on both sides of the bounds, and replies of an environment."""
    rng, groups = np.random.default_rng(0), []
    for index in range(NUM_GROUPS):
        trajectories, prompt = [], rng.integers(4, num_tokens, 3).astype(np.int32)
        for number in range(N):
            size = int(rng.integers(4, 8))
            mask = np.ones(size, bool)
            mask[1:3] = index != 0
            log_probs = (-np.log(num_tokens) + 0.7 * rng.standard_normal(size)).astype(np.float32)[mask]
            trajectories.append(
                Trajectory(
                    prompt,
                    rng.integers(4, num_tokens, size).astype(np.int32),
                    log_probs,
                    (VersionSpan(0, 1), VersionSpan(1, len(log_probs) - 1)),
                    "length" if number else "stop",
                    "",
                    reward=float(number),
                    loss_mask=None if mask.all() else mask,
                )
            )
        prompt = Prompt(f"p:{index}", ({"role": "user", "content": "1 + 1"},), "2", "p")
        groups.append(Group(prompt, tuple(trajectories)))
    return groups


def start(config: Config, mesh: ParallelGroups) -> Run:
    """Start a run on the same recorded batch in every step."""
    texts = [prompt.messages[0]["content"] for prompt in load_task_prompts(config).train]
    create_checkpoint(config.model_path, config.model.create, texts, config.seed)
    directory = RunDirectory(config.run_dir)
    directory.create()
    vocab_size = len(load_tokenizer(config.model_path))
    for step in range(1, NUM_STEPS + 1):
        header = RolloutHeader(
            step=step, policy_version=2, num_groups=NUM_GROUPS, n=N, vocab_size=vocab_size, num_reward_timeouts=0
        )
        write_rollouts(config.run_dir / "recorded", header, make_groups(vocab_size), None)
    worker = create_worker(config, config.model_path, mesh)
    rollouts = RecordedRollouts(config, config.run_dir / "recorded", 0)
    state, sampler = RunState(), RolloutSampler(config, directory.sampled_rollouts, mesh)
    colocation = ColocationManager(config, mesh, None)
    writer = CheckpointWriter(worker, directory.checkpoints, rollouts)
    return Run(config, directory, worker, None, colocation, state, rollouts, None, sampler, writer, None)


def train_steps(run: Run, num: int) -> list[list[dict[str, float | None]]]:
    """Train on `num` batches; return the metrics of each step's updates."""
    seen = []
    prepare_engines(run)
    for step in range(1, num + 1):
        scored, trajectories = take_groups(run, Timer())
        _, updates, _ = update_on_batch(run, scored, trajectories)
        seen.append([scalars(update) for update in updates])
        run.state.step = step
    run.sampler.flush()
    run.sampler.close()
    return seen


@pytest.mark.slow
def test_chosen_groups_take_no_memory_until_they_are_written(tmp_path: Path, groups: ParallelGroups) -> None:
    run, size = start(make_config(tmp_path), groups), 1 << 18
    tokens, log_probs = np.zeros(size, np.int32), np.zeros(size, np.float32)
    trajectory = Trajectory(tokens, tokens, log_probs, (VersionSpan(0, size),), "stop", "")
    batch = ScoredGroups([Group(group.prompt, (trajectory,) * N) for group in make_groups(50)], 0)
    trace = TokenTrace.of([trajectory] * NUM_GROUPS * N, range(NUM_GROUPS * N))
    examples = [Example(trajectory, 0.0, 0.0)] * NUM_GROUPS * N
    written, run.sampler._writer = Event(), ThreadPoolExecutor(1)
    run.sampler._writer.submit(written.wait)
    tracemalloc.start()
    run.sampler.choose(1, batch)
    run.sampler.write(run.state, trace, examples)
    taken_bytes, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    written.set()
    run.sampler.flush()
    run.sampler.close()

    assert taken_bytes < size
    rows = pq.read_table(
        rollout_files(run.directory.sampled_rollouts)[1], columns=["num_tokens", "log_probs"]
    ).to_pylist()
    assert rows == [{"num_tokens": size, "log_probs": None}] * NUM_GROUPS * N


def flat(rows: list[dict[str, Any]], name: str) -> np.ndarray:
    return np.concatenate([row[name] for row in rows])


@pytest.mark.parametrize(
    "algorithm",
    [
        {"objective": "bapo"},
        {"objective": "bapo", "clip_bounds": {"scope": "microbatch"}},
        {"objective": "gspo", "clip_ratio_low": 0.01, "clip_ratio_high": 0.01, "clip_ratio_c": 1.01},
        {"objective": "ppo", "clip_ratio_c": 1.1},
        {
            "objective": "ppo",
            "behaviour_policy": "recomputed",
            "rollout_correction": {"rollout_rs": "token", "rollout_rs_threshold": 1.5, "rollout_is": "token"},
        },
    ],
    ids=lambda algorithm: "-".join(map(str, algorithm)),
)
def test_the_figures_of_all_tokens_add_up_to_the_metrics(
    tmp_path: Path, groups: ParallelGroups, algorithm: dict[str, Any]
) -> None:
    run = start(make_config(tmp_path, algorithm=algorithm), groups)
    (updates,) = train_steps(run, 1)
    rows = pq.read_table(rollout_files(run.directory.sampled_rollouts)[1]).to_pylist()

    assert len(rows) == NUM_GROUPS * N
    for number, metrics in enumerate(updates, start=1):
        used = [row for row in rows if row["update"] == number]
        assert len(used) == 4
        marks = flat(used, "marks")
        usable = (marks & 24) == 0
        for bit, name in ((1, "upper"), (2, "lower"), (4, "dual")):
            share = metrics[f"actor/pg_clipfrac_{name}"]
            assert np.count_nonzero(marks & bit) / np.count_nonzero(usable) == pytest.approx(share)
            assert sum(row[f"num_{name}"] for row in used) == np.count_nonzero(marks & bit)
        denominator = "proximal_log_probs" if "behaviour_policy" in algorithm else "rollout_log_probs"
        log_ratio = (flat(used, "log_probs") - flat(used, denominator))[usable]
        assert -log_ratio.mean() == pytest.approx(metrics["actor/ppo_kl"], abs=1e-6)
        assert flat(used, "entropy").mean() == pytest.approx(metrics["actor/entropy"], rel=1e-5)
        if algorithm["objective"] != "gspo":
            assert flat(used, "ratio")[usable].max() == pytest.approx(metrics["actor/ratio_max"], rel=1e-5)
        if algorithm == {"objective": "bapo"}:
            found = {(row["clip_low"], row["clip_high"]) for row in used}
            bounds = metrics["actor/bapo_clip_low"], metrics["actor/bapo_clip_high"]
            assert found == {tuple(np.float32(bounds).tolist())}
    assert all(row["correction"] is None for row in rows) == ("rollout_correction" not in algorithm)


def test_a_file_has_the_rollouts_and_their_staleness(tmp_path: Path, groups: ParallelGroups) -> None:
    run = start(make_config(tmp_path), groups)
    train_steps(run, 1)
    file = pq.ParquetFile(rollout_files(run.directory.sampled_rollouts)[1])
    header = read_sample_header(file)
    given = make_groups(len(load_tokenizer(run.config.model_path)))
    rows = file.read().to_pylist()

    assert (header.step, header.policy_version, header.num_groups, header.n) == (1, 2, NUM_GROUPS, N)
    for row, (group, trajectory) in zip(rows, [(g, t) for g in given for t in g.trajectories], strict=True):
        assert row["prompt_id"] == group.prompt.prompt_id
        assert row["response_token_ids"] == trajectory.response_token_ids.tolist()
        assert row["rollout_log_probs"] == pytest.approx(trajectory.behaviour_log_probs)
        assert row["loss_mask"] == (None if trajectory.loss_mask is None else trajectory.loss_mask.tolist())
        assert (row["reward"], row["finish_reason"]) == (trajectory.reward, trajectory.finish_reason)
        assert row["ground_truth"] == "2"
        staleness = [2] + [1] * (trajectory.num_sampled - 1)
        assert (row["max_staleness"], row["mean_staleness"]) == (2, pytest.approx(np.mean(staleness)))
        tokenizer = load_tokenizer(run.config.model_path)
        assert row["text"] == tokenizer.decode(row["response_token_ids"], skip_special_tokens=True)


def test_the_same_prompts_are_sampled_again(tmp_path: Path, groups: ParallelGroups) -> None:
    run = start(make_config(tmp_path, logging={"rollouts": {"every_steps": 3, "num_prompts": 2}}), groups)
    train_steps(run, NUM_STEPS)
    files = rollout_files(run.directory.sampled_rollouts)
    chosen = [tuple(pq.read_table(path, columns=["prompt_id"])["prompt_id"].to_pylist()) for path in files.values()]

    assert [*files] == [1, 3]
    assert len(set(chosen)) == 1
    assert len(set(chosen[0])) == 2


def test_later_passes_over_the_batch_are_not_stored(tmp_path: Path, groups: ParallelGroups) -> None:
    settings = {"total_steps": NUM_STEPS, "train_batch_size": NUM_GROUPS * N, "ppo_mini_batch_size": 4}
    run = start(make_config(tmp_path, trainer={**settings, "ppo_epochs": 2}), groups)
    train_steps(run, 1)
    updates = pq.read_table(rollout_files(run.directory.sampled_rollouts)[1])["update"].to_pylist()
    assert updates == [1] * 4 + [2] * 4


def test_truncated_responses_that_no_update_uses_have_no_figures(tmp_path: Path, groups: ParallelGroups) -> None:
    run = start(make_config(tmp_path, algorithm={"overlong": {"mode": "filter"}}), groups)
    train_steps(run, 1)
    rows = pq.read_table(rollout_files(run.directory.sampled_rollouts)[1]).to_pylist()
    assert [row["update"] > 0 for row in rows] == [row["finish_reason"] == "stop" for row in rows]
    assert all((row["log_probs"] is None) == (row["update"] == 0) for row in rows)


def test_a_run_that_samples_no_steps_writes_nothing(tmp_path: Path, groups: ParallelGroups) -> None:
    run = start(make_config(tmp_path, logging={"rollouts": {"every_steps": 0}}), groups)
    train_steps(run, 1)
    assert not run.directory.sampled_rollouts.exists()


def test_a_resumed_run_drops_the_files_of_later_steps(tmp_path: Path, groups: ParallelGroups) -> None:
    run = start(make_config(tmp_path), groups)
    train_steps(run, NUM_STEPS)
    Recorder(run.config, run.directory, replace(run.state, step=2)).close()
    assert [*rollout_files(run.directory.sampled_rollouts)] == [1, 2]


def test_an_error_of_the_sampler_reaches_the_trainer(tmp_path: Path, groups: ParallelGroups) -> None:
    run = start(make_config(tmp_path), groups)
    run.directory.sampled_rollouts.write_text("a file where the folder belongs")
    with pytest.raises(FileExistsError):
        train_steps(run, 1)
