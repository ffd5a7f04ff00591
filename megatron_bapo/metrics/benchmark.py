"""Aggregate the responses of an evaluation into the contents of results.json."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from megatron_bapo.metrics.estimators import (
    Votes,
    error_of_repeating,
    majority_at_k,
    mean_over_problems,
    pass_at_k,
)
from megatron_bapo.metrics.sinks import ResponseRow
from megatron_bapo.records import SOLVED, Prompt

CONFIDENCE = 0.95
INTERVAL = (
    "95% for new problems of the same kind: Wilson's interval at the effective sample size, from the standard error "
    "clustered by problem"
)
ALL = "all"
"""Name of all data sources combined."""


@dataclass(frozen=True)
class Problem:
    """All responses to one problem. A response's answer is the text that the reward function extracted from it."""

    prompt: Prompt
    responses: Sequence[ResponseRow]

    @property
    def num(self) -> int:
        return len(self.responses)

    @property
    def num_right(self) -> int:
        return sum(row["reward"] >= SOLVED for row in self.responses)

    @property
    def mean_tokens(self) -> float:
        return sum(row["num_tokens"] for row in self.responses) / self.num

    @property
    def votes(self) -> Votes:
        wrong = Counter(row["answer"] for row in self.responses if row["reward"] < SOLVED)
        no_answer = wrong.pop(None, 0)
        return Votes(self.num_right, tuple(sorted(wrong.values(), reverse=True)), no_answer)

    @property
    def majority(self) -> tuple[str | None, int]:
        """Most frequent answer and its count. All right answers count as one; a tie goes to the right answer."""
        wrong = Counter(row["answer"] for row in self.responses if row["reward"] < SOLVED and row["answer"] is not None)
        right = [row["answer"] for row in self.responses if row["reward"] >= SOLVED]
        top, num = max(wrong.items(), key=lambda item: (item[1], item[0]), default=(None, 0))
        return (right[0], len(right)) if right and len(right) >= num else (top, num)


def problems_of(prompts: Sequence[Prompt], rows: Sequence[ResponseRow], n: int) -> list[Problem]:
    """Return each problem with its first `n` responses."""
    responses: Mapping[int, dict[int, ResponseRow]] = defaultdict(dict)
    for row in rows:
        if row["sample"] < n:
            responses[row["problem"]][row["sample"]] = row
    return [Problem(prompt, [responses[i][sample] for sample in range(n)]) for i, prompt in enumerate(prompts)]


def results(problems: Sequence[Problem], sizes: Sequence[int]) -> dict[str, Any]:
    """Return the contents of results.json: estimates for each data source and for all, and a row for each problem.

    `sizes` are the values of k in pass@k and maj@k.
    """
    # A user's reward function need not return the extracted answer.
    votes = any(row["answer"] is not None for problem in problems for row in problem.responses)
    by_source: dict[str, list[Problem]] = {ALL: list(problems)}
    for problem in problems:
        by_source.setdefault(problem.prompt.data_source, []).append(problem)
    if len(by_source) == 2:
        del by_source[ALL]
    return {
        "interval": INTERVAL,
        "sources": {name: _source(members, sizes, votes=votes) for name, members in by_source.items()},
        "problems": [_row(index, problem) for index, problem in enumerate(problems)],
    }


def _source(problems: Sequence[Problem], sizes: Sequence[int], *, votes: bool) -> dict[str, Any]:
    n = problems[0].num
    responses = [row for problem in problems for row in problem.responses]

    def estimate(per_problem: list[float], k: int = 1) -> dict[str, Any]:
        num_samples = max(len(responses) // k, len(problems))
        return asdict(mean_over_problems(per_problem, num_samples=num_samples, confidence=CONFIDENCE))

    several = [k for k in sizes if k > 1]  # pass@1 and maj@1 are mean@n
    metrics = {f"mean@{n}": estimate([problem.num_right / n for problem in problems])}
    for k in several:
        metrics[f"pass@{k}"] = estimate([pass_at_k(n, problem.num_right, k) for problem in problems], k)
    for k in several if votes else ():
        metrics[f"maj@{k}"] = estimate([majority_at_k(problem.votes, k) for problem in problems], k)
    return {
        "num_problems": len(problems),
        "num_responses": len(responses),
        "metrics": metrics,
        "error_of_repeating": error_of_repeating([problem.num_right for problem in problems], n),
        "mean_score": sum(row["reward"] for row in responses) / len(responses),
        "mean_tokens": sum(row["num_tokens"] for row in responses) / len(responses),
        "truncated": sum(row["finish_reason"] == "length" for row in responses) / len(responses),
        "reward_timeouts": sum(row["timed_out"] for row in responses),
    }


def _row(index: int, problem: Problem) -> dict[str, Any]:
    majority, num = problem.majority
    return {
        "problem": index,
        "data_source": problem.prompt.data_source,
        "question": "\n".join(message["content"] for message in problem.prompt.messages if message["role"] == "user"),
        "ground_truth": problem.prompt.ground_truth,
        "num_right": problem.num_right,
        "num_responses": problem.num,
        "majority": majority,
        "num_majority": num,
        "mean_tokens": problem.mean_tokens,
    }
