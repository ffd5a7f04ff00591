"""Check that an engine has the trainer's weights, and that it decodes with them.

The trainer and the engine must give a sequence the same log-probs. The engine computes these by prefill, so it also
samples a few tokens after the sequence, and the log-probs of decoding must be those of prefill: faults may live in the
decode path alone (NeMo-RL issue 2100).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from megatron_bapo.errors import ProbeFailed
from megatron_bapo.rollout.messages import SequenceScore


class ProbeDifference(NamedTuple):
    """Differences between two log-probs of each token of a sequence, in nats."""

    rms: float
    """Root mean square over the tokens."""
    largest: float


@dataclass(frozen=True)
class WeightProbe:
    """Expected log-probs of a sequence under `policy_version`."""

    policy_version: int
    token_ids: np.ndarray
    """int32 [S]"""
    log_probs: np.ndarray
    """float32 [S - 1], the trainer's log-prob of each token but the first."""
    tolerance: float
    """Largest accepted root mean square of the differences of a sequence, in nats.

    Rounding makes single tokens differ by several times as much, above all improbable ones."""
    num_decoded: int = 0
    """Tokens that the engine samples after the sequence."""

    def difference(self, name: str, score: SequenceScore) -> ProbeDifference:
        """Return how far engine `name`'s log-probs are from the trainer's, or its own, whichever is farther.

        Raises ProbeFailed with the numbers if the engine has another version or differs by more than the tolerance.
        """
        if score.policy_version != self.policy_version:
            raise ProbeFailed(
                f"{name} serves policy version {score.policy_version}; the trainer published {self.policy_version}"
            )
        assert len(score.decoded_log_probs) == len(score.rescored_log_probs) == self.num_decoded, "one each per token"
        prefill, decode = self._prefill_difference(name, score), self._decode_difference(name, score)
        return ProbeDifference(max(prefill.rms, decode.rms), max(prefill.largest, decode.largest))

    def _prefill_difference(self, name: str, score: SequenceScore) -> ProbeDifference:
        difference, worst = _differences(score.log_probs, self.log_probs)
        if not difference.rms <= self.tolerance:
            raise ProbeFailed(
                f"after the weight update {name} gives token {worst + 1} of the probe a log-prob of "
                f"{score.log_probs[worst]:.6f}, the trainer {self.log_probs[worst]:.6f}; {self._apart(difference)}. "
                "The engine does not serve the trainer's weights, or computes in another precision: set "
                "model.dtype=float32, or raise the tolerance if the difference is rounding"
            )
        return difference

    def _decode_difference(self, name: str, score: SequenceScore) -> ProbeDifference:
        if not self.num_decoded:
            return ProbeDifference(0.0, 0.0)
        decoded, rescored = score.decoded_log_probs, score.rescored_log_probs
        difference, worst = _differences(decoded, rescored)
        if not difference.rms <= self.tolerance:
            raise ProbeFailed(
                f"after the weight update {name} samples token {worst + 1} after the probe with a log-prob of "
                f"{decoded[worst]:.6f}, and gives the same token {rescored[worst]:.6f} by prefill; "
                f"{self._apart(difference)}. Prefill agrees with the trainer, so vLLM's decoding is at fault: try "
                "rollout.enforce_eager=true or another attention backend, or raise the tolerance if the difference is "
                "rounding"
            )
        return difference

    def _apart(self, difference: ProbeDifference) -> str:
        return (
            f"all tokens are {difference.rms:.2g} nats apart (root mean square); weight_sync.probe_tolerance is "
            f"{self.tolerance}"
        )


def _differences(first: np.ndarray, second: np.ndarray) -> tuple[ProbeDifference, int]:
    """Return the differences and the position of the largest one; NaN counts as the largest."""
    differences = np.abs(first.astype(np.float64) - second)
    worst = int(differences.argmax())
    return ProbeDifference(float(np.sqrt(np.mean(differences**2))), float(differences[worst])), worst
