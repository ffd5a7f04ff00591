"""BAPO's clip bounds for one minibatch, found in one pass over its tokens (arXiv 2510.18927, Eq. 8 and Algorithm 1).

Algorithm 1 evaluates the positive share rho = P / (P + N) at up to 52 pairs of bounds, with

    P(c_high) = sum over A > 0 of w A min(r, c_high)        N(c_low) = sum over A < 0 of w |A| max(r, c_low)

P depends only on the upper bound and N only on the lower bound. Both need only the sums of w|A|r and w|A| over the
tokens whose ratio lies between two neighbouring grid points. One pass computes these sums, one all-reduce adds them
over the ranks, and Algorithm 1 then runs on scalars exactly as printed.

The bounds depend neither on the order of the tokens nor on the split into micro-batches and ranks, because the sums are
integer sums. Each term is rounded once, by a rule that depends only on the term, to a multiple of a power of two that
follows from its float64 exponent (relative error at most 2^-38). The multiples are added in int64, separately for each
such power. No sum overflows below 2^31 chunks of up to 2^17 tokens.

The bounds do not change when all advantages are scaled by a common factor. The largest advantage, however, is known
only after a collective, so the powers are fixed: a w|A|r or w|A| below 2^-191 (3e-58) is treated as zero, and a token
whose w|A| reaches 2^160 (1e48) is dropped.

`contribution=gradient` counts a token only strictly inside its bound (A > 0: r < c_high, A < 0: r > c_low). A ratio
within 8 eps (relative; eps of the log-ratios' dtype, at most that of float32) of a grid point is treated as equal to
it, because exp(log(3.0)) may be 2.9999999999999996. `contribution=value` is continuous at the grid points.

`search_order=lower_first` with `target_measure=ratio` is the search of the authors' released code: it moves the lower
bound first, shortens the last step of each bound to end at the maximum, continues until both bounds are at their
maximum, and is satisfied if N = 0 or P / (N + 1e-8) >= t / (1 - t), where t is `positive_contribution_target`. That
code has no weights, and a NaN in a masked token stops it at the start; the latter is not reproduced.

Shapes: T tokens (t those of one chunk); V = 2 summed quantities, w|A|r and w|A|; I intervals of the ratio; S = 2 signs
of the advantage (plus, minus); W classes of eight float64 exponents.
"""

from __future__ import annotations

import functools
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass
from decimal import Decimal
from math import isclose
from typing import Final, Literal, NamedTuple

import torch
from torch import Tensor

from megatron_bapo.algorithm.importance import clamped_log_ratio
from megatron_bapo.config.algorithm import ClipBoundsSettings

__all__ = ["ClipBounds", "ClipBoundsSettings", "Outcome", "find_clip_bounds"]

Outcome = Literal["start", "interior", "end", "no_signal"]

SHARE_TOLERANCE: Final = 1e-9
"""Tolerance of the target: a share that equals it in exact arithmetic is satisfied despite float64 rounding."""
RATIO_EPSILON: Final = 1e-8
"""Added to N by the authors' released code."""

FRACTION_BITS: Final = 52
EXPONENT_BIAS: Final = 1023
CLASS_BITS: Final = 3
"""A class is 2^3 neighbouring exponents, which share a unit."""
UNIT_BITS: Final = 37
"""The unit is 2^-37 times the smallest number in the class, so a term is at most 2^45 units."""
NUM_KEYS: Final = 512
"""Number of values of the leading bits of a float64: sign and class."""
CLASSES: Final = slice(104, 152)
"""Classes that are summed, from 2^-191 to 2^193; zero, infinity and NaN lie outside."""
ADVANTAGE_LIMIT: Final = 2.0**160
"""Limit of w|A| that keeps w|A|r in range, because r <= e^20."""
DIGIT_BITS: Final = 32
"""The sums of a chunk are split at this bit before they are added over chunks and ranks."""
CHUNK_TOKENS: Final = 1 << 17
"""Chunk size that keeps the sums of a chunk below 2^62 and its temporaries in a CPU cache."""


@dataclass(frozen=True)
class ClipBounds:
    """Clip bounds of one minibatch and the result of their search; tensors are 0-d float64 on the input device."""

    low: Tensor
    high: Tensor
    positive_share: Tensor
    """P / (P + N) at the bounds; NaN if nothing contributes."""
    initial_positive_share: Tensor
    """P / (P + N) at the starting bounds."""
    positive_sum: Tensor
    """P at the bounds."""
    negative_sum: Tensor
    """N at the bounds."""
    outcome: Outcome
    """`end`: both bounds are at their last grid points; `no_signal`: no token contributes at the starting bounds."""
    moves: tuple[int, int]
    """Number of steps that the (lower, upper) bound moved; equal moves mean equal bounds."""


@dataclass(frozen=True)
class _Grid:
    """Grid of one bound, in search order."""

    points: list[float]
    """Values of the bound."""
    edges: list[float]
    """Ratios at which tokens cross the bound: the points, shifted by the snapping tolerance."""


