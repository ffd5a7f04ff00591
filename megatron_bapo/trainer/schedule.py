"""Runs micro-batches through Megatron's pipeline schedule."""

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
"""(micro-batch, logits [T, V]) -> (loss to differentiate, result to return)."""


def run_micro_batches(
    model: PolicyModel, micro_batches: Sequence[MicroBatch], head: Head[Result], *, forward_only: bool
) -> list[Result]:
    """The head's results in micro-batch order on the last pipeline stage, an empty list on the others.

    Without `forward_only`, gradients are summed over micro-batches and data-parallel ranks; the loss must carry its own
    global denominator.
    """

    def on_logits(micro_batch: MicroBatch, logits_1TV: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, Result]:
        loss, result = head(micro_batch, logits_1TV.squeeze(0))
        return loss, torch.ones((), dtype=torch.int, device=loss.device), result

    def forward_step(source: Iterator[MicroBatch], ddp: Any) -> tuple[torch.Tensor, Any]:
        micro_batch = next(source)
        output = ddp(
            input_ids=micro_batch.tokens_T[None],
            position_ids=micro_batch.positions_T[None],
            attention_mask=None,
            packed_seq_params=micro_batch.packed,
        )
        return output, partial(on_logits, micro_batch)

    return get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=iter(micro_batches),
        model=[model.ddp],
        num_microbatches=len(micro_batches),
        seq_length=1,  # not read: packed micro-batches announce their own shapes
        micro_batch_size=1,
        forward_only=forward_only,
    )
