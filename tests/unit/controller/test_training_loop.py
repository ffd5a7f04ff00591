from __future__ import annotations

import time
import weakref
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from megatron_bapo.config.loading import dump_config
from megatron_bapo.config.model import CreateModelConfig
from megatron_bapo.config.schema import Config
from megatron_bapo.controller import training_loop
from megatron_bapo.controller.colocation import ColocationManager
from megatron_bapo.controller.frozen_models import load_frozen_models
from megatron_bapo.controller.launcher import report_end
from megatron_bapo.controller.progress import ProgressDisplay
from megatron_bapo.controller.prompt_sets import load_task_prompts
from megatron_bapo.controller.recorded_rollouts import RecordedRollouts
from megatron_bapo.controller.recorder import Recorder
from megatron_bapo.controller.rollout_sampler import RolloutSampler
from megatron_bapo.controller.run import Run, Timer, checkpoint
from megatron_bapo.controller.run_state import RunState
from megatron_bapo.controller.training_loop import (
    prepare_engines,
    take_groups,
    train,
    update_engine_weights,
    update_on_batch,
)
from megatron_bapo.data.rollout_files import RolloutHeader, write_rollouts
from megatron_bapo.errors import INTERRUPTED
from megatron_bapo.metrics.values import scalars
from megatron_bapo.model.hf_create import create_checkpoint
from megatron_bapo.parallel.groups import ParallelGroups
from megatron_bapo.records import Group, Prompt, Trajectory, VersionSpan
from megatron_bapo.rollout.generation import ScoredGroups
from megatron_bapo.rollout.tokenization import load_tokenizer
from megatron_bapo.run_directory import FINISHED, RunDirectory
from megatron_bapo.trainer.checkpoint import load_checkpoint
from megatron_bapo.trainer.checkpoint_writer import CheckpointWriter
from megatron_bapo.trainer.worker import create_worker, packed

# Megatron-Core warns about its own defaults and calls.
pytestmark = pytest.mark.filterwarnings("ignore")

NUM_STEPS = 3
MISMATCH = "training/token_mult_prob_error"


def make_config(run_dir: Path, **sections: Any) -> Config:
    return Config.model_validate(
        {
            "run_dir": run_dir,
            "model": {"create": {"num_hidden_layers": 1, "hidden_size": 16}, "dtype": "float32"},
            "data": {
                "max_prompt_length": 24,
                "chat_template": False,
                "train": {"reasoning_gym": {"chain_sum": {"min_terms": 2, "max_terms": 2}}, "size": 9},
            },
            "reward": {"type": "reasoning_gym"},
            "trainer": {"total_steps": NUM_STEPS, "train_batch_size": 4, "ppo_mini_batch_size": 2},
            **sections,
            "rollout": {"n": 2, "max_response_length": 4} | sections.get("rollout", {}),
        }
    )


def start(config: Config, groups: ParallelGroups, header: dict[str, Any], versions: list[int]) -> Run:
    """Start a run without engines on recorded batches, which have version 0 tokens and `versions` in their headers."""
    if not config.model_path.is_dir():
        assert config.model.create is not None
        texts = [prompt.messages[0]["content"] for prompt in load_task_prompts(config).train]
        create_checkpoint(config.model_path, config.model.create, texts, config.seed)
    directory = RunDirectory(config.run_dir)
    directory.create()
    folder = config.run_dir / "recorded"
    tokens = np.arange(3, dtype=np.int32)
    trajectory = Trajectory(tokens, tokens, np.full(3, -5.0, np.float32), (VersionSpan(0, 3),), "stop", "")
    pair = (replace(trajectory, reward=0.0), replace(trajectory, reward=1.0))
    batch = [Group(Prompt(f"p:{index}", (), "", "p"), pair) for index in range(2)]
    for step, version in enumerate(versions, start=1):
        fields = {"num_groups": 2, "n": 2, "vocab_size": len(load_tokenizer(config.model_path))}
        described = RolloutHeader(step=step, policy_version=version, num_reward_timeouts=0, **fields, **header)
        write_rollouts(folder, described, batch, None)
    worker = create_worker(config, config.model_path, groups)
    rollouts = RecordedRollouts(config, folder, 0)
    colocation = ColocationManager(config, groups, None)
    sampler = RolloutSampler(config, directory.sampled_rollouts, groups)
    writer = CheckpointWriter(worker, directory.checkpoints, rollouts)
    return Run(config, directory, worker, None, colocation, RunState(), rollouts, None, sampler, writer, None)


