"""From trajectories to packed micro-batches.

Legend: T packed tokens of a micro-batch, B its sequences. A sequence of P prompt and R response tokens enters the model
as its first P+R-1 tokens, each with its successor as label, so that no token is computed that predicts nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from megatron_bapo.data.packing import pack
from megatron_bapo.parallel.megatron import PackedSeqParams
from megatron_bapo.records import Trajectory


@dataclass(frozen=True)
class Example:
    """One trajectory as the trainer sees it."""

    trajectory: Trajectory
    advantage: float
    """The same for every response token."""
    weight: float
    """Of each response token in the loss; carries the global denominator."""

    @property
    def num_input_tokens(self) -> int:
        return len(self.trajectory.prompt_token_ids) + len(self.trajectory.response_token_ids) - 1


@dataclass(frozen=True)
class MicroBatch:
    """Packed sequences, on this rank's device."""

    tokens_T: torch.Tensor
    labels_T: torch.Tensor
    positions_T: torch.Tensor
    packed: PackedSeqParams
    response_positions_N: torch.Tensor
    """Indices into T whose label is a response token; what follows is aligned with it."""
    behaviour_log_probs_N: torch.Tensor
    advantages_N: torch.Tensor
    weights_N: torch.Tensor


def _cat(arrays: list[np.ndarray], dtype: type, device: torch.device) -> torch.Tensor:
    return torch.from_numpy(np.concatenate(arrays).astype(dtype)).to(device, non_blocking=True)


def to_micro_batch(examples: Sequence[Example], multiple_of: int, device: torch.device) -> MicroBatch:
    """Pack examples side by side; the total is padded to `multiple_of` by a sequence that carries no label."""
    sequences = [
        np.concatenate([e.trajectory.prompt_token_ids, e.trajectory.response_token_ids]).astype(np.int64)
        for e in examples
    ]
    lengths = [e.num_input_tokens for e in examples]
    if padding := -sum(lengths) % multiple_of:
        sequences.append(np.zeros(padding + 1, np.int64))
        lengths.append(padding)
    starts = np.concatenate([[0], np.cumsum(lengths)])
    cu_seqlens_B = torch.from_numpy(starts.astype(np.int32)).to(device)
    num_responses = [len(e.trajectory.response_token_ids) for e in examples]
    return MicroBatch(
        tokens_T=_cat([s[:-1] for s in sequences], np.int64, device),
        labels_T=_cat([s[1:] for s in sequences], np.int64, device),
        positions_T=_cat([np.arange(n) for n in lengths], np.int64, device),
        packed=PackedSeqParams(
            qkv_format="thd",  # pyright: ignore[reportArgumentType]
            cu_seqlens_q=cu_seqlens_B,
            cu_seqlens_kv=cu_seqlens_B,
            max_seqlen_q=max(lengths),
            max_seqlen_kv=max(lengths),
        ),
        response_positions_N=_cat(
            [np.arange(end - r, end) for end, r in zip(starts[1:], num_responses, strict=False)], np.int64, device
        ),
        behaviour_log_probs_N=_cat([e.trajectory.behaviour_log_probs for e in examples], np.float32, device),
        advantages_N=_cat(
            [np.full(r, e.advantage) for e, r in zip(examples, num_responses, strict=True)], np.float32, device
        ),
        weights_N=_cat(
            [np.full(r, e.weight) for e, r in zip(examples, num_responses, strict=True)], np.float32, device
        ),
    )


def to_micro_batches(
    examples: Sequence[Example],
    *,
    max_tokens: int,
    data_rank: int,
    data_size: int,
    multiple_of: int,
    device: torch.device,
) -> list[MicroBatch]:
    """This data-parallel rank's micro-batches of a minibatch; every rank gets the same number of them."""
    plan = pack([e.num_input_tokens for e in examples], max_tokens, data_size)[data_rank]
    return [to_micro_batch([examples[i] for i in indices], multiple_of, device) for indices in plan]
