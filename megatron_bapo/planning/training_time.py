"""Seconds of the trainer's work in one step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields

from megatron_bapo.config.architecture import Architecture
from megatron_bapo.config.pipeline_layers import stage_layers
from megatron_bapo.config.schema import Config, ParallelConfig
from megatron_bapo.planning import collective_time
from megatron_bapo.planning.collective_time import Links
from megatron_bapo.planning.hardware import Assumptions, Gpu
from megatron_bapo.planning.known_models import teacher_of
from megatron_bapo.planning.layer_time import (
    QUANTISED_EXPERT_TENSORS,
    ExpertSplit,
    Kernels,
    Passes,
    mixing_block,
    mixing_seconds,
    mlp_block,
    moe_block,
    output_block,
)
from megatron_bapo.planning.model_state import data_context_size, expert_data_size, model_state
from megatron_bapo.planning.precision import DTYPE_BYTES
from megatron_bapo.planning.response_lengths import lengths_of, mean_length
from megatron_bapo.planning.trainer_memory import num_micro_batches

ADAM_BYTES = 32
"""Memory traffic of one parameter's Adam update: it reads the gradient, the parameter and both moments, and writes the
parameter, both moments and the low-precision copy."""

GRAPHS_LEAVE = 0.78
"""Share of the host's time that CUDA graphs of attention, router and preprocessing leave: 484 of 623 ms of a step of
Qwen3-30B-A3B (Megatron-Bridge, skills/nemo-mbridge-perf-cuda-graphs)."""


@dataclass(frozen=True)
class TrainingTime:
    """Seconds of each part of the trainer's work in one step."""

    compute: float = 0.0
    """Forward, backward and scoring passes at the assumed efficiency, the mean over pipeline stages."""
    teacher: float = 0.0
    """Forward passes of the teacher over the rollout batch, with their communication."""
    bubble: float = 0.0
    """Filling and draining the pipeline, and waiting for its slowest stage."""
    launch: float = 0.0
    """Waiting for the host to launch kernels."""
    tensor: float = 0.0
    """Collectives of tensor and sequence parallelism."""
    context: float = 0.0
    expert: float = 0.0
    pipeline: float = 0.0
    data: float = 0.0
    """Gradient reduction and parameter gathers that computation does not hide."""
    optimizer: float = 0.0
    swap: float = 0.0
    """Exchanging the policy's parameters with those of a reference model in host memory."""

    @property
    def parts(self) -> dict[str, float]:
        """Seconds by name."""
        names = {"bubble": "pipeline bubble", "launch": "kernel launches", "tensor": "tensor parallelism"}
        return {names.get(field.name, field.name): getattr(self, field.name) for field in fields(self)}

    @property
    def total(self) -> float:
        return sum(self.parts.values())


def scoring_passes(config: Config) -> float:
    """Return the scoring passes (forward only) over a trajectory for each time that it is trained on.

    `trainer/bound_scopes.py` decides which are needed. A step's first update needs none if the current weights have
    generated or scored all its tokens, since all ratios are then 1. Savings and repeated passes of speculation are
    unknown in advance and not counted, nor is the saving where a minibatch is one micro-batch on every rank.
    """
    algorithm, trainer, fp8 = config.algorithm, config.trainer, config.fp8
    recomputed = algorithm.behaviour_policy == "recomputed"
    is_fresh = not config.rollout.may_be_stale and not (fp8 and fp8.uses_delayed_scaling)
    share_scored = 1 - (recomputed or is_fresh) / trainer.updates_per_step
    once = recomputed + algorithm.needs_reference
    return algorithm.searches_minibatch * share_scored + config.logging.entropy_clip_rule + once / trainer.ppo_epochs


