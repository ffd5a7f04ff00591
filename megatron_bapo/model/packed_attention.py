"""Packed sequences in plain torch: token positions, rotary angles and causal attention.

Under context parallelism, the queries of a rank are its zigzag part of every sequence, and it gathers the keys and
values of all parts. Sequences may share tokens: those have the same queries, keys and values in all of them, so only
attention repeats them, and all other layers compute them once. Legend: T tokens of this rank, U tokens of this rank's
sequences, with shared ones repeated, S tokens of all context-parallel ranks, B sequences of a batch, Q longest part of
a sequence on this rank, L longest sequence, H heads of this rank, G key/value heads of this rank, D head size, E width
of a head's value.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, cast

import numpy as np
import torch
import torch.nn.functional as F

from megatron_bapo.config.padding import round_up, width_with_sink
from megatron_bapo.parallel.context_parallel import zigzag
from megatron_bapo.parallel.megatron import (
    MegatronModule,
    PackedSeqParams,
    TransformerConfig,
    gather_from_sequence_parallel_region,
    is_layer_window_attention,
    thd_sequences,
)

MIN_LENGTH_RATIO = 0.75
"""Minimum length of a sequence relative to the first one of its attention batch; shorter ones start a new batch."""


@dataclass(frozen=True)
class AttentionBatch:
    """Consecutive sequences of similar length, which attention processes as one padded batch.

    A slot is the index of a token in the flattened padded batch.
    """

    tokens: slice
    """Tokens of the batch in U, which is T where no tokens are shared."""
    num_sequences: int
    longest_part: int
    longest: int
    query_slots: torch.Tensor | None
    """Slots in [B, Q] of the tokens on this rank; None if they fill the batch in order."""
    key_slots: torch.Tensor | None
    """Slots in [B, L] of the tokens on all ranks, rank by rank; None if they fill the batch in order."""
    last_visible_BQ: torch.Tensor | None
    """Last position that a query may attend to, which is its own; None if an ordinary causal mask applies."""

    def visible_B1QL(self, device: torch.device, window: int | None, *, sinks: bool) -> torch.Tensor | None:
        """Return the attention mask; recomputed per layer, because it is the largest tensor for long sequences.

        A query sees its own key and those before it, or only the `window` last ones of them. With `sinks` another key,
        which all queries see, follows the last one. None: an ordinary causal mask applies.
        """
        last_BQ = self.last_visible_BQ
        if last_BQ is None:
            if not sinks and (window is None or window >= self.longest):
                return None
            last_BQ = torch.arange(self.longest, device=device)[None]
        key_L, last_B1Q1 = torch.arange(self.longest, device=device), last_BQ[:, None, :, None]
        visible_B1QL = key_L <= last_B1Q1
        if window is not None:
            visible_B1QL &= key_L > last_B1Q1 - window
        return F.pad(visible_B1QL, (0, 1), value=True) if sinks else visible_B1QL


@dataclass(frozen=True)
class SharedTokens:
    """Which tokens of the sequences are the same."""

    token_U: torch.Tensor
    """Index in T of each token of the sequences."""
    first_T: torch.Tensor
    """Index in U of the first of those that are token T."""

    @staticmethod
    def of(token_U: np.ndarray, device: torch.device) -> SharedTokens | None:
        """Return the mapping of `token_U`, which has every index in T; None if it has each of them once."""
        _, first_T = np.unique(token_U, return_index=True)
        if len(first_T) == len(token_U):
            return None
        return SharedTokens(*(_tensor([indices], device) for indices in (token_U, first_T)))


@dataclass(kw_only=True)
class PackedSequences(PackedSeqParams):
    """Sequence layout of a micro-batch for attention, computed once for all layers."""

    lengths: tuple[int, ...]
    """Lengths over all context-parallel ranks, including padding."""
    rank: int
    """Context-parallel rank."""
    size: int
    """Context-parallel size."""
    device: torch.device
    shared: SharedTokens | None = None
    """Only with a context-parallel size of 1; None if no sequences share tokens."""

    @cached_property
    def positions_T(self) -> torch.Tensor:
        """Position of each token in its sequence."""
        positions_U = _tensor([zigzag(length, self.rank, self.size) for length in self.lengths], self.device)
        return positions_U if self.shared is None else positions_U[self.shared.first_T]

    @cached_property
    def batches(self) -> tuple[AttentionBatch, ...]:
        """Attention batches for `PackedAttention`."""
        start, batches = 0, []
        for lengths in _runs(self.lengths):
            stop = start + sum(lengths) // self.size
            batches.append(_attention_batch(lengths, slice(start, stop), self.rank, self.size, self.device))
            start = stop
        return tuple(batches)

    @cached_property
    def thd(self) -> PackedSeqParams:
        """Sequence boundaries for Transformer Engine's attention."""
        assert self.shared is None, "Transformer Engine's attention cannot repeat shared tokens"
        starts = torch.tensor([0, *np.cumsum(self.lengths)], dtype=torch.int32, device=self.device)
        return thd_sequences(starts, longest_bound(max(self.lengths), self.size))