def weights(run: Run) -> torch.Tensor:
    """Return the trained values of the model."""
    trained = (parameter for _, parameter in run.worker.model.trained.named_parameters())
    return torch.cat([parameter.detach().flatten() for parameter in trained])


def train_steps(run: Run, steps: Sequence[int] = range(1, NUM_STEPS + 1)) -> list[tuple[int, bool]]:
    """Train on all batches and return each step's policy version and whether it reported a mismatch."""
    seen = []
    prepare_engines(run)
    for step in steps:
        scored, trajectories = take_groups(run, Timer())
        metrics, _, _ = update_on_batch(run, scored, trajectories)
        seen.append((run.state.policy_version, MISMATCH in metrics))
        update_engine_weights(run)
        run.state.step = step
    return seen


def test_rollouts_recorded_without_a_trainer_are_stale_from_the_second_step_on(tmp_path: Path, groups: ParallelGroups):
    run = start(make_config(tmp_path), groups, {"data_state": {"stream": [1]}}, [0, 0, 0])
    assert train_steps(run) == [(0, True), (1, False), (2, False)]


def test_rollouts_recorded_without_a_trainer_are_stale_after_a_warm_start(tmp_path: Path, groups: ParallelGroups):
    config = make_config(tmp_path, warm_start={"num_steps": 1})
    run = start(config, groups, {"data_state": {"stream": [1]}}, [0, 0, 0])
    assert train_steps(run) == [(1, False), (2, False), (3, False)]


def test_rollouts_of_a_training_run_keep_the_versions_of_that_run(tmp_path: Path, groups: ParallelGroups):
    """Their weights are those of this run in the first step only, in which both have the initial model."""
    run = start(make_config(tmp_path), groups, {}, [0, 0, 5])
    assert train_steps(run) == [(0, True), (0, False), (5, False)]


@pytest.mark.parametrize("version", [0, 1])
def test_rollouts_of_a_training_run_without_a_warm_start_are_stale_after_one(
    tmp_path: Path, groups: ParallelGroups, version: int
) -> None:
    """The recorded tokens have version 0: they are those of the initial model, which a warm start changes."""
    config = make_config(tmp_path, warm_start={"num_steps": 1} if version else None)
    assert train_steps(start(config, groups, {}, [0, 1, 2]))[0] == (0, version == 0)


@pytest.mark.parametrize(
    ("sections", "state", "expected"),
    [
        ({}, {}, ["wait", "probe 0"]),
        ({"lora": {}}, {}, ["wait", "probe 0"]),
        ({"lora": {"path": "adapters"}}, {}, ["wait", "send 1"]),
        ({"warm_start": {"num_steps": 1}}, {"update": 1}, ["wait", "send 1"]),
        ({"lora": {"path": "adapters"}}, {"policy_version": 1}, ["wait", "send 1"]),
        ({}, {"step": 3, "update": 6, "policy_version": 3}, ["wait", "send 3"]),
    ],
)
def test_engines_generate_with_the_weights_that_the_trainer_starts_from(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    sections: dict[str, Any],
    state: dict[str, Any],
    expected: list[str],
) -> None:
    """Engines load the folder of the model, without adapters or a warm start; a resumed run keeps its version."""
    events: list[str] = []

    monkeypatch.setattr(training_loop, "on_main", lambda call, groups: call())
    monkeypatch.setattr(training_loop, "score_probe", lambda worker, engines: None)
    monkeypatch.setattr(
        training_loop, "probe", lambda *_, policy_version, scored: events.append(f"probe {policy_version}")
    )
    monkeypatch.setattr(training_loop, "update_weights", lambda *given: events.append(f"send {given[-1]}"))
    model = {"create": {}, "lora": sections.get("lora")}
    run: Any = SimpleNamespace(
        config=make_config(tmp_path, model=model, warm_start=sections.get("warm_start")),
        transport=object(),
        state=RunState(**state),
        worker=SimpleNamespace(groups=None),
        engines=SimpleNamespace(wait_for_engines=lambda: events.append("wait")),
        colocation=SimpleNamespace(manage=lambda *_: None),
        frozen=SimpleNamespace(models=[]),
        announce=lambda _: None,
    )
    prepare_engines(run)
    assert events == expected
    assert run.state.policy_version == int(expected[-1].split()[-1])


