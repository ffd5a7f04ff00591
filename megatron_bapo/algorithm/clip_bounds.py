"""BAPO's clip bounds for one minibatch, found in one pass over its tokens (arXiv 2510.18927, Eq. 8 and Algorithm 1).

Algorithm 1 evaluates the positive share rho = P / (P + N) at up to 52 pairs of bounds, with

    P(c_high) = sum over A > 0 of w A min(r, c_high)        N(c_low) = sum over A < 0 of w |A| max(r, c_low)

P depends on the upper bound alone and N on the lower bound alone, and both need only the sums of w|A|r and w|A| over
the tokens whose ratio lies between two neighbouring grid points. One pass collects these, one all-reduce adds them over
the ranks, and Algorithm 1 then runs literally, on scalars.

The sums are exact, so the bounds depend on neither the tokens' order nor the split into micro-batches and ranks. Every
term is a float64; its significand is cut into two 30-bit digits at one of a few fixed positions (a sparse Kulisch
accumulator), and digits are added in int64: integer addition is associative, and no sum overflows below 2^33 tokens.

The bounds are invariant to a common scale of the advantages, but the largest advantage is known only after a
collective, so the positions are fixed: w|A|r or w|A| below 2^-191 (3e-58) counts as nothing, and a token whose w|A|r
reaches 2^160 (1e48) is dropped.

`contribution=gradient` counts a token only strictly inside its bound (A > 0: r < c_high, A < 0: r > c_low). A ratio
within 8 eps (relative; eps of the log-ratios' dtype, at most float32's) of a grid point is taken to lie on it, because
exp(log(3.0)) may be 2.9999999999999996.

`search_order=lower_first` with `target_measure=ratio` is the search of the authors' released code: it moves the lower
bound first, shortens each last step to end at the maximum, goes on until both bounds are there, and is satisfied if
N = 0 or P / (N + 1e-8) >= t / (1 - t), where t is `positive_contribution_target`. That code knows no weights, and a NaN
in a masked token stops it at the start; the latter is not reproduced.

Shapes: T tokens (t those of one chunk); V summed quantities (w|A|r, and w|A| for `contribution=value`); E edges of the
ratio intervals; W digit positions.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from decimal import Decimal
from typing import Final, Literal

import torch
from torch import Tensor

from megatron_bapo.algorithm.importance import clamped_log_ratio
from megatron_bapo.config.schema import ClipBoundsSettings

__all__ = ["ClipBounds", "ClipBoundsSettings", "Outcome", "find_clip_bounds"]

Outcome = Literal["start", "interior", "end", "no_signal"]

SHARE_TOLERANCE: Final = 1e-9
"""A share that ties with the target in the reals counts as satisfied, whatever float64 makes of the ratios."""
RATIO_EPSILON: Final = 1e-8

FRACTION_BITS: Final = 52
DIGIT_BITS: Final = 30
POSITION_BITS: Final = 3
"""2^3 binary exponents share a position, so that 53 significand bits shifted by up to 7 fill two digits."""
IGNORED_POSITION: Final = 103
"""Takes every float64 below 2^-191, zero included; the positions above it reach up to 2^193."""
NUM_POSITIONS: Final = 49
TERM_LIMIT: Final = 2.0**160
"""Keeps w|A| = w|A|r / r below 2^189, since r >= e^-20."""
UNIT: Final = 2.0 ** ((IGNORED_POSITION << POSITION_BITS) - 1023 - FRACTION_BITS)
"""Value of the lowest bit at position IGNORED_POSITION; 1023 is float64's exponent bias."""
CHUNK_TOKENS: Final = 1 << 17
"""Bounds the memory of the temporaries and keeps most of them in a CPU core's cache."""


