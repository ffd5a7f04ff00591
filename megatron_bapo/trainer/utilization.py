"""Model FLOPs of a training step and the resulting utilization of the trainer's devices.

A forward and backward pass whose gradients are used counts as three forward passes, and a scoring pass as one. Linear
layers whose weights are frozen beside adapters have no gradients of weights, and count as two. A training pass under
mispredicted clip bounds counts as one forward pass, because only its ratios are used. Extra work for recomputation,
padding and masks is not counted as model FLOPs. Every sequence counts in full, also where a micro-batch shares its
prompt with others.
"""

from __future__ import annotations

from collections.abc import Sequence

from megatron_bapo.metrics.values import Last, Metric, Sum
from megatron_bapo.model.build import PolicyModel
from megatron_bapo.planning.flops import forward_pass_flops, training_pass_flops
from megatron_bapo.planning.hardware import peak_flops
from megatron_bapo.trainer.micro_batches import Example
from megatron_bapo.trainer.worker import Worker

MODEL_FLOPS = "perf/model_flops"


def scoring_flops(models: Sequence[PolicyModel], examples: Sequence[Example]) -> dict[str, Metric]:
    """Return the model FLOPs of one forward pass of each model over the examples, summed over the whole trainer."""
    lengths = [example.num_input_tokens for example in examples]
    return {MODEL_FLOPS: Sum(sum(forward_pass_flops(model.architecture, lengths) for model in models))}


def update_flops(worker: Worker, examples: Sequence[Example], *, scored: bool) -> dict[str, Metric]:
    """Return this rank's term of the FLOPs of one update; the sum over data- and context-parallel ranks is the total.

    `scored` says that a scoring pass preceded the training pass.
    """
    architecture, lengths = worker.model.architecture, [example.num_input_tokens for example in examples]
    flops = training_pass_flops(architecture, lengths, worker.config.model.lora)
    flops += (scored + worker.config.logging.entropy_clip_rule) * forward_pass_flops(architecture, lengths)
    return {MODEL_FLOPS: Sum(flops / worker.groups.data_context.size)}


def utilization_metrics(
    model_flops: Metric, seconds: float, num_ranks: int, device_name: str | None
) -> dict[str, Metric]:
    """Return the TFLOP/s of each trainer rank and, for a GPU of known peak, the share of its dense bfloat16 peak (MFU).

    `seconds` is the training time.
    """
    assert isinstance(model_flops, Sum), f"model FLOPs must be a Sum metric, not {type(model_flops).__name__}"
    rate = model_flops.value / (seconds * num_ranks)
    metrics: dict[str, Metric] = {"perf/tflops_per_gpu": Last(rate / 1e12)}
    peak = None if device_name is None else peak_flops(device_name)
    return metrics if peak is None else metrics | {"perf/mfu": Last(rate / peak)}
