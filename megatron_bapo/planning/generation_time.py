"""Seconds in which the engines generate one rollout batch."""

from __future__ import annotations

import math
from statistics import NormalDist

from megatron_bapo.config.architecture import Architecture
from megatron_bapo.config.schema import Config
from megatron_bapo.planning.batch_course import batch_course, interval_tokens
from megatron_bapo.planning.collective_time import Links
from megatron_bapo.planning.concurrency import concurrency
from megatron_bapo.planning.decode_cost import DecodeCost
from megatron_bapo.planning.hardware import Assumptions, Gpu
from megatron_bapo.planning.known_models import teacher_of
from megatron_bapo.planning.parameters import num_active_parameters
from megatron_bapo.planning.precision import DTYPE_BYTES, engine_architecture, engine_matrix_bytes, engine_speedup
from megatron_bapo.planning.response_lengths import Lengths, lengths_of, mean_length
from megatron_bapo.planning.rollout_memory import EngineMemory

LAST_WAVES = 3.0
"""Responses of a batch whose course is followed, over those that run at once. Those before take what they take in an
engine whose responses are of all ages."""


def generation_seconds(
    config: Config, architecture: Architecture, gpu: Gpu, engine: EngineMemory, assumptions: Assumptions
) -> float:
    """Return the seconds in which the engines generate one rollout batch.

    With mode=sync a batch starts on idle engines and ends with the last response of any engine. An engine decodes as
    many responses as it has room for; others wait, and in the end fewer and fewer run (the straggler tail). With
    mode=async the next prompts take the place of finished ones, so that engines stay full; a batch still takes the time
    of its longest response, but up to `max_staleness` batches wait at the same time. Prompts are prefilled once per
    group, without a prefix cache once per response.
    """
    rollout = config.rollout
    responses = config.trainer.train_batch_size / rollout.max_reuse / rollout.num_engines
    lengths = lengths_of(config, assumptions)
    mean, prompt = lengths.mean_response, lengths.prompt
    prefill = prefill_seconds(config, architecture, gpu, assumptions, responses / engine.sharing * prompt)
    waiting = (1 + rollout.max_staleness) if rollout.mode == "async" else 1
    cost = decode_cost(config, architecture, gpu, engine, assumptions)

    def full_steps(num_tokens: float, most: float) -> float:
        return num_tokens / most * cost.seconds(1, most, most * (prompt + lengths.halfway))

    at_once = concurrency(config, engine, assumptions)
    last = min(responses, LAST_WAVES * at_once)
    room = int(engine.kv_tokens / _largest_share(lengths, responses, rollout.num_engines))
    course = batch_course(lengths, engine.sharing, last, room, rollout.max_num_seqs, engine.state_tokens)
    batch = full_steps((responses - last) * mean, at_once) + interval_tokens(lengths) * sum(
        cost.seconds(1, each.running, each.tokens) * _any(each.running * rollout.num_engines) for each in course
    )
    if waiting == 1:
        return prefill + batch
    most = max(1.0, min(waiting * responses, at_once))
    return prefill + max(full_steps(responses * mean, most), batch / waiting)


def _largest_share(lengths: Lengths, responses: float, num_engines: int) -> float:
    """Return the expected tokens of the engine with the longest responses, over the mean of the engines.

    The batch ends with that engine. The expected largest of normal numbers is Blom's approximation (1958).
    """
    deviations = NormalDist().inv_cdf((num_engines - 0.375) / (num_engines + 0.25))
    return 1.0 + deviations * lengths.variation / math.sqrt(responses)


def _any(expected: float) -> float:
    """Return the probability that any response runs of which this number is expected to run."""
    return 1.0 - math.exp(-expected)


def longest_request_seconds(
    config: Config, architecture: Architecture, gpu: Gpu, engine: EngineMemory, assumptions: Assumptions
) -> float:
    """Return the seconds of the longest request to a full engine, which is a whole response or its token budget."""
    lengths, running = lengths_of(config, assumptions), concurrency(config, engine, assumptions)
    cost = decode_cost(config, architecture, gpu, engine, assumptions)
    step = cost.seconds(1, running, running * (lengths.prompt + lengths.halfway))
    return (config.rollout.partial_rollout.token_budget or config.rollout.max_response_length) * step


def decode_cost(
    config: Config, architecture: Architecture, gpu: Gpu, engine: EngineMemory, assumptions: Assumptions
) -> DecodeCost:
    """Return the decoding cost of one engine.

    Pipeline stages process equal parts of the batch in parallel, and each part has to pass through the weights of all
    stages. Tensor parallelism reduces the hidden states twice in a layer. Without CUDA graphs the host launches the
    kernels of each layer.
    """
    rollout, arch = config.rollout, architecture
    size, num_stages = rollout.tensor_parallel_size, rollout.pipeline_parallel_size
    width = engine_architecture(config, arch, gpu).moe_intermediate_size
    experts = len(arch.moe_layers) * arch.num_experts * 3 * arch.hidden_size * width
    expert_bytes = experts // size * engine_matrix_bytes(config)
    unrouted = (1.0 - arch.num_experts_per_tok / arch.num_experts) ** (1 / num_stages) if arch.num_experts else 0.0
    bytes_per_s = gpu.memory_tb_s * 1e12 * assumptions.memory_efficiency
    flops_per_s = rollout.ranks_per_engine * gpu.bf16_flops * assumptions.compute_efficiency
    flops_per_s *= engine_speedup(config, gpu, assumptions)
    links = Links(gpu, assumptions, min(rollout.ranks_per_engine_node, assumptions.gpus_per_node))
    reductions = 2 * arch.num_hidden_layers * (size > 1)
    reduced = 2 * (size - 1) / size * arch.hidden_size * DTYPE_BYTES[config.model.dtype]
    per_sequence = 2.0 * num_active_parameters(arch) / flops_per_s + reductions * reduced / links.bandwidth(size)
    num_moe = len(arch.moe_layers)
    launches_ms = (arch.num_hidden_layers - num_moe) * assumptions.decode_layer_ms
    launches_ms += num_moe * assumptions.decode_expert_layer_ms
    return DecodeCost(
        overhead=num_stages * assumptions.decode_overhead_ms / 1e3,
        weights=(num_stages * engine.weights - expert_bytes) / bytes_per_s,
        experts=expert_bytes / bytes_per_s,
        unrouted=unrouted,
        latency=reductions * links.latency(size),
        waits=assumptions.engine_waits,
        per_token=engine.kv_per_token / bytes_per_s,
        per_sequence=per_sequence,
        per_state=2 * engine.state_bytes / bytes_per_s,
        per_request=assumptions.decode_sequence_us / 1e6,
        launches=rollout.enforce_eager * launches_ms / 1e3,
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
