"""Importance weights and rejection that correct for the mismatch between the rollout and the proximal policy.

The decoupled objective (arXiv 2110.00641; AReaL, arXiv 2505.24298) clips current / proximal and weights each token by
proximal / rollout. The weights are verl's (`rollout_corr_helper.py`): truncated importance sampling (TIS,
fengyao.notion.site/off-policy-rl) and rejection (masked importance sampling, MIS), of tokens or of whole sequences.

Shapes: T response tokens of all trajectories, concatenated; B trajectories.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_bapo.algorithm.importance import clamped_log_ratio
from megatron_bapo.config.algorithm import CorrectionLevel, RolloutCorrectionConfig


@dataclass(frozen=True)
class RolloutCorrection:
    """Correction weights [T] of the objective, and what their statistics are computed from."""

    weights_T: Tensor
    """min(ratio, rollout_is_threshold), 1 without `rollout_is`; 0 where rejected; otherwise NaN if the ratio is NaN."""
    sums_B4: Tensor
    """Sums over the tokens of each trajectory: importance weights before rejection, tokens with a ratio above
    `rollout_is_threshold`, rejected tokens, and correction weights; float64. A weight that is NaN counts as 0."""


def rollout_correction(
    proximal_log_probs_T: Tensor, rollout_log_probs_T: Tensor, lengths_B: Tensor, settings: RolloutCorrectionConfig
) -> RolloutCorrection:
    """Compute the importance weight and the rejection of each token from log-probs [T] in nats; `lengths_B` sum to T.

    Log-ratios are clamped to +-20 after they are summed over a sequence. A tested ratio that is NaN is rejected.
    """
    log_ratio_T = proximal_log_probs_T.double() - rollout_log_probs_T.double()
    ratio_T = weights_T = torch.ones_like(log_ratio_T)
    rejected_T = torch.zeros_like(log_ratio_T, dtype=torch.bool)
    if settings.rollout_is is not None:
        ratio_T = _ratios(log_ratio_T, lengths_B, settings.rollout_is)
        weights_T = ratio_T.clamp(max=settings.rollout_is_threshold)
    if settings.rollout_rs is not None:
        tested_T = _ratios(log_ratio_T, lengths_B, settings.rollout_rs)
        rejected_T = ~((tested_T >= settings.lower_threshold) & (tested_T <= settings.rollout_rs_threshold))
    correction_T = weights_T.masked_fill(rejected_T, 0.0)
    counted_T4 = torch.stack(
        [weights_T, ratio_T > settings.rollout_is_threshold, rejected_T, correction_T], dim=1
    ).nan_to_num(0.0)
    return RolloutCorrection(correction_T, _sums(counted_T4, lengths_B))


def _ratios(log_ratio_T: Tensor, lengths_B: Tensor, level: CorrectionLevel) -> Tensor:
    """Return the ratio of each token, or of its sequence: the product or the geometric mean of its token ratios."""
    if level != "token":
        sums_B = _sums(log_ratio_T, lengths_B)
        sums_B = sums_B / lengths_B if level == "geometric" else sums_B
        log_ratio_T = sums_B.repeat_interleave(lengths_B)
    return clamped_log_ratio(log_ratio_T).exp()


def _sums(values_T: Tensor, lengths_B: Tensor) -> Tensor:
    """Return the sum of the values [T, ...] of each sequence, [B, ...]; there may be none."""
    return torch.cat([values_T[:0], *(part.sum(dim=0, keepdim=True) for part in values_T.split(lengths_B.tolist()))])
