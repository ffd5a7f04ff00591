"""Runs micro-batches through the pipeline schedule of Megatron-Core."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import repeat
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
    model: PolicyModel,
    micro_batches: Sequence[MicroBatch],
    head: Head[Result],
    *,
    forward_only: bool,
    recorded: Sequence[torch.Tensor] | None = None,
) -> list[Result]:
    """Return the results of the head in micro-batch order on the last pipeline stage, an empty list on the others.

    Without `forward_only`, gradients are summed over micro-batches and over data- and context-parallel ranks. The head
    must therefore return a loss that is normalized over the global minibatch. With routing replay, the routes of the
    micro-batches are written to `recorded`, one tensor of `RoutingReplay.empty` each; without it, those that they have
    are replayed.
    """
    routing = model.routing
    if routing is not None:
        routing.start(trains=not forward_only)
    if model.adapters is not None:
        model.adapters.start(is_on=model.adapters_on, trains=not forward_only)
    # Megatron's wrapper would return float32 hidden states: twice the bytes, also gathered over tensor-parallel ranks.
    as_computed = {"fp32_output": False} if model.config.bf16 else {}

    def on_hidden(micro_batch: MicroBatch, hidden_1TH: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, Result]:
        loss, result = head(micro_batch, hidden_1TH.squeeze(0))
        return loss, torch.ones((), dtype=torch.int, device=loss.device), result

    def forward_step(source: Iterator[tuple[MicroBatch, Any, int]], ddp: Any) -> tuple[torch.Tensor, Any]:
        micro_batch, record, chunk = next(source)
        if routing is not None:
            own = None if micro_batch.routes_TLK is None else routing.own_part(micro_batch.routes_TLK)
            routing.enter(chunk, own if record is None else record, records=record is not None)
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
        data_iterator=[zip(micro_batches, recorded or repeat(None), repeat(i)) for i in range(len(model.chunks))],
        model=[chunk.ddp for chunk in model.chunks],
        num_microbatches=len(micro_batches),
        seq_length=1,  # unused: packed micro-batches communicate their own shapes
        micro_batch_size=1,
        forward_only=forward_only,
    )