class _Run(NamedTuple):
    """A run of evenly spaced edges."""

    first: float
    step: float
    count: int


@torch.no_grad()
def find_clip_bounds(
    log_ratio: Tensor,
    advantages: Tensor,
    settings: ClipBoundsSettings,
    *,
    mask: Tensor | None = None,
    weights: Tensor | None = None,
    reduce: Callable[[Tensor], object] | None = None,
) -> ClipBounds:
    """Return the clip bounds of one minibatch that Algorithm 1 (arXiv 2510.18927) finds by iterating over the tokens.

    `log_ratio` (current minus behaviour log-probs, nats), `advantages` and `weights` (>= 0; default 1) are [T] of any
    float dtype, and T may be 0. Tokens whose `mask` [T] is zero are ignored. `reduce` sums one int64 tensor in place
    over the ranks that share the minibatch; it is called exactly once, and the host synchronizes once. Log-ratios are
    clamped to +-20. A token is dropped if its log-ratio is NaN, its w|A| is not finite or its weight is negative. An
    undefined share (no token contributes) counts as satisfied.
    """
    for other in (advantages, mask, weights):
        assert other is None or other.shape == log_ratio.shape == (len(log_ratio),), (
            f"every argument needs one value per token; log_ratio has shape {log_ratio.shape}, another {other.shape}"
        )
    gradient = settings.contribution == "gradient"
    snap = 8 * torch.finfo(torch.promote_types(log_ratio.dtype, torch.float32)).eps if gradient else 0.0
    lower, upper = _grids(settings, snap)
    runs = [*_runs(lower.edges), *_runs(upper.edges)]

    totals = _integer_sums(log_ratio, advantages, mask, weights, runs, clipped_count=not gradient)
    if reduce is not None:
        reduce(totals)
    positive, negative = _contributions(totals.cpu(), lower, upper)
    i, j = _walk(positive, negative, settings)

    if positive[0] + negative[0] == 0:
        outcome = "no_signal"
    elif i == j == 0:
        outcome = "start"
    else:
        outcome = "end" if (i, j) == (len(positive) - 1, len(negative) - 1) else "interior"
    shares = _share(positive[i], negative[j]), _share(positive[0], negative[0])
    # A fill passes its value with the kernel; a copy from host memory would synchronize.
    values = [
        torch.full((), value, dtype=torch.float64, device=log_ratio.device)
        for value in (lower.points[j], upper.points[i], *shares, positive[i], negative[j])
    ]
    return ClipBounds(*values, outcome=outcome, moves=(j, i))


def _grids(settings: ClipBoundsSettings, snap: float) -> tuple[_Grid, _Grid]:
    """Return the grids of the lower and the upper bound, in search order."""
    s, to_maximum = settings, settings.search_order == "lower_first"
    lower = _points(s.ratio_lower_start, s.ratio_lower_max, s.ratio_lower_step, to_maximum=to_maximum)
    upper = _points(s.ratio_upper_start, s.ratio_upper_max, s.ratio_upper_step, to_maximum=to_maximum)
    return (
        _Grid(lower, [point * (1 + snap) for point in lower]),
        _Grid(upper, [point * (1 - snap) for point in upper]),
    )


