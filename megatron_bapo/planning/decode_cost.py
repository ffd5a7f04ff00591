"""Seconds of an engine's decoding steps, as a function of its running sequences and its KV cache's tokens."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class DecodeCost:
    """Cost model of one decoding step, in seconds.

    It is the overhead, the host's work for each sequence, and the longest of memory reads, computation and launches."""

    overhead: float
    """Sampling and collectives of one step, and its launch as a CUDA graph."""
    weights: float
    """Reading the weights once, without the experts."""
    per_token: float
    """Reading the KV cache of one token."""
    per_sequence: float
    """Computing one sequence's next token."""
    per_request: float = 0.0
    """Work of the host for one sequence, while the GPU waits."""
    launches: float = 0.0
    """Launching the kernels of all layers one by one, while the GPU runs earlier ones; 0 with CUDA graphs."""
    experts: float = 0.0
    """Reading all experts once, of which only those are read that a sequence is routed to."""
    unrouted: float = 0.0
    """Probability that a sequence is not routed to an expert."""

    def seconds(self, num_steps: int, num_sequences: float, num_tokens: float) -> float:
        """Return the seconds of `num_steps` steps.

        The first step reads a KV cache of `num_tokens` tokens; every step adds one token per sequence.
        """
        read = self.weights + self.experts * (1.0 - self.unrouted ** max(1.0, num_sequences))
        reading, growth = read + self.per_token * num_tokens, self.per_token * num_sequences
        constant = max(self.per_sequence * num_sequences, self.launches)
        num_constant = num_steps if constant > reading else 0
        if num_constant and growth > 0.0:
            num_constant = min(num_steps, math.ceil((constant - reading) / growth))
        num_reading = num_steps - num_constant
        added = growth * num_reading * (num_constant + num_steps - 1) / 2
        host = (self.overhead + self.per_request * num_sequences) * num_steps
        return host + constant * num_constant + reading * num_reading + added

    def coarse(self, grain: int) -> DecodeCost:
        """Return the same engine's cost where one simulated token stands for `grain` tokens."""
        return DecodeCost(
            overhead=self.overhead * grain,
            weights=self.weights * grain,
            per_token=self.per_token * grain**2,
            per_sequence=self.per_sequence * grain,
            per_request=self.per_request * grain,
            launches=self.launches * grain,
            experts=self.experts * grain,
            unrouted=self.unrouted,
        )
