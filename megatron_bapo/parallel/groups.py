"""The trainer's process groups as one frozen value; the only reader of Megatron's `parallel_state`."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch.distributed as dist

from megatron_bapo.config.schema import ParallelConfig
from megatron_bapo.errors import UserError
from megatron_bapo.parallel.main_calls import MainCalls
from megatron_bapo.parallel.megatron import model_parallel_cuda_manual_seed, parallel_state


@dataclass(frozen=True)
class Axis:
    """One mesh axis: its process group, and this rank's position in it."""

    group: dist.ProcessGroup
    rank: int
    size: int
    members: tuple[int, ...] | None = None
    """Global ranks of the axis where its group has other ranks, too; None: all of its group."""

    @property
    def global_ranks(self) -> list[int]:
        return dist.get_process_group_ranks(self.group) if self.members is None else list(self.members)


@dataclass(frozen=True)
class ParallelGroups:
    """All axes of the trainer's mesh."""

    tensor: Axis
    pipeline: Axis
    context: Axis
    data: Axis
    """Ranks with the same part of the model and different sequences."""
    data_context: Axis
    """Data and context combined: ranks with the same part of the model and different tokens."""
    expert: Axis
    """Ranks over which the experts of a layer are distributed."""
    expert_tensor: Axis
    """Ranks over which each expert is split."""
    expert_data: Axis
    """Ranks with the same part of the experts."""
    num_virtual_stages: int
    main_calls: MainCalls = field(default_factory=MainCalls, compare=False)

    @property
    def is_first_stage(self) -> bool:
        return self.pipeline.rank == 0

    @property
    def is_last_stage(self) -> bool:
        return self.pipeline.rank == self.pipeline.size - 1

    @property
    def stage_size(self) -> int:
        """Number of ranks in a pipeline stage."""
        return self.tensor.size * self.data_context.size

    @property
    def stage_rank(self) -> int:
        """Index of this rank in its pipeline stage.

        The tensor rank varies fastest; equivalently, for experts, the expert tensor rank and then the expert rank.
        """
        return self.data_context.rank * self.tensor.size + self.tensor.rank

    @property
    def is_replica_leader(self) -> bool:
        """Whether this rank is the leader of its data-parallel replica, which receives data for all its ranks."""
        return self.tensor.rank == 0 and self.context.rank == 0 and self.is_first_stage

    @property
    def global_rank(self) -> int:
        return dist.get_rank()

    @property
    def is_main(self) -> bool:
        """Whether this is global rank 0, which communicates with the rollout service and records metrics."""
        return self.global_rank == 0


def _axis(group: Any) -> Axis:
    return Axis(group, dist.get_rank(group), dist.get_world_size(group))


def through(group: dist.ProcessGroup, groups: ParallelGroups) -> ParallelGroups:
    """Return the same mesh with axes that send and receive through one group of all ranks.

    A thread can use it while the axes' own groups are in use. It has no collectives along an axis.
    """
    axes = {name: axis for name, axis in vars(groups).items() if isinstance(axis, Axis)}
    moved = {name: replace(axis, group=group, members=tuple(axis.global_ranks)) for name, axis in axes.items()}
    return replace(groups, **moved)


def embedding_group() -> dist.ProcessGroup | None:
    """Return the group in which the first and the last pipeline stage sum the gradients of tied embeddings.

    It is None on other stages.
    """
    group: Any = parallel_state.get_embedding_group(check_initialized=False)
    return group


def create_groups(parallel: ParallelConfig, seed: int, timeout_s: float) -> ParallelGroups:
    """Create the mesh on the initialized process group and seed Megatron's RNG tracker.

    Raises UserError if the number of processes differs from the configured one.
    """
    if dist.get_world_size() != parallel.world_size:
        raise UserError(
            f"parallel.world_size is {parallel.world_size}, but {dist.get_world_size()} trainer processes were "
            "started; set torchrun's --nnodes and --nproc-per-node so that their product equals it"
        )
    num_virtual_stages = parallel.virtual_pipeline_model_parallel_size
    parallel_state.initialize_model_parallel(
        parallel.tensor_model_parallel_size,
        parallel.pipeline_model_parallel_size,
        virtual_pipeline_model_parallel_size=num_virtual_stages if num_virtual_stages > 1 else None,
        context_parallel_size=parallel.context_parallel_size,
        expert_model_parallel_size=parallel.expert_model_parallel_size,
        expert_tensor_parallel_size=parallel.expert_tensor_parallel_size,
        create_gloo_process_groups=False,  # used only by Megatron's own checkpoints
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
        expert_data=_axis(parallel_state.get_expert_data_parallel_group()),
        num_virtual_stages=num_virtual_stages,
        main_calls=MainCalls(timeout_s),
    )


def seed_update(seed: int, update: int) -> None:
    """Seed Megatron's RNG tracker by the number of an update in the run, so that a resumed run has the same dropout.

    Megatron's checkpoints have the RNG states of all ranks instead, which are of no use to another layout.
    """
    model_parallel_cuda_manual_seed(int(np.random.default_rng((seed, update)).integers(1 << 31)))
