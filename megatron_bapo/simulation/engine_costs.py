"""Estimate an engine's costs from the finishing times of its requests.

All requests of a synchronous batch arrive at once, so the lengths alone determine which sequences each step runs. Early
requests finish while many short sequences run, the last ones while few long sequences are left. This separates the
fixed cost of a step from the cost per sequence and the cost of reading the KV cache.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

COSTS = (
    "admitting a sequence",
    "an engine step",
    "a sequence's part of a step",
    "reading a token's KV cache",
)
MAX_ERROR = 0.1
"""Largest standard error, relative to the seconds of a request, with which predictions for other settings are safe."""
MAX_CONDITION = 1e4


@dataclass(frozen=True)
class MeasuredDecode:
    """Measured cost of decoding steps, in seconds: a sum, since the records do not show what an engine overlaps."""

    overhead: float
    per_sequence: float
    per_token: float
    """Reading the KV cache of one token."""

    def seconds(self, num_steps: int, num_sequences: float, num_tokens: float) -> float:
        """Return the seconds of `num_steps` steps; arguments as in `DecodeCost.seconds`."""
        num_read = num_tokens + num_sequences * (num_steps - 1) / 2
        return num_steps * (self.overhead + self.per_sequence * num_sequences + self.per_token * num_read)

    def coarse(self, grain: int) -> MeasuredDecode:
        """Return the same engine's cost where one simulated token stands for `grain` tokens."""
        return MeasuredDecode(self.overhead * grain, self.per_sequence * grain, self.per_token * grain**2)


@dataclass(frozen=True)
class EngineCosts:
    """Non-negative least-squares estimates, in seconds."""

    sequence_s: float
    """Seconds to admit a sequence."""
    decode: MeasuredDecode
    errors: dict[str, float]
    """Standard error of the contribution of each of COSTS, relative to the seconds of a request."""
    max_sequences: int
    """Largest number of sequences that an engine had in flight."""

    @property
    def uncertain(self) -> list[str]:
        """Costs whose standard error exceeds MAX_ERROR."""
        return [name for name, error in self.errors.items() if not error <= MAX_ERROR]


@dataclass(frozen=True)
class Observations:
    """R requests, each relative to the start of its batch."""

    units_RC: np.ndarray
    """Units of each of COSTS done: admitted sequences, steps, sequences x steps, tokens in the KV cache x steps."""
    seconds_R: np.ndarray
    batch_R: np.ndarray
    """Index of the request's batch."""


def observed(requests: Iterable[Mapping[str, Any]], max_num_seqs: int, *, shares_prompts: bool = True) -> Observations:
    """Return the observations from the rows of a synchronous run (`CompletedRequest` with its `step`)."""
    batches: dict[tuple[int, str], list[Mapping[str, Any]]] = {}
    for request in requests:
        batches.setdefault((request["step"], request["engine"]), []).append(request)
    units, seconds, batch = [], [], []
    for index, batch_requests in enumerate(batches.values()):
        ordered = sorted(batch_requests, key=lambda request: request["sent_s"])
        start_s, first_s = ordered[0]["sent_s"], min(request["answered_s"] for request in ordered)
        # The schedule is known until a request arrives after the engine's first result; later results are left out.
        known_s = min((r["sent_s"] for r in ordered if r["sent_s"] > first_s), default=np.inf)
        at_once = [request for request in ordered if request["sent_s"] < known_s]
        sizes = [(r["num_prompt_tokens"], r["num_tokens"]) for r in at_once]
        for request, done in zip(at_once, schedule(sizes, max_num_seqs, shares_prompts=shares_prompts), strict=True):
            if request["answered_s"] < known_s:
                units.append(done)
                seconds.append(request["answered_s"] - start_s)
                batch.append(index)
    return Observations(np.array(units, float).reshape(-1, len(COSTS)), np.array(seconds), np.array(batch))


def schedule(
    requests: Sequence[tuple[int, Sequence[int]]], max_num_seqs: int, *, shares_prompts: bool = True
) -> list[tuple[int, int, int, int]]:
    """Return the units of each of COSTS that the engine has done when each request ends.

    Each request is (prompt tokens, response lengths), and all arrive at once. A KV cache of the prompt that its
    responses share counts for the first of them, as in `modelled_engine.py`.
    """
    flat = np.array([length for _, lengths in requests for length in lengths])
    prompt = np.array([num * (i == 0 or not shares_prompts) for num, lengths in requests for i in range(len(lengths))])
    starts, running = np.zeros_like(flat), [0] * max_num_seqs
    for index, length in enumerate(flat):
        starts[index] = heapq.heappop(running)
        heapq.heappush(running, int(starts[index] + length))
    done, first = [], 0
    for _, lengths in requests:
        last = first + len(lengths)
        end = int((starts[first:last] + flat[first:last]).max())
        ran = np.clip(end - starts, 0, flat)
        num_read = prompt * ran + ran * (ran - 1) // 2
        done.append((int((starts < end).sum()), end, int(ran.sum()), int(num_read.sum())))
        first = last
    return done


def fitted(runs: Sequence[Observations]) -> EngineCosts:
    """Fit the costs by least squares over the requests of all runs; a cost that would be negative is set to zero."""
    units_RC = np.concatenate([run.units_RC for run in runs])
    seconds_R = np.concatenate([run.seconds_R for run in runs])
    # Make batch ids unique across runs.
    batch_R = np.concatenate([[f"{index}/{batch}" for batch in run.batch_R] for index, run in enumerate(runs)])
    used = list(range(len(COSTS)))
    while True:
        solution, *_ = np.linalg.lstsq(units_RC[:, used], seconds_R, rcond=None)
        if (solution >= 0).all():
            break
        used.pop(int(solution.argmin()))
    costs = np.zeros(len(COSTS))
    costs[used] = solution
    return EngineCosts(
        sequence_s=float(costs[0]),
        decode=MeasuredDecode(*costs[1:].tolist()),
        errors=_errors(units_RC, seconds_R, costs, batch_R),
        max_sequences=int(units_RC[:, 0].max()),
    )


def _errors(units_RC: np.ndarray, seconds_R: np.ndarray, costs_C: np.ndarray, batch_R: np.ndarray) -> dict[str, float]:
    """Return standard errors from the sandwich estimator clustered by batch, whose residuals are correlated."""
    residual_R = seconds_R - units_RC @ costs_C
    mean_C, batches = units_RC.mean(0), np.unique(batch_R)
    scaled_RC = units_RC / np.where(mean_C > 0, mean_C, 1.0)
    products = scaled_RC.T @ scaled_RC
    if np.linalg.cond(products) > MAX_CONDITION**2:
        return dict.fromkeys(COSTS, math.inf)
    bread = np.linalg.inv(products)
    scores = np.stack([scaled_RC[batch_R == b].T @ residual_R[batch_R == b] for b in batches])
    # The factor is the usual correction for few clusters.
    covariance = bread @ (scores.T @ scores) @ bread * len(batches) / max(1, len(batches) - 1)
    return dict(zip(COSTS, (np.sqrt(np.diag(covariance)) / seconds_R.mean()).tolist(), strict=True))