def training_time(config: Config, arch: Architecture, gpu: Gpu, assumptions: Assumptions) -> TrainingTime:
    """Return the seconds of one step's updates and scoring passes."""
    parallel, updates = config.parallel, config.trainer.updates_per_step
    count = num_micro_batches(config, assumptions)
    stages = parallel.pipeline_model_parallel_size
    batch = _micro_batch(config, assumptions, count)
    passes = _MicroBatchPasses(config, arch, gpu, assumptions, *batch)
    scored = scoring_passes(config)
    layers = [_num_layers(arch, parallel, stage) for stage in range(stages)]
    by_stage = [passes.of_layers(*numbers, 1 + scored) for numbers in layers]
    by_stage[-1] += _weighted(passes.output, 1 + scored)
    compute = sum(by_stage) / stages
    slowest = max(range(stages), key=by_stage.__getitem__)
    longest = compute if assumptions.balances_stages else by_stage[slowest]
    done, filling = updates * count, updates * (stages - 1) / parallel.virtual_pipeline_model_parallel_size
    # A layer's collectives, in forward passes and in backward passes, which repeat them.
    tensor, context, expert = (
        seconds * (2 + scored + again) * sum(layers[slowest])
        for seconds, again in zip(passes.collectives, passes.repeated, strict=True)
    )
    hop = (2 + scored) * collective_time.stage_seconds(config, arch, passes.links, passes.tokens)
    communication = tensor + context + expert + hop
    launched = passes.host_s * (2 + scored + passes.relaunched) * sum(layers[slowest]) / 2
    launch = max(0.0, launched - longest - communication)
    busy = longest + communication + launch
    data, optimizer = _update_seconds(config, arch, gpu, assumptions)
    return TrainingTime(
        compute=done * compute,
        teacher=_teacher_seconds(config, gpu, assumptions) if config.algorithm.trainer_holds_teacher else 0.0,
        bubble=done * (longest - compute) + filling * busy,
        launch=done * launch,
        tensor=done * tensor,
        context=done * context,
        expert=done * expert,
        pipeline=done * hop,
        data=updates * data,
        optimizer=updates * optimizer,
        swap=_swap_seconds(config, arch, assumptions),
    )


def _swap_seconds(config: Config, arch: Architecture, assumptions: Assumptions) -> float:
    if not (assumptions.reference_on_host and config.has_reference_copy):
        return 0.0
    stages = range(config.parallel.pipeline_model_parallel_size)
    largest = max(model_state(config, arch, stage, assumptions=assumptions).parameters for stage in stages)
    return 3 * largest / (assumptions.host_copy_gb_s * 1e9)


def _teacher_seconds(config: Config, gpu: Gpu, assumptions: Assumptions) -> float:
    """Return the seconds of the teacher's forward passes over one rollout batch; it has the trainer's layout."""
    teacher, count = teacher_of(config), num_micro_batches(config, assumptions)
    if teacher is None:
        return 0.0
    config = config.model_copy(update={"parallel": config.parallel.for_teacher})
    parallel, trainer = config.parallel, config.trainer
    stages = parallel.pipeline_model_parallel_size
    passes = _MicroBatchPasses(config, teacher, gpu, assumptions, *_micro_batch(config, assumptions, count))
    layers = [_num_layers(teacher, parallel, stage) for stage in range(stages)]
    by_stage = [sum(num * each.forward for num, each in zip(nums, passes.layers, strict=True)) for nums in layers]
    by_stage[-1] += passes.output.forward
    slowest = max(range(stages), key=by_stage.__getitem__)
    busy = by_stage[slowest] + sum(passes.collectives) * sum(layers[slowest])
    busy += collective_time.stage_seconds(config, teacher, passes.links, passes.tokens)
    busy = max(busy, passes.host_s / 2 * sum(layers[slowest]))
    done = trainer.train_batch_size / trainer.ppo_mini_batch_size * count
    return busy * (done + (stages - 1) / parallel.virtual_pipeline_model_parallel_size)


def _weighted(seconds: Passes, num_forward: float) -> float:
    return seconds.forward * num_forward + seconds.backward


