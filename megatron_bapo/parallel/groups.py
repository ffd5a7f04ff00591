"""The trainer's process groups as one frozen value; the only reader of Megatron's `parallel_state`."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from megatron_bapo.config.schema import ParallelConfig
from megatron_bapo.errors import UserError
from megatron_bapo.parallel.megatron import model_parallel_cuda_manual_seed, parallel_state


@dataclass(frozen=True)
class Axis:
    """One mesh axis as this rank sees it."""

    group: dist.ProcessGroup
    rank: int
    size: int

    @property
    def global_ranks(self) -> list[int]:
        return dist.get_process_group_ranks(self.group)


@dataclass(frozen=True)
class ParallelGroups:
    """Every axis of the trainer's mesh."""

    tensor: Axis
    pipeline: Axis
    context: Axis
    data: Axis
    """Ranks with the same part of the model and other sequences."""
    data_context: Axis
    """Data and context together: ranks with the same part of the model and other tokens."""
    expert: Axis
    """Ranks that share a layer's experts."""
    expert_tensor: Axis
    expert_shards: Axis
    """Expert tensor and expert together: ranks that hold one whole copy of a stage's experts."""
    expert_data: Axis
    """Ranks with the same part of the experts."""
    num_virtual_stages: int

    @property
    def is_first_stage(self) -> bool:
        return self.pipeline.rank == 0

    @property
    def is_last_stage(self) -> bool:
        return self.pipeline.rank == self.pipeline.size - 1

    @property
    def stage_size(self) -> int:
        """The number of ranks of a pipeline stage."""
        return self.tensor.size * self.data_context.size

    @property
    def stage_rank(self) -> int:
        """This rank's number in its pipeline stage: by tensor rank first, or else expert tensor, then expert rank."""
        return self.data_context.rank * self.tensor.size + self.tensor.rank

    @property
    def is_replica_leader(self) -> bool:
        """One rank of each data-parallel replica: it receives what all of them need."""
        return self.tensor.rank == 0 and self.context.rank == 0 and self.is_first_stage

    @property
    def global_rank(self) -> int:
        return dist.get_rank()

    @property
    def is_main(self) -> bool:
        """Global rank 0: it talks to the rollout service and records metrics."""
        return self.global_rank == 0


def _axis(group: Any) -> Axis:
    return Axis(group, dist.get_rank(group), dist.get_world_size(group))


def create_groups(parallel: ParallelConfig, seed: int, timeout_s: float) -> ParallelGroups:
    """Lay the mesh over the started process group and seed Megatron's RNG tracker.

    Raises UserError when the number of processes is not the configured one.
    """
    if dist.get_world_size() != parallel.world_size:
        raise UserError(
            f"parallel.world_size is {parallel.world_size}, but {dist.get_world_size()} trainer processes were "
            "started; make torchrun's --nnodes times --nproc-per-node equal to it"
        )
    num_virtual_stages = parallel.virtual_pipeline_model_parallel_size
    parallel_state.initialize_model_parallel(
        parallel.tensor_model_parallel_size,
        parallel.pipeline_model_parallel_size,
        virtual_pipeline_model_parallel_size=num_virtual_stages if num_virtual_stages > 1 else None,
        context_parallel_size=parallel.context_parallel_size,
        expert_model_parallel_size=parallel.expert_model_parallel_size,
        expert_tensor_parallel_size=parallel.expert_tensor_parallel_size,
        create_gloo_process_groups=False,  # for Megatron's own checkpoints
        order="tp-cp-ep-dp-pp",
        distributed_timeout_minutes=math.ceil(timeout_s / 60),
    )
    model_parallel_cuda_manual_seed(seed)
    return ParallelGroups(
        tensor=_axis(parallel_state.get_tensor_model_parallel_group()),
        pipeline=_axis(parallel_state.get_pipeline_model_parallel_group()),
        context=_axis(parallel_state.get_context_parallel_group()),
        data=_axis(parallel_state.get_data_parallel_group()),
        data_context=_axis(parallel_state.get_data_parallel_group(with_context_parallel=True)),
        expert=_axis(parallel_state.get_expert_model_parallel_group()),
        expert_tensor=_axis(parallel_state.get_expert_tensor_parallel_group()),
        expert_shards=_axis(parallel_state.get_expert_tensor_and_model_parallel_group()),
        expert_data=_axis(parallel_state.get_expert_data_parallel_group()),
        num_virtual_stages=num_virtual_stages,
    )
