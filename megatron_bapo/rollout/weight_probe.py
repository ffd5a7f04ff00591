"""Check that an engine has the trainer's weights, and that it decodes with them.

The trainer and the engine must give a sequence the same log-probs. The engine computes these by prefill, so it also
samples a few tokens after the sequence, and the log-probs of decoding must be those of prefill: faults may live in the
decode path alone (NeMo-RL issue 2100).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from megatron_bapo.errors import ProbeFailed
from megatron_bapo.rollout.messages import SequenceScore


@dataclass(frozen=True)
class WeightProbe:
    """Expected log-probs of a sequence under `policy_version`."""

    policy_version: int
    token_ids: np.ndarray
    """int32 [S]"""
    log_probs: np.ndarray
    """float32 [S - 1], the trainer's log-prob of each token but the first."""
    tolerance: float
    """Largest accepted difference, in nats."""
    num_decoded: int = 0
    """Tokens that the engine samples after the sequence."""

    def difference(self, name: str, score: SequenceScore) -> float:
        """Return the largest difference of engine `name`'s log-probs from the trainer's, or from its own, in nats.

        Raises ProbeFailed with both numbers if the engine has another version or differs by more than the tolerance.
        """
        if score.policy_version != self.policy_version:
            raise ProbeFailed(
                f"{name} serves policy version {score.policy_version}; the trainer published {self.policy_version}"
            )
        assert len(score.decoded_log_probs) == len(score.rescored_log_probs) == self.num_decoded, "one each per token"
        return max(self._prefill_difference(name, score), self._decode_difference(name, score))

    def _prefill_difference(self, name: str, score: SequenceScore) -> float:
        worst, difference = _largest_difference(score.log_probs, self.log_probs)
        if not difference <= self.tolerance:
            raise ProbeFailed(
                f"after the weight update {name} gives token {worst + 1} of the probe a log-prob of "
                f"{score.log_probs[worst]:.6f}, the trainer {self.log_probs[worst]:.6f} ({difference:.2g} nats "
                f"apart); weight_sync.probe_tolerance is {self.tolerance}. The engine does not serve the trainer's "
                "weights, or computes in another precision: set model.dtype=float32, or raise the tolerance if the "
                "difference is rounding"
            )
        return difference

    def _decode_difference(self, name: str, score: SequenceScore) -> float:
        if not self.num_decoded:
            return 0.0
        decoded, rescored = score.decoded_log_probs, score.rescored_log_probs
        worst, difference = _largest_difference(decoded, rescored)
        if not difference <= self.tolerance:
            raise ProbeFailed(
                f"after the weight update {name} samples token {worst + 1} after the probe with a log-prob of "
                f"{decoded[worst]:.6f}, and gives the same token {rescored[worst]:.6f} by prefill ({difference:.2g} "
                f"nats apart); weight_sync.probe_tolerance is {self.tolerance}. Prefill agrees with the trainer, so "
                "vLLM's decoding is at fault: try rollout.enforce_eager=true or another attention backend, or raise "
                "the tolerance if the difference is rounding"
            )
        return difference


def _largest_difference(first: np.ndarray, second: np.ndarray) -> tuple[int, float]:
    """Return the position and size of the largest difference; NaN counts as the largest."""
    difference = np.abs(first.astype(np.float64) - second)
    worst = int(difference.argmax())
    return worst, float(difference[worst])