def _num_layers(arch: Architecture, parallel: ParallelConfig, stage: int) -> tuple[int, int]:
    """Return the number of a stage's layers as (dense, with experts)."""
    layers = [layer for chunk in stage_layers(arch, parallel, stage) for layer in chunk]
    num_moe = len(arch.moe_layers.intersection(layers))
    return len(layers) - num_moe, num_moe


def _micro_batch(config: Config, assumptions: Assumptions, count: int) -> tuple[float, float]:
    """Return (tokens, sum of squared lengths) of the micro-batch that ranks wait for, on all context-parallel ranks.

    Expert-parallel ranks wait for each other in every layer, and pipeline stages for their neighbours, so that the
    fullest of their micro-batches counts. Pipelines that pad have only full ones: what is missing is one more sequence.
    """
    parallel, budget = config.parallel, config.max_micro_batch_tokens
    trajectories = config.trainer.ppo_mini_batch_size / parallel.data_parallel_size / count
    tokens = trajectories * mean_length(config, assumptions)
    square = trajectories * lengths_of(config, assumptions).mean_square
    stages = parallel.pipeline_model_parallel_size
    if assumptions.pads_pipelines and stages > 1:
        return budget, square + (budget - tokens) ** 2
    lengths, waiting = lengths_of(config, assumptions), stages * parallel.expert_model_parallel_size
    fuller = lengths.fullest(budget, waiting) / lengths.fill(budget)
    return tokens * fuller, square * fuller


class _MicroBatchPasses:
    """Seconds of one micro-batch's passes on one rank."""

    def __init__(
        self, config: Config, arch: Architecture, gpu: Gpu, assumptions: Assumptions, tokens: float, square: float
    ) -> None:
        parallel = config.parallel
        tp, cp = parallel.tensor_model_parallel_size, parallel.context_parallel_size
        sp = tp if parallel.sequence_parallel else 1
        self.tokens, self.links = tokens / cp, Links.of_trainer(config, gpu, assumptions)
        adapted = None if config.model.lora is None else config.model.lora.target_modules
        wide = Kernels(gpu, assumptions, adapted=adapted)
        num_moe, num_layers = len(arch.moe_layers), arch.num_hidden_layers
        num_bf16 = num_layers if config.fp8 is None else min(num_layers, sum(config.fp8.num_bf16_layers))
        narrow = Kernels(gpu, assumptions, None if config.fp8 is None else config.fp8.recipe, adapted)
        split, routed = ExpertSplit.of(parallel), self.tokens / sp
        if cp > 1 and config.model.transformer_impl == "local":
            square *= 2  # masked scores are computed and then discarded

        def attention(kernels: Kernels) -> Passes:
            return mixing_block(kernels, arch, tp, sp, cp, self.tokens, square)

        def mlp(kernels: Kernels) -> Passes:
            return (
                mlp_block(kernels, arch, arch.intermediate_size / tp, self.tokens) if num_moe < num_layers else Passes()
            )

        def experts(kernels: Kernels) -> Passes:
            return moe_block(kernels, arch, split, tp, self.tokens, routed) if num_moe else Passes()

        share = num_bf16 / num_layers

        def mean(block: Callable[[Kernels], Passes]) -> Passes:
            return block(wide) * share + block(narrow) * (1 - share)

        attended, fed = mean(attention), (mean(mlp), mean(experts))
        self.layers = [attended + part for part in fed]
        """Of a dense layer and of one with experts."""
        self.output = output_block(wide, arch, tp, self.tokens)
        scores = 2.0 * arch.attention_width * square / (tp * cp)
        scores /= gpu.bf16_flops * assumptions.attention_efficiency
        mixed = mixing_seconds(wide, arch, tp, cp, self.tokens, square, scores)
        self._recompute(parallel, arch, fed, mixed)
        links, tokens = self.links, self.tokens
        self.collectives = (
            collective_time.tensor_seconds(config, arch, links, tokens),
            collective_time.context_seconds(config, arch, links, tokens, scores),
            collective_time.expert_seconds(config, arch, links, routed) * num_moe / num_layers,
        )
        """Of the mean layer and one pass: (tensor, context, expert) parallelism."""
        dense_ms, expert_ms = assumptions.host_layer_ms, assumptions.host_expert_layer_ms
        expert_ms *= 0.5 if assumptions.dispatcher == "hybridep" else GRAPHS_LEAVE**assumptions.captures_graphs
        quantised = 0 if not narrow.quantising_kernels else QUANTISED_EXPERT_TENSORS * arch.num_experts / split.expert
        expert_ms += quantised * (1 - share) * assumptions.host_expert_tensor_us / 1e3
        self.host_s = (dense_ms + (expert_ms - dense_ms) * num_moe / num_layers) / 1e3
        """Of the mean layer, forward and backward."""

    def _recompute(self, parallel: ParallelConfig, arch: Architecture, fed: Sequence[Passes], mixed: float) -> None:
        """Set what the backward pass does again; `mixed` are the seconds of a layer's core attention."""
        full, num_layers = parallel.recompute_granularity == "full", arch.num_hidden_layers
        modules = parallel.recompute_modules if parallel.recompute_granularity == "selective" else ()
        attention, mlp, moe = (name in modules for name in ("core_attn", "mlp", "moe"))
        self.recomputed = [
            layer.forward if full else part.forward * again + mixed * attention
            for layer, part, again in zip(self.layers, fed, (mlp, moe), strict=True)
        ]
        """Seconds in the same layers."""
        dense, experts = (num / num_layers for num in (num_layers - len(arch.moe_layers), len(arch.moe_layers)))
        self.relaunched = full + 0.5 * (dense * mlp + experts * moe)
        """Part of a forward pass's kernels that the host launches again."""
        blocks = full + 0.5 * (dense * mlp + experts * moe * (arch.shared_expert_intermediate_size > 0))
        self.repeated = blocks, float(full or attention), float(full or moe)
        """How often the forward pass's (tensor, context, expert) collectives are repeated."""

    def of_layers(self, num_dense: int, num_moe: int, num_forward: float) -> float:
        """Return the seconds of layers' backward passes, what they compute again, and `num_forward` forward passes."""
        each = zip((num_dense, num_moe), self.layers, self.recomputed, strict=True)
        return sum(number * (_weighted(layer, num_forward) + again) for number, layer, again in each)


