"""Writes this rank's share of every policy version to its host's weight store."""

from __future__ import annotations

from megatron_bapo.model.build import finish_param_gather
from megatron_bapo.model.weight_layouts import EngineLayout, one_host, two_hosts, weight_plan
from megatron_bapo.model.weight_slices import LocalSlices
from megatron_bapo.parallel.collectives import barrier
from megatron_bapo.trainer.worker import Worker
from megatron_bapo.weight_sync.transport import WeightStore


class WeightPublisher:
    """Holds the plan, made once, and where its slices lie in this rank's parameters."""

    def __init__(self, worker: Worker, store: WeightStore) -> None:
        config, self.store = worker.config, store
        self._model, self._groups = worker.model, worker.groups
        self._slices = LocalSlices(worker.model, worker.groups)
        engine = EngineLayout.of(config.rollout)
        place = one_host if config.weight_sync.engine_store == "shared" else two_hosts
        self.plan = weight_plan(
            worker.model.architecture,
            config.parallel,
            engine,
            place(config.parallel, engine),
            dtype=config.model.dtype,
            bucket_bytes=config.weight_sync.bucket_mib << 20,
        )

    def publish(self, policy_version: int) -> int:
        """Write a version: every rank its slices, nothing is gathered; then rank 0 commits. The bytes of this rank."""
        finish_param_gather([chunk.ddp for chunk in self._model.chunks])
        num_bytes = self.store.write(policy_version, self.plan, self._groups.global_rank, self._slices)
        barrier(self._groups)
        if self._groups.is_main:
            self.store.commit(policy_version, self.plan)
        barrier(self._groups)  # a rank that went on to the next version would take this one for given up
        return num_bytes
