"""Group-relative advantages.

Shapes: G groups, N trajectories per group.
"""

from __future__ import annotations

from typing import Final

from torch import Tensor

STD_EPSILON: Final = 1e-6
"""verl's `epsilon` in `compute_grpo_outcome_advantage`."""


def group_relative_advantages(rewards_GN: Tensor, *, norm_by_std: bool) -> Tensor:
    """GRPO's advantages [G, N]: reward minus its group's mean, over its group's standard deviation if `norm_by_std`.

    arXiv 2402.03300, section 4.1.2. The standard deviation is the unbiased one plus 1e-6, as in verl (`core_algos.py`).
    A group of equal rewards, and so a group of one, gets exactly 0.
    """
    # In floating point the mean of equal rewards need not equal them; the mean of zeros does.
    relative_GN = rewards_GN - rewards_GN[:, :1]
    centred_GN = relative_GN - relative_GN.mean(dim=1, keepdim=True)
    if not norm_by_std:
        return centred_GN
    variance_G1 = centred_GN.square().sum(dim=1, keepdim=True) / max(rewards_GN.shape[1] - 1, 1)
    return centred_GN / (variance_G1.sqrt() + STD_EPSILON)