def longest_bound(longest: int, size: int) -> int:
    """Return an upper bound of the longest of the packed sequences, for kernels over `size` context-parallel ranks.

    Transformer Engine chooses its attention kernel anew whenever the bound changes. There are four bounds per power of
    two, each at most a quarter larger than `longest`, or a multiple of 128 for short sequences.
    """
    step = max(128, 1 << max(0, longest.bit_length() - 3))
    return round_up(round_up(longest, step), 2 * size)


def packed_sequences(
    lengths: Sequence[int], rank: int, size: int, device: torch.device, shared: SharedTokens | None = None
) -> PackedSequences:
    """Return the layout of packed sequences of `lengths` tokens on one of `size` context-parallel ranks.

    Sequences in descending order of length give the fewest attention batches.
    """
    return PackedSequences(
        # With a packed format Megatron would loop over the sequences to compute their rotary angles.
        qkv_format="sbhd",  # pyright: ignore[reportArgumentType]
        lengths=tuple(lengths),
        rank=rank,
        size=size,
        device=device,
        shared=shared,
    )


def _runs(lengths: Sequence[int]) -> Iterator[list[int]]:
    """Split lengths into runs of consecutive similar lengths."""
    run = [lengths[0]]
    for length in lengths[1:]:
        if not MIN_LENGTH_RATIO * run[0] <= length <= run[0]:
            yield run
            run = []
        run.append(length)
    yield run


def _attention_batch(
    lengths: Sequence[int], tokens: slice, rank: int, size: int, device: torch.device
) -> AttentionBatch:
    longest, num_sequences = lengths[0], len(lengths)
    full, longest_part = all(length == longest for length in lengths), longest // size
    parts = [[zigzag(length, other, size) for length in lengths] for other in range(size)]
    key_slots = [index * longest + part for of_rank in parts for index, part in enumerate(of_rank)]
    query_slots = [index * longest_part + np.arange(part.size) for index, part in enumerate(parts[rank])]
    last_visible = None
    if size > 1:
        last_visible_BQ = np.zeros((num_sequences, longest_part), np.int64)
        for index, part in enumerate(parts[rank]):
            last_visible_BQ[index, : part.size] = part
        last_visible = torch.from_numpy(last_visible_BQ).to(device)
    return AttentionBatch(
        tokens=tokens,
        num_sequences=num_sequences,
        longest_part=longest_part,
        longest=longest,
        query_slots=None if full else _tensor(query_slots, device),
        key_slots=None if full and size == 1 else _tensor(key_slots, device),
        last_visible_BQ=last_visible,
    )


def _tensor(arrays: list[np.ndarray], device: torch.device) -> torch.Tensor:
    return torch.from_numpy(np.concatenate(arrays).astype(np.int64)).to(device)


class PackedRotaryEmbedding(torch.nn.Module):
    """Rotary angles by position; replaces Megatron's `RotaryEmbedding`.

    Megatron's embedding loops over the sequences in every layer, which one row of angles per token avoids. The
    frequencies stay in float32 on the device on which they are passed.
    """

    def __init__(self, inverse_frequencies: torch.Tensor) -> None:
        super().__init__()
        # Not a buffer: a bfloat16 model converts its buffers, but the angles of long sequences need float32.
        self.inverse_frequencies = inverse_frequencies

    def get_rotary_seq_len(
        self, inference_context: None, decoder: Any, decoder_input: Any, config: Any, packed: PackedSequences
    ) -> torch.Tensor:
        """Return what Megatron passes to `forward`: the positions instead of a length."""
        return packed.positions_T

    def forward(self, positions_T: torch.Tensor, **_: Any) -> torch.Tensor:
        """Return the angles in radians, float32 [T, 1, 1, D]."""
        angles = positions_T[:, None].float() * self.inverse_frequencies
        return torch.cat([angles, angles], dim=-1)[:, None, None, :]


class LatentRotaryEmbedding(PackedRotaryEmbedding):
    """Rotary angles by position for Megatron's multi-head latent attention, which also reads YaRN's factor."""

    def __init__(self, inverse_frequencies: torch.Tensor, factor: float) -> None:
        super().__init__(inverse_frequencies)
        self.factor = factor

    def forward(self, positions_T: torch.Tensor, **_: Any) -> tuple[torch.Tensor, float]:
        """Return the angles in radians, float32 [T, 1, D], and the factor of their cosines and sines."""
        return super().forward(positions_T)[:, 0], self.factor


def widened(x: torch.Tensor, width: int) -> torch.Tensor:
    """Return `x` with zeros behind its last dim up to `width`; `x` itself if it has that width, which F.pad copies."""
    missing = width - x.size(-1)
    return F.pad(x, (0, missing)) if missing else x


