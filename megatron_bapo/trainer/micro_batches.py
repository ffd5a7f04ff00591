"""From trajectories to packed micro-batches.

Legend: T packed tokens of a micro-batch on this rank, N those of them whose label is a sampled token; S a trajectory's
sampled tokens, which are its R response tokens but for those of an environment. A sequence of P prompt and R response
tokens enters the model as its first P+R-1 tokens, each with its successor as label, so that no token is computed that
predicts nothing; labels are set before context parallelism cuts the sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from megatron_bapo.config.padding import PaddingRule
from megatron_bapo.model.packed_attention import PackedSequences, packed_sequences
from megatron_bapo.parallel.context_parallel import zigzag
from megatron_bapo.parallel.groups import Axis
from megatron_bapo.records import Trajectory


@dataclass(frozen=True)
class Example:
    """One trajectory as the trainer sees it."""

    trajectory: Trajectory
    advantage: float | np.ndarray
    """One for every sampled token, or one each [S]."""
    weight: float
    """Of each sampled token in the loss; carries the global denominator."""
    proximal_log_probs: np.ndarray | None = None
    """[S], the trainer's under the weights at the start of the step; then the ratio's denominator."""
    reference_log_probs: np.ndarray | None = None
    """[S], the frozen reference policy's."""
    correction_weights: np.ndarray | None = None
    """[S], rollout correction of the objective; 0 rejects a token."""
    recorded: tuple[int, ...] = ()
    """Which sampled tokens the update's sample of tokens keeps."""

    @property
    def ratio_log_probs(self) -> np.ndarray:
        """[S], of the ratio's denominator."""
        return self.trajectory.behaviour_log_probs if self.proximal_log_probs is None else self.proximal_log_probs

    @property
    def num_learned(self) -> int:
        """Sampled tokens that rollout correction has not rejected."""
        if self.correction_weights is None:
            return self.trajectory.num_sampled
        return int(np.count_nonzero(self.correction_weights))

    @property
    def num_input_tokens(self) -> int:
        return len(self.trajectory.prompt_token_ids) + len(self.trajectory.response_token_ids) - 1


@dataclass(frozen=True)
class MicroBatch:
    """Packed sequences, on this rank's device."""

    tokens_T: torch.Tensor
    labels_T: torch.Tensor
    packed: PackedSequences
    response_positions_N: torch.Tensor
    """Indices into T whose label is a sampled token; what follows is aligned with it."""
    response_index_N: torch.Tensor
    """Each one's place among all sampled tokens, the examples' one after another."""
    sequence_index_N: torch.Tensor
    """Which of the examples it belongs to."""
    num_sequences: int
    behaviour_log_probs_N: torch.Tensor
    """Of the ratio's denominator: the rollout's, or the recomputed ones."""
    rollout_log_probs_N: torch.Tensor
    reference_log_probs_N: torch.Tensor
    """NaN where there is no reference policy."""
    advantages_N: torch.Tensor
    weights_N: torch.Tensor
    corrections_N: torch.Tensor
    """1 without rollout correction."""
    recorded_K: torch.Tensor
    """Indices into N of the tokens that are kept in the update's sample."""


@dataclass(frozen=True)
class _Part:
    """One sequence on one context-parallel rank."""

    tokens: np.ndarray
    labels: np.ndarray
    response_positions: np.ndarray
    """Into `tokens`."""
    response_index: np.ndarray
    """Into the trajectory's sampled tokens."""


def _part(example: Example, padded_length: int, context: Axis) -> _Part:
    trajectory = example.trajectory
    num_responses, end = len(trajectory.response_token_ids), example.num_input_tokens
    sequence = np.zeros(padded_length + 1, np.int64)
    sequence[: end + 1] = np.concatenate([trajectory.prompt_token_ids, trajectory.response_token_ids])
    held = zigzag(padded_length, context.rank, context.size)
    sampled = np.full(padded_length, -1)
    sampled[end - num_responses + trajectory.sampled_positions] = np.arange(trajectory.num_sampled)
    (positions,) = np.nonzero(sampled[held] >= 0)
    return _Part(sequence[held], sequence[held + 1], positions, sampled[held][positions])


def to_micro_batch(examples: Sequence[Example], rule: PaddingRule, context: Axis, device: torch.device) -> MicroBatch:
    """Pack this context-parallel rank's part of the examples side by side.

    What `rule` adds behind the examples is a sequence of its own, without a label; no examples at all give a
    micro-batch of padding, which takes part in the pipeline and changes nothing.
    """
    lengths = rule.padded_lengths([e.num_input_tokens for e in examples])
    parts = [_part(e, length, context) for e, length in zip(examples, lengths, strict=True)]
    behind = rule.allocated([e.num_input_tokens for e in examples]) - sum(lengths)
    if behind:
        lengths = [*lengths, behind]
    padding = np.zeros(behind // context.size, np.int64)
    starts = np.cumsum([0, *(part.tokens.size for part in parts)])
    response_starts = np.cumsum([0, *(e.trajectory.num_sampled for e in examples)])

    def cat(arrays: list[np.ndarray], dtype: type) -> torch.Tensor:
        return torch.from_numpy(np.concatenate([*arrays, np.zeros(0, dtype)]).astype(dtype)).to(device)

    def per_response(values: Callable[[Example], np.ndarray | float | None], default: float = 0.0) -> torch.Tensor:
        held = []
        for example, part in zip(examples, parts, strict=True):
            value = values(example)
            whole = np.full(example.trajectory.num_sampled, default if value is None else value, np.float32)
            held.append(whole[part.response_index])
        return cat(held, np.float32)

    recorded = [np.isin(part.response_index, e.recorded) for e, part in zip(examples, parts, strict=True)]
    return MicroBatch(
        tokens_T=cat([*(part.tokens for part in parts), padding], np.int64),
        labels_T=cat([*(part.labels for part in parts), padding], np.int64),
        packed=packed_sequences(lengths, context.rank, context.size, device),
        response_positions_N=cat(
            [start + part.response_positions for start, part in zip(starts, parts, strict=False)], np.int64
        ),
        response_index_N=cat(
            [start + part.response_index for start, part in zip(response_starts, parts, strict=False)], np.int64
        ),
        sequence_index_N=cat([np.full(part.response_index.size, i) for i, part in enumerate(parts)], np.int64),
        num_sequences=len(examples),
        behaviour_log_probs_N=per_response(lambda e: e.ratio_log_probs),
        rollout_log_probs_N=per_response(lambda e: e.trajectory.behaviour_log_probs),
        reference_log_probs_N=per_response(lambda e: e.reference_log_probs, default=np.nan),
        advantages_N=per_response(lambda e: e.advantage),
        weights_N=per_response(lambda e: e.weight),
        corrections_N=per_response(lambda e: e.correction_weights, default=1.0),
        recorded_K=cat([np.flatnonzero(np.concatenate([*recorded, np.zeros(0, bool)]))], np.int64),
    )
