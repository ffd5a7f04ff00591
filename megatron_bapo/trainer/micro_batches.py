"""Packing of trajectories into micro-batches.

Legend: T packed tokens of a micro-batch on this rank; U those of its sequences, with shared ones repeated; N tokens of
T whose label is a sampled token; S sampled tokens of a trajectory: its R response tokens without those of an
environment; L layers with experts of this pipeline stage; K experts of a token.

A sequence of P prompt and R response tokens enters the model as its first P+R-1 tokens, each with the next token as its
label, so every computed token predicts something. Labels are assigned before context parallelism splits the sequence.
The first P-1 of these tokens are the same in all sequences of a group, and predict none of their sampled tokens, so a
micro-batch may share them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from megatron_bapo.config.padding import PaddingRule
from megatron_bapo.kept_tokens import chosen_sets
from megatron_bapo.model.packed_attention import PackedSequences, SharedTokens, packed_sequences
from megatron_bapo.model.vocab_shard import KeptTokens
from megatron_bapo.parallel.context_parallel import zigzag
from megatron_bapo.parallel.groups import Axis
from megatron_bapo.records import NO_ROUTE, Trajectory


@dataclass(frozen=True)
class Example:
    """One trajectory with the training inputs that belong to it."""

    trajectory: Trajectory
    advantage: float | np.ndarray
    """Advantage of all sampled tokens, or of each one [S]; then NaN where this rank does not have the tokens."""
    weight: float
    """Loss weight of each sampled token, including the normalization over the global minibatch."""
    proximal_log_probs: np.ndarray | None = None
    """Log-probs [S] under the trainer's weights at the start of the step; if given, the denominator of the ratio."""
    reference_log_probs: np.ndarray | None = None
    """Log-probs [S] under the reference model."""
    teacher_log_probs: np.ndarray | None = None
    """Log-probs [S] under the teacher."""
    correction_weights: np.ndarray | None = None
    """Rollout correction [S] of the objective; 0 rejects a token."""
    num_accepted: int | None = None
    """Number of sampled tokens that it accepts, also of a trajectory whose weights this rank does not have."""
    correction_sum: float | None = None
    """Sum of its weights, likewise."""
    token_advantage_sums: tuple[float, float] | None = None
    """Its `advantage_sums` if tokens have advantages of their own, likewise."""
    recorded: tuple[int, ...] = ()
    """Indices of the sampled tokens that the token reservoir keeps."""
    traced_at: int | None = None
    """Place of its first sampled token in the token trace; None: the trace does not have it."""
    routes: np.ndarray | None = None
    """Experts of each of its P+R-1 input tokens in this pipeline stage, [P+R-1, L, K], to replay."""
    group: int | None = None
    """Number of its group, whose members have the same prompt; None: it is in none."""

    @property
    def ratio_log_probs(self) -> np.ndarray:
        """Log-probs [S] in the denominator of the ratio."""
        return self.trajectory.behaviour_log_probs if self.proximal_log_probs is None else self.proximal_log_probs

    @property
    def advantage_sums(self) -> tuple[float, float]:
        """Sums of c A over the sampled tokens with A > 0, and of c |A| over the others; c is the rollout correction."""
        if self.token_advantage_sums is not None:
            return self.token_advantage_sums
        assert not isinstance(self.advantage, np.ndarray), "advantages of tokens come with their sums"
        total = self.advantage * self.num_corrected_tokens
        return max(total, 0.0), max(-total, 0.0)

    @property
    def advantage_sign(self) -> float:
        """A number with the sign of the advantage, or of its sum over the tokens, which count by their correction."""
        if not isinstance(self.advantage, np.ndarray):
            return self.advantage
        positive, negative = self.advantage_sums
        return positive - negative

    @property
    def num_trained_tokens(self) -> int:
        """Number of sampled tokens that rollout correction does not reject."""
        if self.num_accepted is not None:
            return self.num_accepted
        if self.correction_weights is None:
            return self.trajectory.num_sampled
        return int(np.count_nonzero(self.correction_weights))

    @property
    def num_corrected_tokens(self) -> float:
        """Number of sampled tokens, each counted by its rollout correction; NaN counts as 0."""
        if self.correction_sum is not None:
            return self.correction_sum
        if self.correction_weights is None:
            return self.trajectory.num_sampled
        return float(np.nansum(self.correction_weights))

    @property
    def num_input_tokens(self) -> int:
        return len(self.trajectory.prompt_token_ids) + len(self.trajectory.response_token_ids) - 1

    @property
    def num_shared_tokens(self) -> int:
        """Number of its first input tokens that predict no sampled token, and are the same in its whole group."""
        return len(self.trajectory.prompt_token_ids) - 1


