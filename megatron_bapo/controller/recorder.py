"""Writes what the main rank records: metrics, sampled answers, and the phase that the live display shows."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path

from megatron_bapo.config.schema import Config
from megatron_bapo.controller.run_state import RunDirectory, RunState
from megatron_bapo.metrics.sinks import (
    JsonlSink,
    MetricsRow,
    Phase,
    SampleRow,
    TensorBoardSink,
    read_rows,
    truncate_after,
)
from megatron_bapo.metrics.values import Metric, scalars


class Recorder:
    """Holds the run's open metric files; rows after the state that the run resumes from are dropped first."""

    def __init__(self, config: Config, directory: RunDirectory, state: RunState) -> None:
        phase: Phase = "train" if state.step else "warm_start"
        step = state.step or state.warm_start_step
        for path in (directory.metrics, directory.samples):
            truncate_after(path, step, phase=phase)
        rows = read_rows(directory.metrics) if directory.metrics.exists() else []
        self._phase_file = directory.phase
        self._start = time.monotonic() - (rows[-1]["time_s"] if rows else 0.0)
        self._metrics = JsonlSink(directory.metrics)
        self._samples = JsonlSink(directory.samples)
        self._tensorboard = None
        if config.logging.tensorboard:
            kept: dict[Phase, int] = {
                "warm_start": state.warm_start_step,
                "train": state.step,
                "validation": state.step,
            }
            self._tensorboard = TensorBoardSink(directory.tensorboard, resume_steps=kept)
        self.phase("loading")
        self.recorded = {(row["phase"], row["step"]) for row in rows}
        """Rows that the resumed run does not owe."""

    def phase(self, activity: str) -> None:
        """Say what the trainer is about to do."""
        write_line(self._phase_file, activity)

    def write(self, phase: Phase, step: int, metrics: Mapping[str, Metric]) -> None:
        row = MetricsRow(step=step, phase=phase, time_s=time.monotonic() - self._start, metrics=scalars(metrics))
        self._metrics.write(row)
        if self._tensorboard is not None:
            self._tensorboard.write(row)

    def write_samples(self, rows: list[SampleRow]) -> None:
        for row in rows:
            self._samples.write(row)

    def close(self) -> None:
        self._metrics.close()
        self._samples.close()
        if self._tensorboard is not None:
            self._tensorboard.close()


def write_line(path: Path, line: str) -> None:
    """Replace a one-line file; a reader sees the old line or the new one."""
    partial = path.with_name(path.name + ".partial")
    partial.write_text(line)
    partial.rename(path)
