"""Which lengths a layout and a precision ask of sequences and micro-batches."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class PaddingRule:
    """Which lengths sequences and micro-batches are padded to."""

    sequence_multiple: int = 1
    """Of the padded length of each sequence."""
    total_multiple: int = 1
    """Of all tokens of a micro-batch; what the sequences lack to it is a sequence of padding alone."""
    equal_lengths: bool = False
    """Pad every sequence of a micro-batch to its longest."""

    @property
    def granularity(self) -> int:
        """Divides the number of tokens of every micro-batch."""
        return math.lcm(self.sequence_multiple, self.total_multiple)

    def padded_lengths(self, lengths: Sequence[int]) -> list[int]:
        """Of the sequences of one micro-batch."""
        padded = [round_up(length, self.sequence_multiple) for length in lengths]
        return [max(padded)] * len(padded) if self.equal_lengths and padded else padded

    def allocated(self, lengths: Sequence[int]) -> int:
        """Tokens of a micro-batch of these sequences, all padding included; without any, the least that can be run."""
        return round_up(max(1, sum(self.padded_lengths(lengths))), self.granularity)


def padding_rule(
    tensor_size: int, context_size: int, *, sequence_parallel: bool, fp8_multiple: int | None, packing: bool
) -> PaddingRule:
    """What a layout and a precision ask of the lengths.

    Context parallelism cuts every sequence into two chunks per rank (zigzag), sequence parallelism cuts what a context
    rank holds by the tensor size. FP8 kernels want each sequence in multiples of `fp8_multiple`, 16 or for mxfp8 32,
    and the total in 128 blocks of as many tokens as there are cuts (verl/models/mcore/util.py, preprocess_packed_seqs).
    Rows of equal length leave no room for padding behind them, so each of them follows the rule of the total.
    """
    sequence = 2 * context_size if context_size > 1 else 1
    total = math.lcm(sequence, tensor_size * context_size) if sequence_parallel else sequence
    if fp8_multiple is not None:
        num_cuts = tensor_size * sequence
        sequence, total = math.lcm(fp8_multiple, num_cuts), 128 * num_cuts
    return PaddingRule(sequence if packing else total, total, equal_lengths=not packing)


def round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
