"""FLOPs and estimated time of a training step.

The estimate divides the work of each part by the assumed performance (`hardware.Assumptions`) and adds the parts up. It
is accurate to a few tens of percent, and ranks layouts better than that because they share the errors. Sources: the
Megatron-LM paper (arXiv 2104.04473) for FLOPs and the pipeline bubble, arXiv 2205.05198 for the collectives of sequence
parallelism.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megatron_bapo.config.architecture import Architecture
from megatron_bapo.config.schema import Config
from megatron_bapo.planning.decode_cost import DecodeCost
from megatron_bapo.planning.hardware import Assumptions, Gpu
from megatron_bapo.planning.model_state import FP32, data_context_size, expert_data_size, model_state
from megatron_bapo.planning.parameters import num_active_parameters
from megatron_bapo.planning.precision import (
    DTYPE_BYTES,
    engine_matrix_bytes,
    engine_speedup,
    product_seconds_share,
)
from megatron_bapo.planning.rollout_memory import EngineMemory
from megatron_bapo.planning.trainer_memory import mean_length, mean_response, num_micro_batches
from megatron_bapo.planning.weight_transfer import TransferSpeed, traffic

TRAINING_PASSES = 3
"""FLOPs of one forward and one backward pass, in forward passes."""
ADAM_BYTES = 32
"""Memory traffic of one parameter's Adam update: it reads the gradient, the parameter and both moments, and writes the
parameter, both moments and the low-precision copy."""
LATENCY_S = 12e-6
"""Latency of one small all-reduce within a node."""


@dataclass(frozen=True)
class StepTime:
    """Seconds of one step, which is a rollout batch and its updates."""

    generation: float
    compute: float
    """Forward, backward and scoring passes at the assumed efficiency."""
    bubble: float
    """Pipeline bubble."""
    tensor: float
    """Collectives of tensor and sequence parallelism."""
    context: float
    expert: float
    pipeline: float
    data: float
    """Gradient reduction and parameter gathers that computation does not hide."""
    optimizer: float
    weight_sync: float
    model_flops: float
    """FLOPs of one step on all GPUs, without recomputation."""
    num_tokens: float
    """Prompt and response tokens of a step."""
    num_gpus: int
    """GPUs of the trainer."""
    peak_flops: float
    """Peak FLOP/s of one GPU."""
    overlapped: bool
    """True if generation overlaps with training."""

    @property
    def training_parts(self) -> dict[str, float]:
        """Seconds of each part of the trainer's work, by name."""
        return {
            "compute": self.compute,
            "pipeline bubble": self.bubble,
            "tensor parallelism": self.tensor,
            "context": self.context,
            "expert": self.expert,
            "pipeline": self.pipeline,
            "data": self.data,
            "optimizer": self.optimizer,
        }

    @property
    def training(self) -> float:
        return sum(self.training_parts.values())

    @property
    def total(self) -> float:
        work = max(self.generation, self.training) if self.overlapped else self.generation + self.training
        return work + self.weight_sync

    @property
    def mfu(self) -> float:
        """Model FLOPs utilization of the trainer's GPUs during training."""
        return self.model_flops / (self.training * self.num_gpus * self.peak_flops)

    @property
    def tokens_per_s(self) -> float:
        return self.num_tokens / self.total


def forward_flops(architecture: Architecture, length: float, square: float) -> tuple[float, float]:
    """Return the forward FLOPs of one sequence as (linear layers, causal attention).

    `length` is the mean length and `square` the mean square of the lengths, in tokens. Both results are linear in them,
    so that the sums over several sequences give the FLOPs of all. The output layer is counted at every token, as is
    usual, even though only response tokens need it.
    """
    width = architecture.num_attention_heads * architecture.head_dim
    attention = 2 * architecture.num_hidden_layers * width * square
    return 2.0 * num_active_parameters(architecture) * length, attention


def forward_pass_flops(architecture: Architecture, lengths: Sequence[int]) -> float:
    """Return the FLOPs of one forward pass over sequences of these lengths, in tokens."""
    return sum(forward_flops(architecture, sum(lengths), sum(length**2 for length in lengths)))