def test_each_batch_is_packed_once_for_its_scatter_its_scoring_passes_and_its_updates(
    tmp_path: Path, groups: ParallelGroups
) -> None:
    """The rollout batch, which two models score, and its two minibatches."""
    config = make_config(tmp_path, algorithm={"behaviour_policy": "recomputed", "kl_loss_coef": 0.1})
    run = start(config, groups, {}, [0, 1, 2])
    run.frozen = load_frozen_models(run.worker, run.directory, run.announce, is_new=True)
    packed.cache_clear()
    update_on_batch(run, *take_groups(run, Timer()))
    assert packed.cache_info().misses == 3


def test_a_resumed_run_drops_the_same_inputs_of_adapters_as_an_uninterrupted_one(
    tmp_path: Path, groups: ParallelGroups
) -> None:
    model = {"create": {"num_hidden_layers": 1, "hidden_size": 16}, "dtype": "float32", "lora": {"dropout": 0.5}}
    config = make_config(tmp_path, model=model)
    run = start(config, groups, {}, [0, 1, 2])
    train_steps(run, [1, 2])
    checkpoint(run, wait=True)
    first = weights(run)
    train_steps(run, [3])

    resumed = start(config, groups, {}, [0, 1, 2])
    assert run.directory.newest_checkpoint is not None
    resumed.state = RunState.from_json(load_checkpoint(resumed.worker, run.directory.newest_checkpoint))
    assert (weights(resumed) == first).all()
    train_steps(resumed, [3])
    assert not (weights(run) == first).all()
    assert (weights(resumed) == weights(run)).all()


@pytest.mark.parametrize("truncation", [{"top_p": 0.9}, {"top_k": 20}, {"min_p": 0.1}])
def test_truncated_sampling_reports_no_mismatch(tmp_path: Path, groups: ParallelGroups, truncation: dict[str, float]):
    """The engines' log-probs are then those of the truncated distribution."""
    config = make_config(tmp_path, rollout=truncation, algorithm={"behaviour_policy": "recomputed"})
    run = start(config, groups, {"sampling": config.rollout.sampling}, [0, 1, 2])
    assert train_steps(run)[0] == (0, False)


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_dropout_in_updates_is_not_reported_as_a_mismatch(tmp_path: Path, groups: ParallelGroups, dropout: float):
    """Nor is a training pass repeated under other clip bounds, because it would drop other elements."""
    model = {"create": {"num_hidden_layers": 1, "hidden_size": 16}, "dtype": "float32", "lora": {"dropout": dropout}}
    run = start(make_config(tmp_path, model=model), groups, {}, [0, 1, 2])
    assert train_steps(run)[0] == (0, not dropout)


def test_rollouts_that_were_sampled_at_another_temperature_report_no_mismatch(tmp_path: Path, groups: ParallelGroups):
    config = make_config(tmp_path, algorithm={"behaviour_policy": "recomputed"})
    run = start(config, groups, {"sampling": config.rollout.sampling | {"temperature": 0.6}}, [0, 1, 2])
    assert train_steps(run)[0] == (0, False)


def test_recomputed_log_probs_still_report_the_mismatch_of_comparable_rollouts(tmp_path: Path, groups: ParallelGroups):
    config = make_config(tmp_path, algorithm={"behaviour_policy": "recomputed"})
    assert train_steps(start(config, groups, {"sampling": config.rollout.sampling}, [0, 1, 2]))[0] == (0, True)