def _update_seconds(config: Config, arch: Architecture, gpu: Gpu, assumptions: Assumptions) -> tuple[float, float]:
    """Return the seconds of one update as (data-parallel communication that is not hidden, Adam)."""
    parallel = config.parallel
    stages, dense = range(parallel.pipeline_model_parallel_size), data_context_size(parallel)
    states = (model_state(config, arch, stage, assumptions=assumptions) for stage in stages)
    state = max(states, key=lambda each: each.gradients)
    ranks = max(dense, expert_data_size(parallel) if arch.moe_layers else 1)
    link = Links.of_trainer(config, gpu, assumptions).bandwidth(parallel.tensor_model_parallel_size * dense)
    grad_bytes = min(assumptions.gradient_bytes, DTYPE_BYTES[config.optimizer.grads_dtype])
    trained = state.gradients / grad_bytes * DTYPE_BYTES[config.model.dtype]
    scatter, gather = state.gradients / link, min(state.parameters, trained) / link
    hidden = assumptions.overlap
    data = scatter * (1 - hidden * parallel.overlap_grad_reduce)
    if parallel.use_distributed_optimizer:
        data += gather * (1 - hidden * parallel.overlap_param_gather)
    else:
        data *= 2
    if state.offloaded:
        own = state.updated
        copies = 2 * 4 * own / (assumptions.host_copy_gb_s * 1e9)
        return data * (ranks > 1), copies + ADAM_BYTES * own / (assumptions.host_adam_gb_s * 1e9)
    return data * (ranks > 1), ADAM_BYTES * state.updated / (gpu.memory_tb_s * 1e12 * assumptions.memory_efficiency)