@dataclass(frozen=True)
class MicroBatch:
    """Packed sequences on this rank's device. Values with suffix N are aligned with `response_positions_N`."""

    tokens_T: torch.Tensor
    labels_T: torch.Tensor
    packed: PackedSequences
    response_positions_N: torch.Tensor
    """Indices into T of the tokens whose label is a sampled token."""
    response_index_N: torch.Tensor
    """Index of the label among the sampled tokens of all examples, concatenated."""
    sequence_index_N: torch.Tensor
    """Index of the example."""
    num_sequences: int
    behaviour_log_probs_N: torch.Tensor
    """Log-probs in the denominator of the ratio: those of the rollout, or recomputed ones."""
    rollout_log_probs_N: torch.Tensor
    reference_log_probs_N: torch.Tensor
    """Log-probs under the reference model; NaN without one."""
    teacher_log_probs_N: torch.Tensor
    """Log-probs under the teacher; NaN without one."""
    advantages_N: torch.Tensor
    weights_N: torch.Tensor
    corrections_N: torch.Tensor
    """Rollout correction; 1 if it is off."""
    recorded_K: torch.Tensor
    """Indices into N of the tokens that the token reservoir keeps."""
    traced_K: torch.Tensor
    """Indices into N of the tokens that the token trace has."""
    traced_at_K: torch.Tensor
    """Place of each of them in the trace."""
    kept: KeptTokens | None
    """Tokens that each of the N was sampled from, in host memory; None: all."""
    routes_TLK: torch.Tensor | None
    """Experts of each token to replay, int8 or int16 in host memory, `NO_ROUTE` where there are none; None: the routers
    choose."""


@dataclass(frozen=True)
class _Part:
    """The part of one sequence on one context-parallel rank."""

    tokens: np.ndarray
    labels: np.ndarray
    response_positions: np.ndarray
    """Indices into `tokens`."""
    response_index: np.ndarray
    """Indices into the sampled tokens of the trajectory."""


def _part(example: Example, padded_length: int, context: Axis) -> _Part:
    trajectory = example.trajectory
    num_responses, end = len(trajectory.response_token_ids), example.num_input_tokens
    sequence = np.zeros(padded_length + 1, np.int64)
    sequence[: end + 1] = np.concatenate([trajectory.prompt_token_ids, trajectory.response_token_ids])
    local = zigzag(padded_length, context.rank, context.size)
    sampled = np.full(padded_length, -1)
    sampled[end - num_responses + trajectory.sampled_positions] = np.arange(trajectory.num_sampled)
    (positions,) = np.nonzero(sampled[local] >= 0)
    return _Part(sequence[local], sequence[local + 1], positions, sampled[local][positions])


def _token_indices(examples: Sequence[Example]) -> np.ndarray:
    """Return the index in T of each token of the examples, int64 [U]; those of a group share their first tokens."""
    indices, firsts, num_tokens = [np.zeros(0, np.int64)], dict[int, tuple[int, np.ndarray]](), 0
    for example in examples:
        prompt, num_shared = example.trajectory.prompt_token_ids, 0
        if example.group is not None:
            start, first_prompt = firsts.setdefault(example.group, (num_tokens, prompt))
            assert np.array_equal(prompt, first_prompt), f"the examples of group {example.group} have different prompts"
            if start < num_tokens:
                num_shared = example.num_shared_tokens
                indices.append(np.arange(start, start + num_shared))
        num_own = example.num_input_tokens - num_shared
        indices.append(np.arange(num_tokens, num_tokens + num_own))
        num_tokens += num_own
    return np.concatenate(indices)


def _with_padding(token_U: np.ndarray, rule: PaddingRule, context: Axis) -> tuple[np.ndarray, int]:
    """Return the indices with those of the padding that follows on this rank, and its number of tokens."""
    num_tokens = int(token_U.max(initial=-1)) + 1
    num_allocated = rule.allocated([num_tokens * context.size]) // context.size
    return np.concatenate([token_U, np.arange(num_tokens, num_allocated)]), num_allocated - num_tokens


