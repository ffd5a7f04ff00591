"""What an engine's work costs, from when it finished which request.

All requests of a synchronous batch come at once, so which of an engine's steps runs which answers follows from their
lengths alone. Early requests end while many short answers run, the last ones when few long ones are left: that tells a
step's own cost from that of its answers and from that of their keys and values.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

COSTS = (
    "taking in an answer",
    "a step of the engine",
    "an answer's part of a step",
    "reading a token's keys and values",
)
UNSURE = 0.1
"""Of the seconds of a request: a standard error over this makes predictions for other settings unsafe."""
MOST_CONDITION = 1e4


@dataclass(frozen=True)
class MeasuredDecode:
    """Seconds of decoding steps, one part after another: what was measured does not say what an engine overlaps."""

    overhead: float
    per_sequence: float
    per_token: float
    """Reading its keys and values."""

    def seconds(self, num_steps: int, num_sequences: float, num_tokens: float) -> float:
        """As `DecodeCost.seconds`."""
        num_read = num_tokens + num_sequences * (num_steps - 1) / 2
        return num_steps * (self.overhead + self.per_sequence * num_sequences + self.per_token * num_read)

    def coarse(self, grain: int) -> MeasuredDecode:
        """Of the same engine, where one token stands for `grain`."""
        return MeasuredDecode(self.overhead * grain, self.per_sequence * grain, self.per_token * grain**2)


@dataclass(frozen=True)
class EngineCosts:
    """Seconds, least squares, none below zero."""

    sequence_s: float
    """Of taking in an answer."""
    decode: MeasuredDecode
    errors: dict[str, float]
    """Standard error of what each of COSTS contributes, over the seconds of a request."""
    most_sequences: int
    """That an engine had in flight."""

    @property
    def unsure(self) -> list[str]:
        return [name for name, error in self.errors.items() if not error <= UNSURE]


@dataclass(frozen=True)
class Observations:
    """R requests, each relative to the start of its batch."""

    units_RC: np.ndarray
    """How much of each of COSTS the engine had done: answers taken in, steps, answers x steps, tokens held x steps."""
    seconds_R: np.ndarray
    batch_R: np.ndarray
    """Which batch it was part of."""


def observed(requests: Iterable[Mapping[str, Any]], max_num_seqs: int) -> Observations:
    """Of the rows of a synchronous run (`AnsweredRequest`, and the `step`)."""
    batches: dict[tuple[int, str], list[Mapping[str, Any]]] = {}
    for request in requests:
        batches.setdefault((request["step"], request["engine"]), []).append(request)
    units, seconds, batch = [], [], []
    for index, batch_requests in enumerate(batches.values()):
        ordered = sorted(batch_requests, key=lambda request: request["sent_s"])
        start_s, first_s = ordered[0]["sent_s"], min(request["answered_s"] for request in ordered)
        # What came when the engine had answered already is not part of the schedule; up to then, it is known.
        known_s = min((r["sent_s"] for r in ordered if r["sent_s"] > first_s), default=np.inf)
        at_once = [request for request in ordered if request["sent_s"] < known_s]
        sizes = [(r["num_prompt_tokens"], r["num_tokens"]) for r in at_once]
        for request, done in zip(at_once, schedule(sizes, max_num_seqs), strict=True):
            if request["answered_s"] < known_s:
                units.append(done)
                seconds.append(request["answered_s"] - start_s)
                batch.append(index)
    return Observations(np.array(units, float).reshape(-1, len(COSTS)), np.array(seconds), np.array(batch))


def schedule(requests: Sequence[tuple[int, Sequence[int]]], max_num_seqs: int) -> list[tuple[int, int, int, int]]:
    """For requests of so many prompt tokens, with answers of these lengths, which come at once: what the engine has
    done when each ends. A prompt's keys and values count for the first of its answers, as in `modelled_engine.py`.
    """
    flat = np.array([length for _, lengths in requests for length in lengths])
    prompt = np.array([num * (i == 0) for num, lengths in requests for i in range(len(lengths))])
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
    """Least squares over the requests of all runs; a cost that would be negative is zero."""
    units_RC = np.concatenate([run.units_RC for run in runs])
    seconds_R = np.concatenate([run.seconds_R for run in runs])
    # Batches of different runs are different ones.
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
        most_sequences=int(units_RC[:, 0].max()),
    )


def _errors(units_RC: np.ndarray, seconds_R: np.ndarray, costs_C: np.ndarray, batch_R: np.ndarray) -> dict[str, float]:
    """Standard errors that allow for the residuals of one batch being alike: the sandwich estimator, by cluster."""
    residual_R = seconds_R - units_RC @ costs_C
    mean_C, batches = units_RC.mean(0), np.unique(batch_R)
    scaled_RC = units_RC / np.where(mean_C > 0, mean_C, 1.0)
    products = scaled_RC.T @ scaled_RC
    if np.linalg.cond(products) > MOST_CONDITION**2:
        return dict.fromkeys(COSTS, math.inf)
    bread = np.linalg.inv(products)
    scores = np.stack([scaled_RC[batch_R == b].T @ residual_R[batch_R == b] for b in batches])
    # With the usual correction for few batches.
    covariance = bread @ (scores.T @ scores) @ bread * len(batches) / max(1, len(batches) - 1)
    return dict(zip(COSTS, (np.sqrt(np.diag(covariance)) / seconds_R.mean()).tolist(), strict=True))
