"""Seconds of an engine's decoding steps, as a function of the sequences that it runs and the tokens that it holds."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class DecodeCost:
    """An overhead, and reading or computing, whichever takes longer. Seconds."""

    overhead: float
    """Launching, sampling, collectives."""
    weights: float
    """Reading the weights."""
    per_token: float
    """Reading one token's keys and values."""
    per_sequence: float
    """Computing one sequence's next token."""

    def seconds(self, num_steps: int, num_sequences: float, num_tokens: float) -> float:
        """Of `num_steps` steps, the first of which meets `num_tokens` keys and values; each adds one per sequence."""
        reading, computing = self.weights + self.per_token * num_tokens, self.per_sequence * num_sequences
        growth = self.per_token * num_sequences
        num_computing = num_steps if computing > reading else 0
        if num_computing and growth > 0.0:
            num_computing = min(num_steps, math.ceil((computing - reading) / growth))
        num_reading = num_steps - num_computing
        added = growth * num_reading * (num_computing + num_steps - 1) / 2
        return self.overhead * num_steps + computing * num_computing + reading * num_reading + added

    def coarse(self, grain: int) -> DecodeCost:
        """Of the same engine, where one token stands for `grain`."""
        return DecodeCost(
            overhead=self.overhead * grain,
            weights=self.weights * grain,
            per_token=self.per_token * grain**2,
            per_sequence=self.per_sequence * grain,
        )
