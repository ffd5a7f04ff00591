"""Write the main rank's records: metrics of steps and updates, sampled responses and tokens, and the current phase."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from megatron_bapo.config.schema import Config
from megatron_bapo.controller.run_state import RunState
from megatron_bapo.data.rollout_files import RolloutHeader, remove_rollouts_after, write_parts, write_rollouts
from megatron_bapo.data.rollout_table import COLUMNS, rollout_table
from megatron_bapo.metrics.alarms import mismatch_alarms
from megatron_bapo.metrics.sinks import (
    JsonlSink,
    MetricsRow,
    Phase,
    SampleRow,
    TensorBoardSink,
    UpdateRow,
    read_rows,
    tracker_id,
    truncate_after,
)
from megatron_bapo.metrics.token_table import TokenTable, remove_token_tables_after, write_token_table
from megatron_bapo.metrics.values import Mean, Metric, merge, scalars
from megatron_bapo.metrics.wandb_sink import WandbSink
from megatron_bapo.records import Group
from megatron_bapo.rollout.generation import ScoredGroups
from megatron_bapo.rollout.tokenization import load_tokenizer
from megatron_bapo.run_directory import RunDirectory

_log = logging.getLogger(__name__)


class Recorder:
    """Owns the run's metric files; removes rows after the checkpoint that the run resumes from when it is created."""

    def __init__(self, config: Config, directory: RunDirectory, state: RunState) -> None:
        phase: Phase = "train" if state.step else "warm_start"
        step = state.step or state.warm_start_step
        for path in (directory.metrics, directory.updates, directory.samples):
            truncate_after(path, step, phase=phase)
        directory.cut_records(state.data)
        remove_token_tables_after(directory.tokens, state.step)
        for folder in (directory.rollouts, directory.validation_rollouts, directory.sampled_rollouts):
            remove_rollouts_after(folder, state.step)
        rows = read_rows(directory.metrics) if directory.metrics.exists() else []
        updates = read_rows(directory.updates) if directory.updates.exists() else []
        self._num_updates = len(updates)
        self._num_restarts = len(read_rows(directory.restarts)) if directory.restarts.exists() else 0
        self._outcomes = merge(_outcomes(row["metrics"]) for row in updates)
        self._tokens_folder = directory.tokens
        dumps = config.logging.dump_rollouts, config.logging.dump_validation
        self._rollouts_folder = directory.rollouts if dumps[0] else None
        self._validation_folder = directory.validation_rollouts if dumps[1] else None
        self._vocab_size = len(load_tokenizer(config.model_path)) if any(dumps) else 0
        self._sampling, self._validation_sampling = config.rollout.sampling, config.evaluation.sampling
        self._teacher = config.algorithm.recorded_teacher
        self._mismatch_alarms = config.logging.mismatch_alarms
        self._phase_file = directory.phase
        self._start = time.monotonic() - (rows[-1]["time_s"] if rows else 0.0)
        self._metrics = JsonlSink(directory.metrics)
        self._updates = JsonlSink(directory.updates)
        self._samples = JsonlSink(directory.samples)
        self._tensorboard = None
        if config.logging.tensorboard:
            resume_steps: dict[Phase, int] = {
                "warm_start": state.warm_start_step,
                "train": state.step,
                "validation": state.step,
            }
            self._tensorboard = TensorBoardSink(directory.tensorboard, resume_steps=resume_steps)
        self._wandb, self._sends_rollouts = None, False
        if config.logging.wandb is not None:
            self._sends_rollouts = config.logging.wandb.rollouts
            self._wandb = WandbSink(config, tracker_id(directory.wandb_id), num_rows=len(rows))
        self.phase("loading")
        self.recorded = {(row["phase"], row["step"]) for row in rows}
        """Phases and steps of the rows that are already in the metrics file."""

    def phase(self, activity: str) -> None:
        """Record what the trainer does next, for the progress display."""
        write_line(self._phase_file, activity)

    def write(self, phase: Phase, step: int, metrics: Mapping[str, Metric]) -> None:
        """Write a row of metrics to every sink, and log mismatch alarms."""
        values = scalars(metrics)
        if phase == "train":
            values["training/restarts"] = float(self._num_restarts)
        if "training/token_mult_prob_error" in values:
            alarms = mismatch_alarms(values, self._mismatch_alarms)
            values["training/mismatch_alarms"] = float(len(alarms))
            for alarm in alarms:
                _log.warning("step %d: %s", step, alarm)
        time_s, unix_s = time.monotonic() - self._start, round(time.time(), 3)
        row = MetricsRow(step=step, phase=phase, time_s=time_s, unix_s=unix_s, metrics=values)
        self._metrics.write(row)
        if self._tensorboard is not None:
            self._tensorboard.write(row)
        if self._wandb is not None:
            self._wandb.write(row)

    def write_updates(self, step: int, updates: Sequence[Mapping[str, Metric]]) -> None:
        """Write a row for each update, with the running fractions of the outcomes of the clip-bound search."""
        for update in updates:
            values = scalars(update)
            self._num_updates += 1
            self._outcomes = merge([self._outcomes, _outcomes(values)])
            self._updates.write(
                UpdateRow(step=step, update=self._num_updates, metrics=values | scalars(self._outcomes))
            )

    def write_tokens(self, step: int, table: TokenTable) -> None:
        if len(table["update"]):
            write_token_table(self._tokens_folder, step, table)

    def write_rollouts(self, state: RunState, scored: ScoredGroups, advantages: Sequence[np.ndarray]) -> None:
        """Write the batch of the next step if `logging.dump_rollouts` is set."""
        if self._rollouts_folder is None:
            return
        header = replace(self._header(state, scored), step=state.step + 1, teacher=self._teacher)
        write_rollouts(self._rollouts_folder, header, scored.groups, advantages)

    def write_validation(self, state: RunState, scored: ScoredGroups, parts: Iterable[Sequence[Group]]) -> None:
        """Write parts of the responses to held-out prompts after the current step, if it is configured."""
        if self._validation_folder is None:
            return
        header = replace(self._header(state, scored), sampling=self._validation_sampling)
        write_parts(self._validation_folder, header, parts)

    def _header(self, state: RunState, scored: ScoredGroups) -> RolloutHeader:
        return RolloutHeader(
            step=state.step,
            policy_version=state.policy_version,
            num_groups=len(scored.groups),
            n=len(scored.groups[0].trajectories),
            vocab_size=self._vocab_size,
            num_reward_timeouts=scored.num_reward_timeouts,
            sampling=self._sampling if scored.sampling is None else scored.sampling,
        )

    def add_sampled(self, path: Path) -> None:
        """Have the next row send the sampled rollouts in the file to wandb, if that is configured."""
        if self._wandb is not None and self._sends_rollouts:
            self._wandb.add_table("rollouts", COLUMNS, rollout_table(path))

    def write_samples(self, rows: list[SampleRow]) -> None:
        for row in rows:
            self._samples.write(row)

    def close(self) -> None:
        for sink in (self._metrics, self._updates, self._samples):
            sink.close()
        if self._tensorboard is not None:
            self._tensorboard.close()
        if self._wandb is not None:
            self._wandb.close()


def _outcomes(metrics: Mapping[str, float | None]) -> dict[str, Metric]:
    """Return one update's outcomes as terms of the running fractions."""
    prefix = "actor/bapo_outcome/"
    return {
        name.replace(prefix, "actor/bapo_outcome_so_far/"): Mean(value, 1.0)
        for name, value in metrics.items()
        if name.startswith(prefix) and value is not None
    }


def write_line(path: Path, line: str) -> None:
    """Replace a one-line file atomically: a reader sees the old line or the new one."""
    partial = path.with_name(path.name + ".partial")
    partial.write_text(line)
    partial.rename(path)
