"""Peak memory of each of the trainer's pipeline stages."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from itertools import chain
from typing import Any

from megatron_bapo.config.architecture import Architecture
from megatron_bapo.config.padding import round_up
from megatron_bapo.config.schema import Config, ParallelConfig
from megatron_bapo.planning.activations import (
    MicroBatch,
    Terms,
    chunk_activations,
    largest_temporaries,
    layer_activations,
    output_layer_bytes,
    without_recompute,
)
from megatron_bapo.planning.hardware import GIB, Assumptions
from megatron_bapo.planning.model_state import ModelState, model_state
from megatron_bapo.planning.parameters import LayerKind, layer_kinds, stage_chunks
from megatron_bapo.planning.precision import DTYPE_BYTES, FP8_BYTES
from megatron_bapo.planning.response_lengths import lengths_of, mean_length


@dataclass(frozen=True)
class StageMemory:
    """Bytes of the fullest rank of one pipeline stage."""

    stage: int
    num_layers: int
    state: ModelState
    in_flight: tuple[int, ...]
    """Micro-batches whose activations each model chunk holds at its peak."""
    activations: Terms
    """Bytes of the activations of all in-flight micro-batches."""
    backward: int
    """Bytes of the layer whose backward pass runs: recomputed activations, temporaries and activation gradients."""
    output_layer: int
    """Bytes of the chunked log-probs, on the last stage."""
    reserved: int
    """Bytes of CUDA contexts, communication buffers and fragmentation."""

    @property
    def resident(self) -> int:
        """Bytes that stay allocated during generation."""
        return self.state.on_device

    @property
    def peak(self) -> int:
        return self.resident + sum(self.activations.values()) + self.backward + self.output_layer + self.reserved


def largest_micro_batch(config: Config, assumptions: Assumptions) -> MicroBatch:
    """Return a micro-batch that fills the token budget with trajectories of maximum length and one of the rest."""
    rule, budget = config.padding_rule, config.max_micro_batch_tokens
    longest = rule.allocated([config.max_sequence_length])
    usable = max(budget // rule.granularity * rule.granularity, longest)
    lengths = [longest] * (usable // longest)
    rest = usable - sum(lengths)
    imbalance = assumptions.expert_imbalance if config.parallel.expert_model_parallel_size > 1 else 1.0
    lengths += [rest] if rest else []
    dtype_bytes = DTYPE_BYTES[config.model.dtype]
    return MicroBatch(
        tuple(lengths),
        dtype_bytes,
        fused_norms=True,
        expert_imbalance=imbalance,
        fused_swiglu=True,
        fused_attention=config.model.transformer_impl == "transformer_engine",
        product_input_bytes=FP8_BYTES if config.fp8 is not None else dtype_bytes,
    )


def attention_share(config: Config, architecture: Architecture) -> float:
    """Return the largest share of a layer's activations that attention saves, with and without recomputation.

    It is what a token that several sequences share takes again for each of them (`model/packed_attention.py`).
    """
    batch, lora = largest_micro_batch(config, Assumptions()), config.model.lora
    layers = [
        layer_activations(architecture, parallel, batch, kind, lora)
        for parallel in (config.parallel, without_recompute(config.parallel))
        for kind in layer_kinds(architecture, range(architecture.num_hidden_layers))
    ]
    return max(terms["attention kernel"] / terms.total() for terms in layers)


def num_micro_batches(config: Config, assumptions: Assumptions) -> int:
    """Return the micro-batches of one update on one data-parallel rank."""
    trajectories = config.trainer.ppo_mini_batch_size / config.parallel.data_parallel_size
    budget = config.max_micro_batch_tokens
    fill = lengths_of(config, assumptions).fill(budget)
    needed = math.ceil(trajectories * mean_length(config, assumptions) / (budget * fill) - 1e-6)
    return round_up(max(1, needed), config.parallel.num_micro_batches_multiple)


def stage_memory(config: Config, architecture: Architecture, assumptions: Assumptions) -> list[StageMemory]:
    """Return the memory of each pipeline stage."""
    stages = range(config.parallel.pipeline_model_parallel_size)
    return [_stage_memory(config, architecture, assumptions, stage) for stage in stages]


def in_flight(parallel: ParallelConfig, stage: int, num_micro_batches: int) -> tuple[int, ...]:
    """Return the maximum number of in-flight micro-batches of each model chunk: forward done, backward pending.

    1F1B starts as many forward passes as there are stages from this one on. The interleaved schedule runs one round of
    micro-batches through every chunk but the last, plus two for every later stage
    (megatron/core/pipeline_parallel/schedules.py, get_pp_rank_microbatches). A round has as many micro-batches as there
    are stages.
    """
    pp, vpp = parallel.pipeline_model_parallel_size, parallel.virtual_pipeline_model_parallel_size
    if vpp == 1:
        return (min(num_micro_batches, pp - stage),)
    started = min(num_micro_batches * vpp, 2 * (pp - stage - 1) + (vpp - 1) * pp + 1)
    chunks = Counter(forward % (pp * vpp) // pp for forward in range(started))
    return tuple(chunks[chunk] for chunk in range(vpp))


def _stage_memory(config: Config, architecture: Architecture, assumptions: Assumptions, stage: int) -> StageMemory:
    parallel, batch = config.parallel, largest_micro_batch(config, assumptions)
    lora: Any = config.model.lora
    chunks = stage_chunks(architecture, parallel, stage)
    counts = in_flight(parallel, stage, config.most_micro_batches)
    activations: Terms = Counter()
    for chunk, count in zip(chunks, counts, strict=True):
        for name, num_bytes in chunk_activations(architecture, parallel, chunk, batch, lora).items():
            activations[name] += count * num_bytes
    hidden = batch.split_tokens(parallel) * architecture.hidden_size * batch.dtype_bytes
    for chunk, count in zip(chunks, counts, strict=True):
        # Megatron keeps what a chunk received until its backward pass, and with virtual stages also what it has sent.
        keeps_sent = parallel.virtual_pipeline_model_parallel_size > 1 and not chunk.has_output
        activations["between stages"] += count * hidden * ((not chunk.has_embedding) + keeps_sent)
    kinds = layer_kinds(architecture, chain.from_iterable(chunk.layers for chunk in chunks))
    backward = max(_backward_bytes(architecture, parallel, batch, kind, lora) for kind in kinds)
    output_layer = 0
    if chunks[-1].has_output:
        kept, workspace = output_layer_bytes(
            *(architecture, parallel, batch, config.trainer.logprob_chunk_size), is_trained=lora is None
        )
        # What the loss keeps is freed by its own backward pass, before that of the layers.
        output_layer = max(0, kept + workspace - backward)
    reserved = assumptions.reserved_gib * GIB + assumptions.fragmentation * sum(activations.values())
    state = model_state(config, architecture, stage, assumptions=assumptions)
    num_layers = sum(len(chunk.layers) for chunk in chunks)
    return StageMemory(stage, num_layers, state, counts, activations, backward, output_layer, int(reserved))


def _backward_bytes(
    architecture: Architecture, parallel: ParallelConfig, batch: MicroBatch, kind: LayerKind, lora: Any
) -> int:
    """Return the bytes of a layer's recomputed activations and of what exists only while they are computed or used."""
    whole, kept = (
        layer_activations(architecture, layout, batch, kind, lora) for layout in (without_recompute(parallel), parallel)
    )
    temporaries = largest_temporaries(architecture, parallel, batch, kind)
    return max(0, sum(whole.values()) - sum(kept.values())) + temporaries
