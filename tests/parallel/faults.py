"""Faults of kinds that training frameworks have shipped. A run with one of them must fail the layout matrix."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from unittest.mock import patch

import torch

from megatron_bapo.parallel.megatron import DistributedDataParallel
from megatron_bapo.trainer import policy_update, worker


@contextmanager
def labels_rolled_after_the_context_split() -> Iterator[None]:
    """Use as label the next token on this rank instead of the next token of the sequence."""
    lay_out = worker.to_micro_batch

    def rolled(*args: object) -> object:
        micro_batch = lay_out(*args)
        return replace(micro_batch, labels_T=micro_batch.tokens_T.roll(-1))

    with patch.object(worker, "to_micro_batch", rolled):
        yield


@contextmanager
def doubled_loss_scale() -> Iterator[None]:
    token_loss = policy_update.token_loss

    def doubled(*args: object, **kwargs: object) -> object:
        loss, *rest = token_loss(*args, **kwargs)
        return 2 * loss, *rest

    with patch.object(policy_update, "token_loss", doubled):
        yield


@contextmanager
def dropped_gradient_reduce() -> Iterator[None]:
    def nothing(self: torch.nn.Module, *_: object, **__: object) -> None: ...

    with patch.object(DistributedDataParallel, "finish_grad_sync", nothing):
        yield


@contextmanager
def sequence_mean_of_one_rank() -> Iterator[None]:
    """Compute the ratio of GSPO without the tokens of other context-parallel ranks."""
    sequence_log_ratios = policy_update.sequence_log_ratios

    with patch.object(policy_update, "sequence_log_ratios", lambda *args: sequence_log_ratios(*args[:-1])):
        yield


FAULTS = {
    None: nullcontext,
    "labels-rolled-after-the-context-split": labels_rolled_after_the_context_split,
    "doubled-loss-scale": doubled_loss_scale,
    "dropped-gradient-reduce": dropped_gradient_reduce,
    "sequence-mean-of-one-rank": sequence_mean_of_one_rank,
}
