"""Trainer and colocated engines take turns on the GPUs; meanwhile the other sleeps or is offloaded to host memory.

    engines: generate ──► trainer: updates ──► both: weights, without optimizer and KV cache ──► engines

A lost engine is replaced during the engines' turn, and the trainer's turn begins when no engine is starting
(`EngineFleet.to_trainer`). Without `rollout.sleep_level` and `trainer.offload` nothing sleeps and nothing is offloaded.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial

from megatron_bapo.config.schema import Config
from megatron_bapo.controller.rollout_client import RolloutClient
from megatron_bapo.model.build import PolicyModel
from megatron_bapo.parallel.collectives import barrier, on_main
from megatron_bapo.parallel.groups import ParallelGroups
from megatron_bapo.parallel.platform import release_cached_memory
from megatron_bapo.trainer.offload import TrainerMemory
from megatron_bapo.trainer.worker import Worker


class ColocationManager:
    """Switches turns between the trainer and the engines; all trainer ranks must make the same calls.

    The trainer has the first turn.
    """

    def __init__(self, config: Config, groups: ParallelGroups, rollouts: RolloutClient | None) -> None:
        """`rollouts` is None on all ranks but the main one. Returns when the engines sleep, if `sleep_level` is set.

        So the engines profile their memory before the trainer allocates any, and the trainer is built on free GPUs.
        """
        self._groups, self._rollouts = groups, rollouts
        self._sleep_level, self._offload = config.rollout.sleep_level, config.trainer.offload
        self._memory: TrainerMemory | None = None
        self._trainers_turn = True
        if self._sleep_level:
            on_main(rollouts and rollouts.wait_for_engines, groups)
            on_main(rollouts and partial(rollouts.sleep, 1), groups)

    def manage(self, worker: Worker, frozen: Sequence[PolicyModel]) -> None:
        """Offload these models during the engines' turns from now on; call this when all of them exist."""
        if self._offload:
            self._memory = TrainerMemory(worker, frozen)

    def to_trainer(self, *, weights_follow: bool = True) -> None:
        """Let the engines sleep, then load the trainer's memory; without `weights_follow` the engines keep weights."""
        if self._sleep_level:
            level = self._sleep_level if weights_follow else 1
            on_main(self._rollouts and partial(self._rollouts.sleep, level), self._groups)
        if self._memory is not None:
            self._memory.onload()
        self._trainers_turn = True

    def to_weight_sync(self) -> None:
        """Have both the trainer's parameters and the engines' memory for weights on the GPUs."""
        if self._memory is not None:
            self._memory.offload_all_but_parameters()
        self._wake("weights")

    def to_engines(self) -> None:
        """Offload the trainer, then wake the engines."""
        if self._memory is not None:
            self._memory.offload()
        self._wake("weights", "kv_cache")
        self._trainers_turn = False

    @contextmanager
    def trainer_turn(self) -> Iterator[None]:
        """Give the trainer the turn in this context, if it has not got it; its weights must not change."""
        if self._trainers_turn:
            yield
            return
        self.to_trainer(weights_follow=False)
        yield
        self.to_engines()

    def _wake(self, *tags: str) -> None:
        """Release what updates, exports and scoring have left in torch's caches, then have the engines allocate."""
        if self._sleep_level:
            release_cached_memory()
            barrier(self._groups)
            on_main(self._rollouts and partial(self._rollouts.wake, tags), self._groups)