@dataclass(frozen=True)
class ClipBounds:
    """The bounds of one minibatch and what led to them; tensors are 0-d float64 on the log-ratios' device."""

    low: Tensor
    high: Tensor
    positive_share: Tensor
    """P / (P + N) at the bounds; NaN if nothing contributes."""
    initial_positive_share: Tensor
    """The same at the starting bounds."""
    positive_sum: Tensor
    """P at the bounds."""
    negative_sum: Tensor
    """N at the bounds."""
    outcome: Outcome
    """`end`: both bounds are at their last grid points; `no_signal`: no token contributes at the starting bounds."""
    num_dropped: int
    """Tokens of all ranks without a usable contribution, left out."""


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
    """Clip bounds of one minibatch: those that Algorithm 1 (arXiv 2510.18927) finds by iterating over the tokens.

    `log_ratio` (current minus behaviour log-probs, nats), `advantages` and `weights` (>= 0; default 1) are [T] of any
    float dtype, T may be 0; a token whose `mask` [T] is zero does not exist. `reduce` adds one int64 tensor in place
    over the ranks that share the minibatch; it is called exactly once, and the host synchronises once. Log-ratios are
    clamped to +-20. A token is dropped and counted if its log-ratio is NaN or its w|A|r is not finite. An undefined
    share (no token contributes) is satisfied.
    """
    lower, upper = _grids(settings)
    num_quantities, snap = 2, 0.0
    if settings.contribution == "gradient":
        num_quantities, snap = 1, 8 * min(torch.finfo(log_ratio.dtype).eps, torch.finfo(torch.float32).eps)
    # With the ratio carrying the advantage's sign, one sorted list of edges serves both signs.
    edges = [-point * (1 + snap) for point in reversed(lower)] + [0.0] + [point * (1 - snap) for point in upper]
    edges_E = torch.tensor(edges, dtype=torch.float64, device=log_ratio.device)

    totals = _digit_sums(log_ratio, advantages, mask, weights, edges_E, num_quantities)
    if reduce is not None:
        reduce(totals)
    totals = totals.cpu()
    positive, negative = _contributions(totals[:-1], num_quantities, lower, upper)
    i, j = _walk(positive, negative, settings)

    if positive[0] + negative[0] == 0:
        outcome = "no_signal"
    elif i == j == 0:
        outcome = "start"
    else:
        outcome = "end" if (i, j) == (len(upper) - 1, len(lower) - 1) else "interior"
    shares = _share(positive[i], negative[j]), _share(positive[0], negative[0])
    values = torch.tensor(
        [lower[j], upper[i], *shares, positive[i], negative[j]], dtype=torch.float64, device=log_ratio.device
    )
    return ClipBounds(*values.unbind(), outcome=outcome, num_dropped=int(totals[-1]))


def _grids(settings: ClipBoundsSettings) -> tuple[list[float], list[float]]:
    """Grid points of the lower and of the upper bound, in the order in which the search visits them."""
    s, to_maximum = settings, settings.search_order == "lower_first"
    return (
        _grid(s.ratio_lower_start, s.ratio_lower_max, s.ratio_lower_step, to_maximum=to_maximum),
        _grid(s.ratio_upper_start, s.ratio_upper_max, s.ratio_upper_step, to_maximum=to_maximum),
    )


