"""Bytes of parameters, gradients and optimizer state on one rank, as Megatron-Core allocates them.

Megatron stores each model chunk's gradients in two flat buffers, one for the experts and one for the rest. The
distributed optimizer stores the parameters in the same way. Then each parameter starts at a multiple of 64 elements,
buckets are padded to a multiple of 128 and of the number of ranks that share them
(megatron/core/distributed/param_and_grad_buffer.py), and each of these ranks keeps the fp32 parameters and moments of
its equal part of every bucket.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from megatron_bapo.config.architecture import Architecture
from megatron_bapo.config.padding import round_up
from megatron_bapo.config.schema import Config, ParallelConfig
from megatron_bapo.planning.hardware import Assumptions
from megatron_bapo.planning.known_models import teacher_of
from megatron_bapo.planning.parameters import (
    ChunkShape,
    Parameter,
    Split,
    chunk_parameters,
    count_elements,
    stage_chunks,
)
from megatron_bapo.planning.precision import DTYPE_BYTES, FP8_BYTES, quantised_elements

FP32 = 4
NUM_MOMENTS = 2
THIS_TRAINER = Assumptions()
PARAMETER_ALIGNMENT, BUCKET_ALIGNMENT = 64, 128
"""Alignments in elements; they apply only with the distributed optimizer."""
DEFAULT_BUCKET_SIZE, BUCKET_SIZE_PER_RANK = 40_000_000, 1_000_000
"""Parameters per bucket where the gradient reduction overlaps with the backward pass."""


@dataclass(frozen=True)
class ModelState:
    """Bytes of the training state on one rank, allocated from the first update to the last."""

    parameters: int
    gradients: int
    main_parameters: int
    """fp32 main parameters, where the model computes in another dtype."""
    moments: int
    offloaded: int
    """Pinned host memory of the offloaded optimizer: fp32 parameters, moments and a copy of the gradients."""
    reference: int
    """Parameters of the reference model with their FP8 copies, where a KL coefficient needs it."""
    teacher: int = 0
    """Parameters of the teacher with their FP8 copies."""
    updated: int = 0
    """Parameters that this rank's optimizer updates, in elements."""
    quantised: int = 0
    """FP8 copies of weights beside `parameters`: a copy and its transpose, or only the transpose with fp8.param."""

    @property
    def optimizer(self) -> int:
        return self.main_parameters + self.moments

    @property
    def on_device(self) -> int:
        return self.parameters + self.gradients + self.optimizer + self.frozen + self.quantised

    @property
    def frozen(self) -> int:
        """Bytes of the models that are not trained."""
        return self.reference + self.teacher

    @property
    def kept_offloaded(self) -> int:
        """Bytes that `trainer.offload` copies to host memory; gradients and FP8 copies are dropped."""
        return self.on_device - self.gradients - self.quantised


def model_state(
    config: Config,
    architecture: Architecture,
    stage: int,
    data_rank: int = 0,
    expert_data_rank: int = 0,
    *,
    assumptions: Assumptions = THIS_TRAINER,
) -> ModelState:
    """Return the state of one rank of a pipeline stage.

    `data_rank` is its rank in the group that shares the dense parameters, `expert_data_rank` in the group that shares
    the same experts.
    """
    dtype = DTYPE_BYTES[config.model.dtype]
    lora: Any = config.model.lora
    chunks = stage_chunks(architecture, config.parallel, stage)
    held = count_elements(architecture, Split.of(config.parallel), chunks, lora)
    num_allocated = num_own = held.trained
    if config.parallel.use_distributed_optimizer:
        num_allocated, num_own = _distributed(config, architecture, stage, data_rank, expert_data_rank)
    optimizer, biases = num_own * FP32, held.in_fp32 * FP32
    main = optimizer if config.model.dtype != "float32" else 0
    offload = config.optimizer.cpu_offload
    in_fp8 = quantised_elements(config, architecture, stage)
    kept_in_fp8 = in_fp8 if config.fp8 is not None and config.fp8.param else 0
    # Hopper's FP8 products need a weight and its transpose, and both are cached from one micro-batch to the next.
    copies = FP8_BYTES * (2 * in_fp8 - kept_in_fp8)
    saved = kept_in_fp8 * (dtype - FP8_BYTES)
    num_reference = held.trained if lora is None else held.frozen
    on_device = not assumptions.reference_on_host
    return ModelState(
        parameters=(held.frozen + num_allocated) * dtype + biases - saved,
        gradients=num_allocated * min(assumptions.gradient_bytes, DTYPE_BYTES[config.optimizer.grads_dtype]),
        main_parameters=0 if offload else main,
        moments=0 if offload else NUM_MOMENTS * num_own * moment_bytes(config, assumptions),
        offloaded=(2 + NUM_MOMENTS) * optimizer if offload else 0,
        reference=num_reference * dtype + biases - saved + copies if config.has_reference_copy and on_device else 0,
        teacher=_teacher_bytes(config, stage) if on_device and config.algorithm.trainer_holds_teacher else 0,
        updated=num_own,
        quantised=copies,
    )