def step_time(
    config: Config,
    architecture: Architecture,
    gpu: Gpu,
    engine: EngineMemory,
    assumptions: Assumptions,
    *,
    colocated: bool,
) -> StepTime:
    """Return the estimated time of one step; `colocated` says whether the engines share the trainer's GPUs."""
    parallel, trainer = config.parallel, config.trainer
    length, peak = mean_length(config, assumptions), gpu.bf16_tflops * 1e12
    trajectories = trainer.train_batch_size * trainer.ppo_epochs
    products, attention = forward_flops(architecture, length, assumptions.square_over_mean * length**2)
    scored = _scoring_passes(config)
    passes = TRAINING_PASSES + scored
    model_flops = trajectories * passes * (products + attention)
    # bfloat16 FLOPs that would take as long.
    equal = products * product_seconds_share(config, architecture, gpu, assumptions)
    work = passes * (equal + attention) + _recomputed(config, architecture, equal, attention)
    if parallel.context_parallel_size > 1 and config.model.transformer_impl == "local":
        work += passes * attention  # masked scores are computed and then discarded
    compute = trajectories * work / (parallel.world_size * peak * assumptions.compute_efficiency)
    busy = num_micro_batches(config, assumptions) * parallel.virtual_pipeline_model_parallel_size
    tokens = trajectories * length / data_context_size(parallel)
    with_recomputed = passes + (parallel.recompute_granularity == "full")
    tensor, context, expert, pipeline = _layer_collectives(
        config, architecture, gpu, assumptions, tokens, with_recomputed
    )
    data, optimizer = _update_seconds(config, architecture, gpu, assumptions)
    sent = traffic(config, architecture, assumptions.gpus_per_node, colocated=colocated)
    return StepTime(
        generation=generation_seconds(config, architecture, gpu, engine, assumptions),
        compute=compute,
        bubble=compute * (parallel.pipeline_model_parallel_size - 1) / busy,
        tensor=tensor,
        context=context,
        expert=expert,
        pipeline=pipeline,
        data=trainer.updates_per_step * data,
        optimizer=trainer.updates_per_step * optimizer,
        weight_sync=sent.seconds(TransferSpeed.of(gpu, assumptions)),
        model_flops=model_flops,
        num_tokens=trainer.train_batch_size * length,
        num_gpus=parallel.world_size,
        peak_flops=peak,
        overlapped=config.rollout.mode == "async",
    )


def _scoring_passes(config: Config) -> float:
    """Return the scoring passes (forward only) over a trajectory for each time that it is trained on.

    `trainer/bound_scopes.py` decides which are needed. A step's first update needs none if the current weights have
    generated or scored all its tokens, since all ratios are then 1. Savings and repeated passes of speculation are
    unknown in advance and not counted.
    """
    algorithm, trainer, fp8 = config.algorithm, config.trainer, config.fp8
    finds_bounds = algorithm.objective == "bapo" and algorithm.clip_bounds.scope == "minibatch"
    recomputed = algorithm.behaviour_policy == "recomputed"
    is_fresh = not config.rollout.may_be_stale and not (fp8 and fp8.uses_delayed_scaling)
    share_scored = 1 - (recomputed or is_fresh) / trainer.updates_per_step
    once = recomputed + algorithm.needs_reference
    return finds_bounds * share_scored + config.logging.entropy_clip_rule + once / trainer.ppo_epochs


def generation_seconds(
    config: Config, architecture: Architecture, gpu: Gpu, engine: EngineMemory, assumptions: Assumptions
) -> float:
    """Return the seconds in which the engines generate one rollout batch.

    They decode full batches while requests are queued; the time is at least that of one response of maximum length.
    """
    rollout = config.rollout
    responses = config.trainer.train_batch_size / rollout.max_reuse / rollout.num_engines
    concurrent = max(1.0, min(responses, engine.num_concurrent))
    prompt_tokens = config.data.max_prompt_length * assumptions.mean_prompt_fraction
    prefill = prefill_seconds(config, architecture, gpu, assumptions, responses / rollout.n * prompt_tokens)

    def decode_seconds(batch: float) -> float:
        cost = decode_cost(config, architecture, gpu, engine, assumptions, batch)
        return cost.seconds(1, batch, batch * 0.5 * engine.mean_length)

    waves = responses / concurrent * mean_response(config, assumptions)
    full = waves * decode_seconds(concurrent)
    alone = rollout.max_response_length * decode_seconds(max(1.0, concurrent / 8))
    return prefill + max(full, alone)


def decode_cost(
    config: Config, architecture: Architecture, gpu: Gpu, engine: EngineMemory, assumptions: Assumptions, batch: float
) -> DecodeCost:
    """Return the decoding cost of one engine.

    `batch` is the number of concurrent sequences, which determines how many experts are read. Pipeline stages process
    equal parts of the batch in parallel, and each part has to pass through the weights of all stages.
    """
    rollout, arch = config.rollout, architecture
    size, num_stages = rollout.tensor_parallel_size, rollout.pipeline_parallel_size
    experts = len(arch.moe_layers) * arch.num_experts * 3 * arch.hidden_size * arch.moe_intermediate_size
    together = batch / num_stages
    read_share = 1.0 - (1.0 - arch.num_experts_per_tok / arch.num_experts) ** together if arch.num_experts else 1.0
    weights = num_stages * engine.weights - experts // size * engine_matrix_bytes(config) * (1.0 - read_share)
    bytes_per_s = gpu.memory_tb_s * 1e12 * assumptions.memory_efficiency
    flops_per_s = (rollout.ranks_per_engine * gpu.bf16_tflops * 1e12 * assumptions.compute_efficiency) * engine_speedup(
        config, gpu, assumptions
    )
    collectives = 2 * arch.num_hidden_layers * LATENCY_S * (size > 1)
    return DecodeCost(
        overhead=collectives + num_stages * assumptions.decode_overhead_ms / 1e3,
        weights=weights / bytes_per_s,
        per_token=engine.kv_per_token / bytes_per_s,
        per_sequence=2.0 * num_active_parameters(arch) / flops_per_s,
    )