def _points(start: float, maximum: float, step: float, *, to_maximum: bool) -> list[float]:
    # Decimal arithmetic, as in the settings file: adding 0.02 repeatedly to 0.6 in float64 misses 0.9.
    first, last, stride = (Decimal(str(value)) for value in (start, maximum, step))
    points = [first + k * stride for k in range(int((last - first) // stride) + 1)]
    if to_maximum and points[-1] < last:
        points.append(last)
    return [float(point) for point in points]


def _runs(edges: list[float]) -> list[_Run]:
    """Split the edges of one grid into evenly spaced runs; only the last step may be shorter."""
    num_even = len(edges)
    if num_even > 2 and not isclose(edges[-1] - edges[-2], edges[1] - edges[0], rel_tol=1e-9):
        num_even -= 1
    step = (edges[num_even - 1] - edges[0]) / (num_even - 1) if num_even > 1 else 1.0
    return [_Run(edges[0], step, num_even), *(_Run(edge, step, 1) for edge in edges[num_even:])]


def _integer_sums(
    log_ratio_T: Tensor,
    advantages_T: Tensor,
    mask_T: Tensor | None,
    weights_T: Tensor | None,
    runs: list[_Run],
    *,
    clipped_count: bool,
) -> Tensor:
    """Return an int64 vector: (low, high) digits of the sums [2, V, I, S, W], flattened.

    Without `clipped_count` the sums of w|A| stay zero, because a token beyond its bound does not contribute.
    """
    num_intervals = 1 + sum(run.count for run in runs)
    zeros = functools.partial(torch.zeros, dtype=torch.int64, device=log_ratio_T.device)
    sums_VK = zeros(2, num_intervals * NUM_KEYS)
    in_range = sums_VK.view(2, num_intervals, 2, -1)[..., CLASSES]
    digits = zeros(2, *in_range.shape)
    for first in range(0, len(log_ratio_T), CHUNK_TOKENS):
        chunk = slice(first, first + CHUNK_TOKENS)
        log_ratio_t, signed_t = clamped_log_ratio(log_ratio_T[chunk].double()), advantages_T[chunk].double()
        if weights_T is not None:
            signed_t = signed_t * weights_T[chunk]
        # Zero times NaN is NaN, and every comparison with NaN is false.
        signed_t = signed_t.add(log_ratio_t, alpha=0.0)
        excluded_t = ~(signed_t.abs() < ADVANTAGE_LIMIT)
        if weights_T is not None:
            excluded_t |= weights_T[chunk] < 0
        if mask_T is not None:
            excluded_t |= ~mask_T[chunk].bool()
        signed_t.masked_fill_(excluded_t, 0.0)
        ratio_t = log_ratio_t.nan_to_num_(0.0).exp_()
        key_t = _interval(ratio_t, runs).mul_(NUM_KEYS).long()
        _add(sums_VK[0], key_t, ratio_t.mul_(signed_t))
        if clipped_count:
            _add(sums_VK[1], key_t, signed_t)
        digits[0] += in_range & ((1 << DIGIT_BITS) - 1)
        digits[1] += in_range >> DIGIT_BITS
        sums_VK.zero_()
    return digits.flatten()


def _interval(ratio_t: Tensor, runs: list[_Run]) -> Tensor:
    """Return the number of edges below each ratio, float64."""
    counts = (ratio_t.sub(run.first).mul_(1 / run.step).ceil_().clamp_(0, run.count) for run in runs)
    return functools.reduce(Tensor.add_, counts)


def _add(sums_K: Tensor, first_key_t: Tensor, terms_t: Tensor) -> None:
    """Round float64 terms to their units and add the integers at (interval, sign, class); overwrite the terms."""
    bits_t = terms_t.view(torch.int64)
    key_t = bits_t & -(1 << (FRACTION_BITS + CLASS_BITS))
    # The last bit of a sum with 2^15 times the smallest number of the class is worth one unit.
    terms_t.add_(key_t.view(torch.float64), alpha=2.0 ** (FRACTION_BITS - UNIT_BITS))
    bits_t &= (1 << FRACTION_BITS) - 1
    key_t >>= FRACTION_BITS + CLASS_BITS
    key_t &= NUM_KEYS - 1
    key_t |= first_key_t
    sums_K.index_add_(0, key_t, bits_t)


def _contributions(digits: Tensor, lower: _Grid, upper: _Grid) -> tuple[list[float], list[float]]:
    """Return P at every grid point of the upper bound and N at every one of the lower, from the digits of the sums."""
    # Snapping may have swapped the last lower edge and the first upper edge.
    edges = sorted(lower.edges + upper.edges)
    low, high = digits.view(2, 2, len(edges) + 1, 2, -1).double()
    exponents_W = torch.arange(CLASSES.start, CLASSES.stop, dtype=torch.float64) * 2**CLASS_BITS - EXPONENT_BIAS
    sums_VIS = ((low + high * 2.0**DIGIT_BITS) * (exponents_W - UNIT_BITS).exp2()).sum(-1)
    up_to_VIS, from_VIS = sums_VIS.cumsum(1), sums_VIS.flip(1).cumsum(1).flip(1)

    upper_points, lower_points = (torch.tensor(grid.points, dtype=torch.float64) for grid in (upper, lower))
    # In this interval and those before it, a ratio lies below the point.
    i, j = (torch.tensor([bisect_left(edges, edge) for edge in grid.edges]) for grid in (upper, lower))
    positive = up_to_VIS[0, i, 0] + upper_points * from_VIS[1, i + 1, 0]
    negative = from_VIS[0, j + 1, 1] + lower_points * up_to_VIS[1, j, 1]
    return positive.tolist(), negative.tolist()


def _walk(positive: list[float], negative: list[float], settings: ClipBoundsSettings) -> tuple[int, int]:
    """Return the grid indices (upper, lower) at which the search stops."""
    i, j, last_i, last_j = 0, 0, len(positive) - 1, len(negative) - 1
    while not _satisfied(positive[i], negative[j], settings):
        if settings.search_order == "upper_first":
            # In Algorithm 1 the range of the lower bound guards the whole loop.
            if j == last_j:
                break
            i, j = (i + 1, j) if i < last_i else (i, j + 1)
        elif j < last_j:
            j += 1
        elif i < last_i:
            i += 1
        else:
            break
    return i, j


def _satisfied(positive: float, negative: float, settings: ClipBoundsSettings) -> bool:
    target = settings.positive_contribution_target
    if settings.target_measure == "ratio":
        return negative == 0 or positive * (1 - target) >= target * (negative + RATIO_EPSILON)
    return positive + negative == 0 or _share(positive, negative) >= target - SHARE_TOLERANCE


def _share(positive: float, negative: float) -> float:
    return positive / (positive + negative) if positive + negative > 0 else float("nan")