def to_micro_batch(
    examples: Sequence[Example], rule: PaddingRule, context: Axis, device: torch.device, share_prompts: bool = False
) -> MicroBatch:
    """Pack this context-parallel rank's part of the examples into a micro-batch.

    With `share_prompts`, which needs one context-parallel rank and sequences without padding, the examples of a group
    share their prompt. Padding that `rule` adds after the examples is a separate sequence without labels. Without
    examples the micro-batch is all padding: it passes through the pipeline and contributes nothing.
    """
    lengths = rule.padded_lengths([e.num_input_tokens for e in examples])
    parts = [_part(e, length, context) for e, length in zip(examples, lengths, strict=True)]
    starts = np.cumsum([0, *(part.tokens.size for part in parts)])
    token_U = _token_indices(examples) if share_prompts else np.arange(starts[-1])
    token_U, num_padding = _with_padding(token_U, rule, context)
    if num_padding:
        lengths = [*lengths, num_padding * context.size]
    padding = np.zeros(num_padding, np.int64)
    shared = SharedTokens.of(token_U, device) if share_prompts else None
    once = slice(None) if shared is None else shared.first_T
    response_starts = np.cumsum([0, *(e.trajectory.num_sampled for e in examples)])

    def cat(arrays: list[np.ndarray], dtype: type) -> torch.Tensor:
        return torch.from_numpy(np.concatenate([*arrays, np.zeros(0, dtype)]).astype(dtype)).to(device)

    def per_response(values: Callable[[Example], np.ndarray | float | None], default: float = 0.0) -> torch.Tensor:
        local = []
        for example, part in zip(examples, parts, strict=True):
            value = values(example)
            whole = np.full(example.trajectory.num_sampled, default if value is None else value, np.float32)
            local.append(whole[part.response_index])
        return cat(local, np.float32)

    traced_at_N = _traced_at(examples, parts)
    recorded = [np.isin(part.response_index, e.recorded) for e, part in zip(examples, parts, strict=True)]
    return MicroBatch(
        tokens_T=cat([*(part.tokens for part in parts), padding], np.int64)[once],
        labels_T=cat([*(part.labels for part in parts), padding], np.int64)[once],
        packed=packed_sequences(lengths, context.rank, context.size, device, shared),
        response_positions_N=cat(
            [token_U[start + part.response_positions] for start, part in zip(starts, parts, strict=False)], np.int64
        ),
        response_index_N=cat(
            [start + part.response_index for start, part in zip(response_starts, parts, strict=False)], np.int64
        ),
        sequence_index_N=cat([np.full(part.response_index.size, i) for i, part in enumerate(parts)], np.int64),
        num_sequences=len(examples),
        behaviour_log_probs_N=per_response(lambda e: e.ratio_log_probs),
        rollout_log_probs_N=per_response(lambda e: e.trajectory.behaviour_log_probs),
        reference_log_probs_N=per_response(lambda e: e.reference_log_probs, default=np.nan),
        teacher_log_probs_N=per_response(lambda e: e.teacher_log_probs, default=np.nan),
        advantages_N=per_response(lambda e: e.advantage),
        weights_N=per_response(lambda e: e.weight),
        corrections_N=per_response(lambda e: e.correction_weights, default=1.0),
        recorded_K=cat([np.flatnonzero(np.concatenate([*recorded, np.zeros(0, bool)]))], np.int64),
        traced_K=cat([np.flatnonzero(traced_at_N >= 0)], np.int64),
        traced_at_K=cat([traced_at_N[traced_at_N >= 0]], np.int64),
        kept=_kept(examples, parts),
        routes_TLK=_routes(examples, rule, context),
    )


def _traced_at(examples: Sequence[Example], parts: Sequence[_Part]) -> np.ndarray:
    """Return the place of each response token in the token trace, [N]; -1 outside."""
    places = [
        np.full(part.response_index.size, -1) if e.traced_at is None else e.traced_at + part.response_index
        for e, part in zip(examples, parts, strict=True)
    ]
    return np.concatenate([np.zeros(0, np.int64), *places])


def _kept(examples: Sequence[Example], parts: Sequence[_Part]) -> KeptTokens | None:
    """Return the kept tokens of the response tokens of this rank, N of them."""
    given = [e.trajectory.kept_tokens for e in examples]
    found = [
        chosen_sets(kept, part.response_index) for kept, part in zip(given, parts, strict=True) if kept is not None
    ]
    assert len(found) in (0, len(given)), "all examples of a micro-batch have kept tokens, or none has"
    return KeptTokens(*(np.concatenate(each) for each in zip(*found, strict=True))) if found else None


def input_positions(examples: Sequence[Example], rule: PaddingRule, context: Axis) -> list[np.ndarray]:
    """Return for each example the positions of this rank's tokens in its padded input, in the micro-batch's order."""
    lengths = rule.padded_lengths([e.num_input_tokens for e in examples])
    return [zigzag(length, context.rank, context.size) for length in lengths]


def _routes(examples: Sequence[Example], rule: PaddingRule, context: Axis) -> torch.Tensor | None:
    """Return the routes of this rank's tokens, [T, L, K]; padding and examples without routes have `NO_ROUTE`."""
    given = [e.routes for e in examples if e.routes is not None]
    if not given:
        return None
    num_tokens = rule.allocated([e.num_input_tokens for e in examples]) // context.size
    routes = np.full((num_tokens, *given[0].shape[1:]), NO_ROUTE, given[0].dtype)
    start = 0
    for example, positions in zip(examples, input_positions(examples, rule, context), strict=True):
        if example.routes is not None:
            (local,) = np.nonzero(positions < len(example.routes))
            routes[start + local] = example.routes[positions[local]]
        start += len(positions)
    return torch.from_numpy(routes)
