"""Seconds of an engine's decoding steps, as a function of its running sequences and its KV cache's tokens."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class DecodeCost:
    """Cost model of one decoding step, in seconds.

    The GPU's work is latency and the longer of memory reads and computation. The host's work is for the step, for each
    sequence and for launches. vLLM does it for the next step while the GPU computes, so the longer one counts. An
    engine that waits does the work for the step and the sequences between two steps; launches overlap all the same.
    """

    overhead: float
    """Host: scheduling, and launching a CUDA graph."""
    weights: float
    """Reading the weights once, without the experts."""
    per_token: float
    """Reading the KV cache of one token."""
    per_sequence: float
    """Computing one sequence's next token."""
    per_state: float = 0.0
    """Reading and writing one sequence's states of Gated DeltaNets."""
    per_request: float = 0.0
    """Host: work for one sequence."""
    launches: float = 0.0
    """Host: launching the kernels of all layers one by one; 0 with CUDA graphs."""
    experts: float = 0.0
    """Reading all experts once, of which only those are read that a sequence is routed to."""
    unrouted: float = 0.0
    """Probability that a sequence is not routed to an expert."""
    latency: float = 0.0
    """Collectives of one step, whatever their size."""
    waits: bool = False
    """Whether the host does nothing for the next step while the GPU computes."""

    def seconds(self, num_steps: int, num_sequences: float, num_tokens: float) -> float:
        """Return the seconds of `num_steps` steps.

        The first step reads a KV cache of `num_tokens` tokens; every step adds one token per sequence.
        """
        host = self.overhead + self.per_request * num_sequences
        before, beside = (host, self.launches) if self.waits else (0.0, host + self.launches)
        constant = max(beside, self.latency + self.per_sequence * num_sequences)
        read = self.weights + self.experts * (1.0 - self.unrouted ** max(1.0, num_sequences))
        read += self.per_state * num_sequences
        reading, growth = self.latency + read + self.per_token * num_tokens, self.per_token * num_sequences
        num_constant = num_steps if constant > reading else 0
        if num_constant and growth > 0.0:
            num_constant = min(num_steps, math.ceil((constant - reading) / growth))
        num_reading = num_steps - num_constant
        added = growth * num_reading * (num_constant + num_steps - 1) / 2
        return before * num_steps + constant * num_constant + reading * num_reading + added

    def coarse(self, grain: int) -> DecodeCost:
        """Return the same engine's cost where one simulated token stands for `grain` tokens."""
        times = ("overhead", "weights", "per_sequence", "per_state", "per_request", "launches", "experts", "latency")
        changed = {name: getattr(self, name) * grain for name in times}
        return replace(self, **changed, per_token=self.per_token * grain**2)