def _grid(start: float, maximum: float, step: float, *, to_maximum: bool) -> list[float]:
    # In decimal, as the settings are written: repeated addition of 0.02 to 0.6 in float64 misses 0.9.
    first, last, stride = (Decimal(str(value)) for value in (start, maximum, step))
    points = [first + k * stride for k in range(int((last - first) // stride) + 1)]
    if to_maximum and points[-1] < last:
        points.append(last)
    return [float(point) for point in points]


def _digit_sums(
    log_ratio_T: Tensor,
    advantages_T: Tensor,
    mask_T: Tensor | None,
    weights_T: Tensor | None,
    edges_E: Tensor,
    num_quantities: int,
) -> Tensor:
    """int64 vector: sums of (low, high) digits as [2, V, (E + 1) * W], flattened, then the number of dropped tokens."""
    num_cells = (len(edges_E) + 1) * NUM_POSITIONS
    totals = torch.zeros(2 * num_quantities * num_cells + 1, dtype=torch.int64, device=log_ratio_T.device)
    digits = totals[:-1].view(2, num_quantities, num_cells)
    for first in range(0, len(log_ratio_T), CHUNK_TOKENS):
        chunk = slice(first, first + CHUNK_TOKENS)
        log_ratio_t, signed_t = log_ratio_T[chunk], advantages_T[chunk].double()
        if weights_T is not None:
            signed_t = signed_t * weights_T[chunk]
        if mask_T is not None:
            absent_t = ~mask_T[chunk].bool()
            log_ratio_t, signed_t = log_ratio_t.masked_fill(absent_t, 0.0), signed_t.masked_fill(absent_t, 0.0)
        ratio_t = clamped_log_ratio(log_ratio_t.double()).exp_()
        interval_t = torch.bucketize(torch.copysign(ratio_t, signed_t), edges_E)
        terms_Vt = signed_t.abs().repeat(num_quantities, 1)
        terms_Vt[0] *= ratio_t
        # NaN compares false.
        dropped_t = ~(terms_Vt[0] < TERM_LIMIT)
        _add_digits(digits, interval_t, terms_Vt.masked_fill_(dropped_t, 0.0))
        totals[-1] += torch.count_nonzero(dropped_t)
    return totals


def _add_digits(digits: Tensor, interval_t: Tensor, terms_Vt: Tensor) -> None:
    """Cut float64 terms >= 0 into two integer digits and add them at (interval, position); overwrites both inputs."""
    bits_Vt = terms_Vt.view(torch.int64)
    exponent_Vt = bits_Vt >> FRACTION_BITS
    cell_Vt = (exponent_Vt >> POSITION_BITS).clamp_(min=IGNORED_POSITION)
    cell_Vt += interval_t.mul_(NUM_POSITIONS).sub_(IGNORED_POSITION)
    # The significand with its implicit leading one, shifted to the position's lowest exponent.
    bits_Vt.bitwise_and_((1 << FRACTION_BITS) - 1).bitwise_or_(1 << FRACTION_BITS)
    bits_Vt <<= exponent_Vt.bitwise_and_((1 << POSITION_BITS) - 1)
    digits[0].scatter_add_(1, cell_Vt, bits_Vt & ((1 << DIGIT_BITS) - 1))
    bits_Vt >>= DIGIT_BITS
    digits[1].scatter_add_(1, cell_Vt, bits_Vt)


def _contributions(
    digit_sums: Tensor, num_quantities: int, lower: list[float], upper: list[float]
) -> tuple[list[float], list[float]]:
    """P at every grid point of the upper bound and N at every one of the lower, each rounded once from exact sums."""
    low, high = digit_sums.view(2, num_quantities, -1, NUM_POSITIONS).tolist()
    exact = [[_exact_sum(*cells) for cells in zip(low[v], high[v], strict=True)] for v in range(num_quantities)]
    with_ratio, without = exact[0], exact[1] if num_quantities == 2 else [0] * len(exact[0])
    # Intervals: first A < 0, from r above the last lower point downwards; then A > 0, from r below the first upwards.
    n = len(lower)
    positive = [
        UNIT * (sum(with_ratio[n + 1 : n + 2 + i]) + point * sum(without[n + 2 + i :])) for i, point in enumerate(upper)
    ]
    negative = [
        UNIT * (sum(with_ratio[: n - j]) + point * sum(without[n - j : n + 1])) for j, point in enumerate(lower)
    ]
    return positive, negative


def _exact_sum(low_W: list[int], high_W: list[int]) -> int:
    """The sum of one interval's terms in units of UNIT."""
    return sum(
        (low_W[w] + (high_W[w] << DIGIT_BITS)) << (w << POSITION_BITS)
        for w in range(1, NUM_POSITIONS)
        if low_W[w] or high_W[w]
    )


def _walk(positive: list[float], negative: list[float], settings: ClipBoundsSettings) -> tuple[int, int]:
    """Grid indices (upper, lower) at which the search stops."""
    i, j, last_i, last_j = 0, 0, len(positive) - 1, len(negative) - 1
    while not _satisfied(positive[i], negative[j], settings):
        if settings.search_order == "upper_first":
            # Algorithm 1 guards the whole loop with the lower bound's range.
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