class PackedAttention(MegatronModule):
    """Causal attention within each packed sequence (`core_attention` of Megatron's attention classes).

    Queries, keys and values are [T, 1, heads, width], or without the second dim from latent attention. Sequences of
    similar length form a padded batch, so one kernel processes them all. The padding follows the tokens, so no real
    token attends to it.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        *_: Any,
        softmax_scale: float | None = None,
        pg_collection: Any,
        **__: Any,
    ) -> None:
        super().__init__(config=config)
        self.softmax_scale = softmax_scale or 1.0 / math.sqrt(config.kv_channels or 1)
        self.context_group = pg_collection.cp
        size, every = config.window_size, cast(Any, config.window_attn_skip_freq)
        has_window = is_layer_window_attention(size, every, layer_number)
        self.window = size[0] + 1 if size is not None and has_window else None
        self.softmax_offset = None
        if config.softmax_type == "learnable":
            num_heads = config.num_attention_heads // pg_collection.tp.size()
            self.softmax_offset = torch.nn.Parameter(torch.zeros(num_heads, dtype=config.params_dtype))

    def forward(
        self,
        query_T1HD: torch.Tensor,
        key_T1GD: torch.Tensor,
        value_T1GE: torch.Tensor,
        attention_mask: None,
        *,
        attn_mask_type: Any = None,
        attention_bias: None = None,
        packed_seq_params: PackedSequences,
    ) -> torch.Tensor:
        """Return the attention output, [T, 1, H*E]."""
        query_THD, key_TGD, value_TGE = (x.flatten(0, -3) for x in (query_T1HD, key_T1GD, value_T1GE))
        size, shared = self.config.context_parallel_size, packed_seq_params.shared
        if shared is not None:
            query_THD, key_TGD, value_TGE = (x.index_select(0, shared.token_U) for x in (query_THD, key_TGD, value_TGE))
        if size > 1:
            key_value_S = gather_from_sequence_parallel_region(
                torch.cat([key_TGD, value_TGE], dim=-1), group=self.context_group
            )
            key_TGD, value_TGE = key_value_S.split([key_TGD.size(-1), value_TGE.size(-1)], dim=-1)
        # [rank, token, head, ...]: the tokens of a batch are the same slice of every rank's part.
        key_RTGD, value_RTGE = (x.unflatten(0, (size, -1)) for x in (key_TGD, value_TGE))
        outputs = [
            self._attend(
                batch,
                query_THD[batch.tokens],
                key_RTGD[:, batch.tokens].flatten(0, 1),
                value_RTGE[:, batch.tokens].flatten(0, 1),
            )
            for batch in packed_seq_params.batches
        ]
        out_UA = torch.cat(outputs)
        return (out_UA if shared is None else out_UA.index_select(0, shared.first_T))[:, None]

    def _attend(
        self, batch: AttentionBatch, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        num_heads = query.size(1)

        def padded(x: torch.Tensor, slots: torch.Tensor | None, longest: int) -> torch.Tensor:
            _, num, size = x.shape
            if slots is not None:
                x = x.new_zeros(batch.num_sequences * longest, num, size).index_copy(0, slots, x)
            x_BNLD = x.view(batch.num_sequences, longest, num, size).transpose(1, 2)
            return x_BNLD if num == num_heads else x_BNLD.repeat_interleave(num_heads // num, dim=1)

        query_BHQD = padded(query, batch.query_slots, batch.longest_part)
        key_BHLD = padded(key, batch.key_slots, batch.longest)
        value_BHLE = padded(value, batch.key_slots, batch.longest)
        if self.softmax_offset is not None:
            query_BHQD, key_BHLD = self._with_sinks(query_BHQD, key_BHLD)
            value_BHLE = F.pad(value_BHLE, (0, 0, 0, 1))
        mask = batch.visible_B1QL(query.device, self.window, sinks=self.softmax_offset is not None)
        out_BHQD = F.scaled_dot_product_attention(
            query_BHQD,
            key_BHLD,
            # Kernels that do not store all scores need equal widths.
            widened(value_BHLE, key_BHLD.size(-1)),
            attn_mask=mask,
            is_causal=mask is None,
            scale=self.softmax_scale,
        )
        out = out_BHQD[..., : value.size(-1)].transpose(1, 2).flatten(0, 1).flatten(1)
        return out if batch.query_slots is None else out.index_select(0, batch.query_slots)

    def _with_sinks(self, query_BHQD: torch.Tensor, key_BHLD: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return queries, and keys with another one behind them, whose scores are the heads' sinks.

        The new key is 1 in two further dims in which all others are 0, and queries have the sink there, as two numbers
        that add up to it with twice the precision of the dtype. Kernels then need no gradient of a mask.
        """
        assert self.softmax_offset is not None
        wide = width_with_sink(query_BHQD.size(-1))
        score_H = self.softmax_offset.float() / self.softmax_scale
        high_H = score_H.to(query_BHQD.dtype)
        low_H = (score_H - high_H.float()).to(query_BHQD.dtype)
        sink_HD = F.pad(torch.stack([high_H, low_H], dim=-1), (0, wide - query_BHQD.size(-1) - 2))
        batch, _, length, _ = query_BHQD.shape
        query = torch.cat([query_BHQD, sink_HD[None, :, None].expand(batch, -1, length, -1)], dim=-1)
        key = F.pad(key_BHLD, (0, wide - key_BHLD.size(-1), 0, 1))
        key[..., -1, key_BHLD.size(-1) : key_BHLD.size(-1) + 2] = 1
        return query, key