def prefill_seconds(
    config: Config, architecture: Architecture, gpu: Gpu, assumptions: Assumptions, num_tokens: float
) -> float:
    """Return the seconds in which one engine prefills `num_tokens` prompt tokens, without attention."""
    flops_per_s = config.rollout.ranks_per_engine * gpu.bf16_tflops * 1e12 * assumptions.compute_efficiency
    flops_per_s *= engine_speedup(config, gpu, assumptions)
    return 2.0 * num_active_parameters(architecture) * num_tokens / flops_per_s


def _recomputed(config: Config, architecture: Architecture, products: float, attention: float) -> float:
    """Return the FLOPs of recomputing activations for one trajectory."""
    parallel, arch = config.parallel, architecture
    if parallel.recompute_granularity is None:
        return 0.0
    if parallel.recompute_granularity == "full":
        return products + attention
    width, moe = arch.hidden_size * 3, len(arch.moe_layers)
    parameters = {
        "mlp": (arch.num_hidden_layers - moe) * width * arch.intermediate_size,
        "moe": moe * width * arch.moe_intermediate_size * arch.num_experts_per_tok,
        "core_attn": 0,
    }
    again = sum(parameters[module] for module in parallel.recompute_modules) / num_active_parameters(arch) * products
    return again + attention * ("core_attn" in parallel.recompute_modules)


def _layer_collectives(
    config: Config, arch: Architecture, gpu: Gpu, assumptions: Assumptions, tokens: float, passes: float
) -> tuple[float, float, float, float]:
    """Return the communication seconds of (tensor, context, expert, pipeline) parallelism.

    `tokens` are the tokens of one context-parallel rank in a step. `passes` are forward passes; a backward pass counts
    as two.
    """
    parallel, b = config.parallel, DTYPE_BYTES[config.model.dtype]
    tp, cp, pp = (
        parallel.tensor_model_parallel_size,
        parallel.context_parallel_size,
        parallel.pipeline_model_parallel_size,
    )
    ep, etp = parallel.expert_model_parallel_size, parallel.expert_tensor_parallel_size or tp
    layers, hidden = arch.num_hidden_layers / pp, tokens * arch.hidden_size * b
    inside, across = gpu.nvlink_gb_s * 1e9, gpu.network_gb_s * 1e9

    def seconds(num_bytes: float, span: int) -> float:
        link = inside if span <= assumptions.gpus_per_node else across
        return num_bytes / (link * assumptions.link_efficiency)

    keys = 2 * tokens * max(1, arch.num_key_value_heads // tp) * arch.head_dim * b
    sent = tokens / (tp if parallel.sequence_parallel else 1) * arch.hidden_size * b
    moe = len(arch.moe_layers) / pp
    routed = sent * arch.num_experts_per_tok
    return (
        seconds(layers * passes * 4 * hidden * (tp - 1) / tp, tp),
        seconds(layers * passes * keys * (cp - 1), tp * cp),
        seconds(moe * passes * 2 * routed * ((ep - 1) / ep + (etp - 1)), etp * ep),
        seconds(
            passes * sent * parallel.virtual_pipeline_model_parallel_size * (pp > 1), assumptions.gpus_per_node + 1
        ),
    )


def _update_seconds(config: Config, arch: Architecture, gpu: Gpu, assumptions: Assumptions) -> tuple[float, float]:
    """Return the seconds of one update as (data-parallel communication that is not hidden, Adam)."""
    parallel = config.parallel
    state, dense = model_state(config, arch, 0), data_context_size(parallel)
    ranks = max(dense, expert_data_size(parallel) if arch.moe_layers else 1)
    inside = parallel.tensor_model_parallel_size * dense <= assumptions.gpus_per_node
    link = (gpu.nvlink_gb_s if inside else gpu.network_gb_s) * 1e9 * assumptions.link_efficiency
    scatter, gather = state.gradients / link, state.parameters / link
    hidden = assumptions.overlap
    data = scatter * (1 - hidden * parallel.overlap_grad_reduce)
    if parallel.use_distributed_optimizer:
        data += gather * (1 - hidden * parallel.overlap_param_gather)
    else:
        data *= 2
    if state.offloaded:
        own = state.offloaded / (4 * FP32)
        copies = 2 * FP32 * own / (assumptions.host_copy_gb_s * 1e9)
        return data * (ranks > 1), copies + ADAM_BYTES * own / (assumptions.host_adam_gb_s * 1e9)
    own = state.moments / (2 * FP32)
    return data * (ranks > 1), ADAM_BYTES * own / (gpu.memory_tb_s * 1e12 * assumptions.memory_efficiency)
