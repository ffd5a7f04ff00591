"""Trainer and colocated engines take turns on the GPUs: whose turn it is not sleeps, or lies in host memory.

    engines: prompts to answers ──► trainer: updates ──► both: weights, without optimizer, keys and values ──► engines

An engine that is lost is replaced in the engines' turn, and the trainer waits for one that starts (rollout/health.py).
Where neither `rollout.sleep_level` nor `trainer.offload` is set, nothing here does anything.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from megatron_bapo.config.schema import Config
from megatron_bapo.controller.rollout_client import RolloutClient
from megatron_bapo.model.build import PolicyModel
from megatron_bapo.parallel.collectives import barrier
from megatron_bapo.parallel.groups import ParallelGroups
from megatron_bapo.trainer.offload import TrainerMemory
from megatron_bapo.trainer.worker import Worker


class DeviceTurns:
    """Every trainer rank has one and calls it alike. The trainer has the first turn."""

    def __init__(self, config: Config, groups: ParallelGroups, rollouts: RolloutClient | None) -> None:
        """`rollouts` is None on all ranks but the main one. Returns when the engines, if they can, sleep.

        So an engine measures a GPU that is its own, and the trainer is built on one that is free.
        """
        self._groups, self._rollouts = groups, rollouts
        self._sleep_level, self._offload = config.rollout.sleep_level, config.trainer.offload
        self._memory: TrainerMemory | None = None
        self._trainers_turn = True
        if self._sleep_level and rollouts is not None:
            rollouts.wait_for_engines()
            rollouts.sleep(1)
        self._meet()

    def hold(self, worker: Worker, reference: PolicyModel | None) -> None:
        """From now on these give way. Comes when all of them exist."""
        if self._offload:
            self._memory = TrainerMemory(worker, reference)

    def to_trainer(self, *, weights_follow: bool = True) -> None:
        """Engines sleep, then the trainer gets its memory. Without new weights to follow engines keep theirs."""
        if self._sleep_level and self._rollouts is not None:
            self._rollouts.sleep(self._sleep_level if weights_follow else 1)
        self._meet()
        if self._memory is not None:
            self._memory.onload()
        self._trainers_turn = True

    def to_weight_sync(self) -> None:
        """Parameters, and the engines' memory for weights, are there."""
        if self._memory is not None:
            self._memory.offload_all_but_parameters()
        self._meet()
        if self._sleep_level and self._rollouts is not None:
            self._rollouts.wake(("weights",))
        self._meet()

    def to_engines(self) -> None:
        if self._memory is not None:
            self._memory.offload()
        self._meet()
        if self._sleep_level and self._rollouts is not None:
            self._rollouts.wake(("weights", "kv_cache"))
        self._trainers_turn = False

    @contextmanager
    def trainer_between(self) -> Iterator[None]:
        """A turn of the trainer that leaves its weights as they are; none where it has the turn already."""
        if self._trainers_turn:
            yield
            return
        self.to_trainer(weights_follow=False)
        yield
        self.to_engines()

    def _meet(self) -> None:
        if self._sleep_level or self._offload:
            barrier(self._groups)
