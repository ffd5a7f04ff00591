"""Seconds in which the engines generate one rollout batch."""

from __future__ import annotations

from megatron_bapo.config.architecture import Architecture
from megatron_bapo.config.schema import Config
from megatron_bapo.planning.collective_time import Links
from megatron_bapo.planning.concurrency import concurrency
from megatron_bapo.planning.decode_cost import DecodeCost
from megatron_bapo.planning.hardware import Assumptions, Gpu
from megatron_bapo.planning.known_models import teacher_of
from megatron_bapo.planning.parameters import num_active_parameters
from megatron_bapo.planning.precision import DTYPE_BYTES, engine_matrix_bytes, engine_speedup
from megatron_bapo.planning.response_lengths import lengths_of, mean_length
from megatron_bapo.planning.rollout_memory import EngineMemory


def generation_seconds(
    config: Config, architecture: Architecture, gpu: Gpu, engine: EngineMemory, assumptions: Assumptions
) -> float:
    """Return the seconds in which the engines generate one rollout batch.

    With mode=sync a batch starts on idle engines and ends with the last response of any engine. While requests are
    queued, an engine decodes as many as fit, which are of all ages in the end; then fewer and fewer, as the
    distribution of lengths has it (the straggler tail). With mode=async the next prompts take the place of finished
    ones, so that engines stay full; a batch still takes the time of its longest response, but up to `max_staleness`
    batches wait at the same time. Prompts are prefilled once per group.
    """
    rollout = config.rollout
    responses = config.trainer.train_batch_size / rollout.max_reuse / rollout.num_engines
    lengths = lengths_of(config, assumptions)
    mean, prompt, most = lengths.mean_response, lengths.prompt, concurrency(config, engine, assumptions)
    prefill = prefill_seconds(config, architecture, gpu, assumptions, responses / rollout.n * prompt)
    waiting = (1 + rollout.max_staleness) if rollout.mode == "async" else 1

    def step_seconds(running: float, generated: float) -> float:
        cost = decode_cost(config, architecture, gpu, engine, assumptions, max(1.0, running))
        return cost.seconds(1, running, running * (prompt + generated))

    if responses <= most.together:
        running, queued, later = responses, 0.0, lengths.started
    else:
        running, later = most.running, lengths.running
        queued_tokens = responses * mean - running * lengths.halfway
        queued = queued_tokens / running * step_seconds(running, lengths.halfway)
    tail = lengths.interval * sum(
        step_seconds(running * share, generated) * _any(share, running * rollout.num_engines)
        for generated, share in later
    )
    if waiting == 1:
        return prefill + queued + tail
    concurrent = max(1.0, min(waiting * responses, most.running))
    steady = responses * mean / concurrent * step_seconds(concurrent, lengths.halfway)
    return prefill + max(steady, (queued + tail) / waiting)


def _any(share: float, num: float) -> float:
    """Return the probability that any of `num` responses runs, of which this share is expected to run."""
    return 1.0 - (1.0 - share) ** num


def longest_request_seconds(
    config: Config, architecture: Architecture, gpu: Gpu, engine: EngineMemory, assumptions: Assumptions
) -> float:
    """Return the seconds of the longest request to a full engine, which is a whole response or its token budget."""
    lengths, running = lengths_of(config, assumptions), concurrency(config, engine, assumptions).running
    cost = decode_cost(config, architecture, gpu, engine, assumptions, running)
    step = cost.seconds(1, running, running * (lengths.prompt + lengths.halfway))
    return (config.rollout.partial_rollout.token_budget or config.rollout.max_response_length) * step


def decode_cost(
    config: Config, architecture: Architecture, gpu: Gpu, engine: EngineMemory, assumptions: Assumptions, batch: float
) -> DecodeCost:
    """Return the decoding cost of one engine.

    `batch` is the number of concurrent sequences, which determines how many experts are read. Pipeline stages process
    equal parts of the batch in parallel, and each part has to pass through the weights of all stages. Tensor
    parallelism reduces the hidden states twice in a layer.
    """
    rollout, arch = config.rollout, architecture
    size, num_stages = rollout.tensor_parallel_size, rollout.pipeline_parallel_size
    experts = len(arch.moe_layers) * arch.num_experts * 3 * arch.hidden_size * arch.moe_intermediate_size
    together = batch / num_stages
    read_share = 1.0 - (1.0 - arch.num_experts_per_tok / arch.num_experts) ** together if arch.num_experts else 1.0
    weights = num_stages * engine.weights - experts // size * engine_matrix_bytes(config) * (1.0 - read_share)
    bytes_per_s = gpu.memory_tb_s * 1e12 * assumptions.memory_efficiency
    flops_per_s = rollout.ranks_per_engine * gpu.bf16_flops * assumptions.compute_efficiency
    flops_per_s *= engine_speedup(config, gpu, assumptions)
    links = Links(gpu, assumptions)
    # Links asks for the GPUs of a host; a group on several nodes with fewer GPUs each crosses the network, too.
    span = size if size <= rollout.ranks_per_engine_node else max(size, assumptions.gpus_per_node + 1)
    reductions = 2 * arch.num_hidden_layers * (size > 1)
    reduced = 2 * (size - 1) / size * arch.hidden_size * DTYPE_BYTES[config.model.dtype]
    per_sequence = 2.0 * num_active_parameters(arch) / flops_per_s + reductions * reduced / links.bandwidth(span)
    return DecodeCost(
        overhead=reductions * links.latency(span) + num_stages * assumptions.decode_overhead_ms / 1e3,
        weights=weights / bytes_per_s,
        per_token=engine.kv_per_token / bytes_per_s,
        per_sequence=per_sequence,
        per_request=assumptions.decode_sequence_us / 1e6,
    )


def prefill_seconds(
    config: Config, architecture: Architecture, gpu: Gpu, assumptions: Assumptions, num_tokens: float
) -> float:
    """Return the seconds in which one engine prefills `num_tokens` prompt tokens, without attention."""
    flops_per_s = config.rollout.ranks_per_engine * gpu.bf16_flops * assumptions.compute_efficiency
    flops_per_s *= engine_speedup(config, gpu, assumptions)
    return 2.0 * num_active_parameters(architecture) * num_tokens / flops_per_s


def teacher_seconds(config: Config, gpu: Gpu, assumptions: Assumptions) -> float:
    """Return the seconds in which the teacher's engines score one rollout batch; 0 without such engines.

    They prefill every prompt and response, without a prefix cache, while others are generated.
    """
    served, architecture = config.serving_teacher, teacher_of(config)
    if served is None or architecture is None:
        return 0.0
    responses = config.trainer.train_batch_size / config.rollout.max_reuse / served.rollout.num_engines
    num_tokens = responses * mean_length(config, assumptions)
    return prefill_seconds(served, architecture, gpu, assumptions, num_tokens)
