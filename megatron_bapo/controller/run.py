"""What one trainer rank of a run works with, its timer, and its checkpoints."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from torch.profiler import record_function

from megatron_bapo.config.schema import Config
from megatron_bapo.controller.colocation import ColocationManager
from megatron_bapo.controller.frozen_models import FrozenModels
from megatron_bapo.controller.recorded_rollouts import RecordedRollouts
from megatron_bapo.controller.recorder import Recorder
from megatron_bapo.controller.rollout_client import RolloutClient
from megatron_bapo.controller.rollout_sampler import RolloutSampler
from megatron_bapo.controller.run_state import RunState
from megatron_bapo.metrics.values import Metric, Sum
from megatron_bapo.parallel.collectives import broadcast_object
from megatron_bapo.parallel.platform import now_s
from megatron_bapo.parallel.telemetry import Telemetry
from megatron_bapo.run_directory import RunDirectory
from megatron_bapo.trainer.checkpoint_writer import CheckpointWriter
from megatron_bapo.trainer.weight_publisher import WeightTransport
from megatron_bapo.trainer.worker import Worker


@dataclass
class Timer:
    """Measures the seconds of each phase of a step; profiler traces show the phases by name."""

    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        start = now_s()
        with record_function(name):
            yield
        self.seconds[name] = self.seconds.get(name, 0.0) + now_s() - start

    def metrics(self) -> dict[str, Metric]:
        return {f"timing_s/{name}": Sum(seconds) for name, seconds in self.seconds.items()}


@dataclass
class Run:
    """One trainer rank's view of the run. `rollouts` and `recorder` are None on all ranks but the main one."""

    config: Config
    directory: RunDirectory
    worker: Worker
    transport: WeightTransport | None
    """None for a run without engines."""
    colocation: ColocationManager
    state: RunState
    rollouts: RolloutClient | RecordedRollouts | None
    recorder: Recorder | None
    sampler: RolloutSampler
    checkpoints: CheckpointWriter
    telemetry: Telemetry | None
    """Telemetry of this rank's GPU."""
    frozen: FrozenModels = field(default_factory=FrozenModels)
    saved_s: float = field(default_factory=now_s)
    """Time of the last checkpoint, or of the start."""

    @property
    def engines(self) -> RolloutClient | None:
        """The rollout service's client, on the main rank of a run with engines."""
        return self.rollouts if isinstance(self.rollouts, RolloutClient) else None

    def remaining_steps(self) -> Iterator[int]:
        """Yield the remaining steps, counted from 1; ends early when a stop is requested."""
        while self.state.step < self.config.trainer.total_steps and not self.stop_requested():
            yield self.state.step + 1

    def stop_requested(self) -> bool:
        return broadcast_object(self.directory.stop_request.exists(), self.worker.groups)

    def announce(self, activity: str) -> None:
        if self.recorder is not None:
            self.recorder.phase(activity)


def checkpoint_is_due(run: Run) -> bool:
    """Return whether to save a checkpoint after this step; the main rank's clock decides for all ranks."""
    settings, step = run.config.checkpoint, run.state.step
    if step % settings.every_steps == 0 or step == run.config.trainer.total_steps:
        return True
    return settings.every_s > 0.0 and broadcast_object(now_s() - run.saved_s >= settings.every_s, run.worker.groups)


def checkpoint(run: Run, *, wait: bool = False) -> None:
    """Save everything that a resumed run needs; with `wait`, return when it is on disk."""
    run.announce("saving a checkpoint")
    run.sampler.flush()
    with run.colocation.trainer_turn():
        run.checkpoints.save(run.state.update, run.state.to_json())
    run.saved_s = now_s()
    if wait:
        run.checkpoints.finish()