def moment_bytes(config: Config, assumptions: Assumptions) -> int:
    """Return the bytes of each of Adam's moments of a parameter."""
    return min(assumptions.moment_bytes, DTYPE_BYTES[config.optimizer.moments_dtype])


def _teacher_bytes(config: Config, stage: int) -> int:
    """Return the bytes of the teacher's parameters and their FP8 copies on one rank of a pipeline stage."""
    teacher = teacher_of(config)
    if teacher is None:
        return 0
    layout: Any = config.parallel.for_teacher
    config = config.model_copy(update={"parallel": layout})
    held = count_elements(teacher, Split.of(layout), stage_chunks(teacher, layout, stage))
    in_fp8 = quantised_elements(config, teacher, stage)
    # Of a weight and its transpose in FP8, the weight takes the place of the bfloat16 one with fp8.param.
    kept = DTYPE_BYTES[config.model.dtype] if config.fp8 is not None and config.fp8.param else 0
    return held.trained * DTYPE_BYTES[config.model.dtype] + held.in_fp32 * FP32 + in_fp8 * (2 * FP8_BYTES - kept)


def _distributed(
    config: Config, architecture: Architecture, stage: int, data_rank: int, expert_data_rank: int
) -> tuple[int, int]:
    """Return a rank's elements with the distributed optimizer: (allocated with padding, updated by it)."""
    parallel = config.parallel
    lora: Any = config.model.lora
    groups = (False, data_context_size(parallel), data_rank), (True, expert_data_size(parallel), expert_data_rank)
    num_allocated = num_own = 0
    for index, chunk in enumerate(stage_chunks(architecture, parallel, stage)):
        bucket_size = None if index or stage else _bucket_size(parallel)
        for is_expert, size, rank in groups:
            allocated, own = _buffer(architecture, Split.of(parallel), chunk, lora, is_expert, size, rank, bucket_size)
            num_allocated += allocated
            num_own += own
    return num_allocated, num_own


@lru_cache(maxsize=8192)
def _buffer(
    architecture: Architecture,
    split: Split,
    chunk: ChunkShape,
    lora: Any,
    is_expert: bool,
    num_ranks: int,
    rank: int,
    bucket_size: int | None,
) -> tuple[int, int]:
    """Return the elements of one of a chunk's buffers: (allocated with padding, updated by one of its ranks)."""
    parameters = chunk_parameters(architecture, split, chunk, lora)
    buckets = _buckets([p for p in parameters if p.is_trained and p.is_expert == is_expert], num_ranks, bucket_size)
    num_own = sum(bucket.num_owned(rank, num_ranks) for bucket in buckets)
    return (buckets[-1].stop if buckets else 0), num_own


def data_context_size(parallel: ParallelConfig) -> int:
    """Return the number of ranks that share the dense parameters."""
    return parallel.data_parallel_size * parallel.context_parallel_size


def expert_data_size(parallel: ParallelConfig) -> int:
    """Return the number of ranks that share the same experts."""
    tensor = parallel.expert_tensor_parallel_size or parallel.tensor_model_parallel_size
    stage = parallel.world_size // parallel.pipeline_model_parallel_size
    return stage // (tensor * parallel.expert_model_parallel_size)


@dataclass(frozen=True)
class _Bucket:
    start: int
    stop: int
    """End of the bucket, padding included."""
    spans: tuple[tuple[int, int], ...]
    """[start, stop) of parameters without a gap between them, in elements."""

    def num_owned(self, rank: int, num_ranks: int) -> int:
        """Return the elements of parameters in the rank's equal part of the bucket."""
        part = (self.stop - self.start) // num_ranks
        low, high = self.start + rank * part, self.start + (rank + 1) * part
        return sum(max(0, min(high, stop) - max(low, start)) for start, stop in self.spans)


def _bucket_size(parallel: ParallelConfig) -> int | None:
    """Return the number of parameters after which a bucket is full; None means a single bucket.

    Later stages and chunks always have a single bucket.
    """
    if not parallel.overlap_grad_reduce:
        return None
    default = max(DEFAULT_BUCKET_SIZE, BUCKET_SIZE_PER_RANK * parallel.data_parallel_size)
    return parallel.ddp_bucket_size or default


def _buckets(parameters: Sequence[Parameter], num_ranks: int, bucket_size: int | None) -> list[_Bucket]:
    """Return one buffer's buckets, which are filled in the order of the backward pass."""
    alignment = math.lcm(num_ranks, BUCKET_ALIGNMENT)
    buckets: list[_Bucket] = []
    spans: list[tuple[int, int]] = []
    bucket_start = end = 0

    def close() -> int:
        nonlocal bucket_start, spans
        stop = round_up(end, alignment)
        buckets.append(_Bucket(bucket_start, stop, tuple(spans)))
        bucket_start, spans = stop, []
        return stop

    for parameter in reversed(parameters):
        start = round_up(end, PARAMETER_ALIGNMENT)
        if parameter.shares_embedding and spans:
            start = close()
        adjacent = spans and spans[-1][1] == start
        end = start + parameter.numel
        spans.append((spans.pop()[0] if adjacent else start, end))
        if parameter.shares_embedding or (bucket_size is not None and end - bucket_start >= bucket_size):
            end = close()
    if spans:
        close()
    return buckets
