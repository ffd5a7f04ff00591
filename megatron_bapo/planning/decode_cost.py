"""Seconds of an engine's decoding steps, as a function of its running sequences and its KV cache's tokens."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class DecodeCost:
    """Cost model of one decoding step, in seconds.

    It is the overhead, the host's work for each sequence, and the longer of memory reads and computation."""

    overhead: float
    """Kernel launches, sampling and collectives of one step."""
    weights: float
    """Reading the weights once."""
    per_token: float
    """Reading the KV cache of one token."""
    per_sequence: float
    """Computing one sequence's next token."""
    per_request: float = 0.0
    """Work of the host for one sequence, while the GPU waits."""

    def seconds(self, num_steps: int, num_sequences: float, num_tokens: float) -> float:
        """Return the seconds of `num_steps` steps.

        The first step reads a KV cache of `num_tokens` tokens; every step adds one token per sequence.
        """
        reading, computing = self.weights + self.per_token * num_tokens, self.per_sequence * num_sequences
        growth = self.per_token * num_sequences
        num_computing = num_steps if computing > reading else 0
        if num_computing and growth > 0.0:
            num_computing = min(num_steps, math.ceil((computing - reading) / growth))
        num_reading = num_steps - num_computing
        added = growth * num_reading * (num_computing + num_steps - 1) / 2
        host = (self.overhead + self.per_request * num_sequences) * num_steps
        return host + computing * num_computing + reading * num_reading + added

    def coarse(self, grain: int) -> DecodeCost:
        """Return the same engine's cost where one simulated token stands for `grain` tokens."""
        return DecodeCost(
            overhead=self.overhead * grain,
            weights=self.weights * grain,
            per_token=self.per_token * grain**2,
            per_sequence=self.per_sequence * grain,
            per_request=self.per_request * grain,
        )
