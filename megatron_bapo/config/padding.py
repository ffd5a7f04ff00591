"""Padding of sequences and micro-batches, as the parallel layout and the precision require it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class PaddingRule:
    """Divisors of sequence lengths and micro-batch sizes, in tokens."""

    sequence_multiple: int = 1
    """Divisor of the padded length of each sequence."""
    total_multiple: int = 1
    """Divisor of the number of tokens in a micro-batch. The difference is filled with one sequence of padding."""
    equal_lengths: bool = False
    """Whether every sequence of a micro-batch is padded to the longest."""

    @property
    def granularity(self) -> int:
        """Divisor of the number of tokens of every micro-batch, padding included."""
        return math.lcm(self.sequence_multiple, self.total_multiple)

    def padded_lengths(self, lengths: Sequence[int]) -> list[int]:
        """Return the padded length of each sequence of one micro-batch."""
        padded = [round_up(length, self.sequence_multiple) for length in lengths]
        return [max(padded)] * len(padded) if self.equal_lengths and padded else padded

    def allocated(self, lengths: Sequence[int]) -> int:
        """Return the number of tokens of a micro-batch of these sequences, padding included.

        Without sequences it is the smallest micro-batch that can run.
        """
        return round_up(max(1, sum(self.padded_lengths(lengths))), self.granularity)


def padding_rule(
    tensor_size: int, context_size: int, *, sequence_parallel: bool, fp8_multiple: int | None, packing: bool
) -> PaddingRule:
    """Return the padding that a layout and a precision require.

    Context parallelism splits every sequence into two chunks per rank (zigzag); sequence parallelism splits the tokens
    of a context-parallel rank by the tensor size. FP8 kernels need sequence lengths in multiples of `fp8_multiple` (16,
    or 32 for mxfp8) and totals in multiples of 128 x the number of parts that a sequence is split into
    (verl/models/mcore/util.py, preprocess_packed_seqs). Without packing no padding can follow the sequences, so each of
    them is padded to the divisor of the total.
    """
    sequence = 2 * context_size if context_size > 1 else 1
    total = math.lcm(sequence, tensor_size * context_size) if sequence_parallel else sequence
    if fp8_multiple is not None:
        num_parts = tensor_size * sequence
        sequence, total = math.lcm(fp8_multiple, num_parts), 128 * num_parts
    return PaddingRule(sequence if packing else total, total, equal_lengths=not packing)


def width_with_sink(head_dim: int) -> int:
    """Return the width of heads with an attention sink in two further dims; kernels need multiples of 8."""
    return round_up(head_dim + 2, 8)


def round_up(number: int, multiple: int) -> int:
    """Return the smallest multiple of `multiple` that is not less than `number`."""
    return -(-number // multiple) * multiple
