"""Runs micro-batches through the pipeline schedule of Megatron-Core."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, TypeVar

import torch

from megatron_bapo.model.build import PolicyModel
from megatron_bapo.parallel.megatron import get_forward_backward_func
from megatron_bapo.trainer.micro_batches import MicroBatch

Result = TypeVar("Result")
Head = Callable[[MicroBatch, torch.Tensor], tuple[torch.Tensor, Result]]
"""(micro-batch, final hidden states [T, H]) -> (loss to differentiate, result to return).

Under sequence parallelism the hidden states cover this rank's share of the tokens."""


def run_micro_batches(
    model: PolicyModel, micro_batches: Sequence[MicroBatch], head: Head[Result], *, forward_only: bool
) -> list[Result]:
    """Return the results of the head in micro-batch order on the last pipeline stage, an empty list on the others.

    Without `forward_only`, gradients are summed over micro-batches and over data- and context-parallel ranks. The head
    must therefore return a loss that is normalized over the global minibatch.
    """
    # Megatron's wrapper would return float32 hidden states: twice the bytes, also gathered over tensor-parallel ranks.
    as_computed = {"fp32_output": False} if model.config.bf16 else {}

    def on_hidden(micro_batch: MicroBatch, hidden_1TH: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, Result]:
        loss, result = head(micro_batch, hidden_1TH.squeeze(0))
        return loss, torch.ones((), dtype=torch.int, device=loss.device), result

    def forward_step(source: Iterator[MicroBatch], ddp: Any) -> tuple[torch.Tensor, Any]:
        micro_batch = next(source)
        output = ddp(
            input_ids=micro_batch.tokens_T[None],
            position_ids=micro_batch.packed.positions_T[None],
            attention_mask=None,
            packed_seq_params=micro_batch.packed,
            **as_computed,
        )
        return output, partial(on_hidden, micro_batch)

    return get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=[iter(micro_batches) for _ in model.chunks],
        model=[chunk.ddp for chunk in model.chunks],
        num_microbatches=len(micro_batches),
        seq_length=1,  # unused: packed micro-batches communicate their own shapes
        micro_batch_size=1,
        forward_only=forward_only,
    )
