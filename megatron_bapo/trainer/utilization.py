"""What a step's training asks of the trainer's devices, and what they give: model FLOPs and their rate.

A forward and backward pass that gradients come from is counted as three forward passes, a scoring pass as one, and so
is a training pass by clip bounds that turn out wrong: only its ratios are of use. What recomputation, padding and masks
add is no work of the model's.
"""

from __future__ import annotations

from collections.abc import Sequence

from megatron_bapo.metrics.values import Last, Metric, Sum
from megatron_bapo.planning.hardware import peak_flops
from megatron_bapo.planning.timing import TRAINING_PASSES, forward_pass_flops
from megatron_bapo.trainer.micro_batches import Example
from megatron_bapo.trainer.worker import Worker

MODEL_FLOPS = "perf/model_flops"


def scoring_flops(worker: Worker, examples: Sequence[Example], num_passes: float) -> dict[str, Metric]:
    """Of so many forward passes over the examples, by the whole trainer."""
    lengths = [example.num_input_tokens for example in examples]
    return {MODEL_FLOPS: Sum(num_passes * forward_pass_flops(worker.model.architecture, lengths))}


def update_flops(worker: Worker, examples: Sequence[Example], *, scored: bool) -> dict[str, Metric]:
    """Of one update on a minibatch, scored before or not; this rank's part of what data-parallel ranks add up."""
    num_passes = TRAINING_PASSES + scored + worker.config.logging.entropy_clip_rule
    return scoring_flops(worker, examples, num_passes / worker.groups.data_context.size)


def utilization_metrics(
    model_flops: Metric, seconds: float, num_ranks: int, device_name: str | None
) -> dict[str, Metric]:
    """The rate of each trainer rank in 1e12 FLOPs a second, and its share of the device's dense bfloat16 peak.

    The latter only where the device is a GPU whose peak is known. `seconds` are those of training.
    """
    assert isinstance(model_flops, Sum), "FLOPs add up"
    rate = model_flops.value / (seconds * num_ranks)
    metrics: dict[str, Metric] = {"perf/tflops_per_gpu": Last(rate / 1e12)}
    peak = None if device_name is None else peak_flops(device_name)
    return metrics if peak is None else metrics | {"perf/mfu": Last(rate / peak)}