@pytest.mark.parametrize("objective", ["distill", "bapo"])
def test_stale_rollouts_are_scored_by_a_larger_teacher_that_the_policy_approaches(
    tmp_path: Path, groups: ParallelGroups, objective: str
) -> None:
    shape = CreateModelConfig(num_hidden_layers=2, hidden_size=24, vocab_size=330)
    distillation = {"teacher": tmp_path / "teacher", "coef": 10.0}
    algorithm = {"objective": objective, "distillation": distillation}
    run = start(make_config(tmp_path / "run", algorithm=algorithm, optimizer={"lr": 1e-2}), groups, {}, [0, 0, 0])
    texts = [prompt.messages[0]["content"] for prompt in load_task_prompts(run.config).train]
    create_checkpoint(tmp_path / "teacher", shape, texts, seed=7)
    run.frozen = load_frozen_models(run.worker, run.directory, run.announce, is_new=True)
    assert [model.architecture.num_hidden_layers for model in run.frozen.models] == [2]
    seen: list[float] = []
    prepare_engines(run)
    for step in range(1, NUM_STEPS + 1):
        _, trajectories = take_groups(run, Timer())
        metrics, _, _ = update_on_batch(run, None, trajectories)
        seen.append(abs(scalars(metrics)["actor/teacher_kl"]))
        run.state.step = step
    assert seen[0] > 2 * seen[-1]


def end_of_run(run: Run) -> int:
    """Train, and return the exit code after a stop request that comes when the trainer has ended."""
    run.directory.config.write_text(dump_config(run.config))
    run.recorder = Recorder(run.config, run.directory, run.state)
    train(run)
    run.recorder.close()
    run.directory.stop_request.touch()
    return report_end(ProgressDisplay(NUM_STEPS), run.directory, rollouts_from=None)


def test_a_stop_request_after_the_last_step_leaves_a_finished_run(
    tmp_path: Path, groups: ParallelGroups, capsys: pytest.CaptureFixture[str]
):
    run = start(make_config(tmp_path), groups, {}, [0, 1, 2])
    assert end_of_run(run) == 0
    assert "Stopped" not in capsys.readouterr().out
    assert not run.directory.stop_request.exists()


def test_a_stop_request_before_the_last_step_ends_the_run_as_interrupted(tmp_path: Path, groups: ParallelGroups):
    run = start(make_config(tmp_path), groups, {}, [0, 1, 2])
    run.directory.stop_request.touch()
    assert end_of_run(run) == INTERRUPTED


@pytest.mark.parametrize("dump", [False, True])
def test_a_rollout_batch_is_freed_before_the_next_one_arrives(
    tmp_path: Path, groups: ParallelGroups, monkeypatch: pytest.MonkeyPatch, dump: bool
) -> None:
    taken, num_kept = list[weakref.ref[np.ndarray]](), list[int]()

    def take(run: Run, timer: Timer) -> tuple[ScoredGroups | None, list[Trajectory]]:
        num_kept.append(sum(each() is not None for each in taken))
        scored, trajectories = take_groups(run, timer)
        assert scored is not None
        in_groups = [each for group in scored.groups for each in group.trajectories]
        taken.extend(weakref.ref(each.response_token_ids) for each in [*in_groups, *trajectories])
        return scored, trajectories

    monkeypatch.setattr(training_loop, "take_groups", take)
    end_of_run(start(make_config(tmp_path, logging={"dump_rollouts": dump}), groups, {}, [0, 1, 2]))
    assert num_kept == [0] * NUM_STEPS


class SlowRollouts(RecordedRollouts):
    """Recorded rollouts that record the run's phase and its checkpoints when a checkpoint is all but complete."""

    def finish_saving(self) -> None:
        time.sleep(0.2)  # training goes on meanwhile, up to the end of the run
        directory = RunDirectory(self._config.run_dir)
        self.seen = [*getattr(self, "seen", []), (directory.phase.read_text(), directory.newest_checkpoint)]


@pytest.mark.parametrize("stopped", [False, True])
def test_a_run_ends_when_its_last_checkpoint_is_complete(tmp_path: Path, groups: ParallelGroups, stopped: bool):
    run = start(make_config(tmp_path), groups, {}, [0, 1, 2])
    rollouts = SlowRollouts(run.config, run.config.run_dir / "recorded", 0)
    run.rollouts, run.checkpoints = rollouts, CheckpointWriter(run.worker, run.directory.checkpoints, rollouts)
    if stopped:
        run.directory.stop_request.touch()
    end_of_run(run)
    newest = run.directory.newest_checkpoint
    assert newest is not None
    assert newest.name == f"step-{run.state.update:08d}"
    assert rollouts.seen[-1][1] != newest
    assert all(phase != FINISHED for phase, _ in rollouts.seen)
    assert run.directory.is_finished == (not stopped)
    assert [path.name for path in run.directory.checkpoints.iterdir()] == [newest.name]
