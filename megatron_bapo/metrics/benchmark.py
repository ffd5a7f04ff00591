"""An evaluation's answers added up: what is written to results.json."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from megatron_bapo.metrics.estimators import (
    Votes,
    error_of_repeating,
    majority_at_k,
    over_problems,
    pass_at_k,
)
from megatron_bapo.metrics.sinks import AnswerRow
from megatron_bapo.records import SOLVED, Prompt

CONFIDENCE = 0.95
INTERVAL = (
    "95% for new problems of the same kind: Wilson's interval at the effective sample size, from the standard error "
    "clustered by problem"
)
ALL = "all"
"""The name of all data sources together."""


@dataclass(frozen=True)
class Problem:
    """All answers to one problem."""

    prompt: Prompt
    answers: Sequence[AnswerRow]

    @property
    def num(self) -> int:
        return len(self.answers)

    @property
    def num_right(self) -> int:
        return sum(row["reward"] >= SOLVED for row in self.answers)

    @property
    def mean_tokens(self) -> float:
        return sum(row["num_tokens"] for row in self.answers) / self.num

    @property
    def votes(self) -> Votes:
        wrong = Counter(row["answer"] for row in self.answers if row["reward"] < SOLVED)
        silent = wrong.pop(None, 0)
        return Votes(self.num_right, tuple(sorted(wrong.values(), reverse=True)), silent)

    @property
    def majority(self) -> tuple[str | None, int]:
        """The answer given most often, right ones first, and how often; right answers are one, however written."""
        said = Counter(row["answer"] for row in self.answers if row["reward"] < SOLVED and row["answer"] is not None)
        right = [row["answer"] for row in self.answers if row["reward"] >= SOLVED]
        top, num = max(said.items(), key=lambda item: (item[1], item[0]), default=(None, 0))
        return (right[0], len(right)) if right and len(right) >= num else (top, num)


def problems_of(prompts: Sequence[Prompt], rows: Sequence[AnswerRow], n: int) -> list[Problem]:
    """Every problem with its first `n` answers."""
    answers: Mapping[int, dict[int, AnswerRow]] = defaultdict(dict)
    for row in rows:
        if row["sample"] < n:
            answers[row["problem"]][row["sample"]] = row
    return [Problem(prompt, [answers[i][sample] for sample in range(n)]) for i, prompt in enumerate(prompts)]


def results(problems: Sequence[Problem], sizes: Sequence[int]) -> dict[str, Any]:
    """Estimates for each data source and all together, and a row for each problem. `sizes` are the k."""
    # A reward function of the user's need not say what it read.
    votes = any(row["answer"] is not None for problem in problems for row in problem.answers)
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
    answers = [row for problem in problems for row in problem.answers]

    def estimate(per_problem: list[float], k: int = 1) -> dict[str, Any]:
        draws = len(answers) // k
        return asdict(over_problems(per_problem, num_answers=max(draws, len(problems)), confidence=CONFIDENCE))

    several = [k for k in sizes if k > 1]  # pass@1 and maj@1 are mean@n
    metrics = {f"mean@{n}": estimate([problem.num_right / n for problem in problems])}
    for k in several:
        metrics[f"pass@{k}"] = estimate([pass_at_k(n, problem.num_right, k) for problem in problems], k)
    for k in several if votes else ():
        metrics[f"maj@{k}"] = estimate([majority_at_k(problem.votes, k) for problem in problems], k)
    return {
        "num_problems": len(problems),
        "num_answers": len(answers),
        "metrics": metrics,
        "error_of_repeating": error_of_repeating([problem.num_right for problem in problems], n),
        "mean_score": sum(row["reward"] for row in answers) / len(answers),
        "mean_tokens": sum(row["num_tokens"] for row in answers) / len(answers),
        "truncated": sum(row["finish_reason"] == "length" for row in answers) / len(answers),
        "reward_timeouts": sum(row["timed_out"] for row in answers),
    }


def _row(index: int, problem: Problem) -> dict[str, Any]:
    majority, num = problem.majority
    return {
        "problem": index,
        "data_source": problem.prompt.data_source,
        "question": "\n".join(message["content"] for message in problem.prompt.messages if message["role"] == "user"),
        "ground_truth": problem.prompt.ground_truth,
        "num_right": problem.num_right,
        "num_answers": problem.num,
        "majority": majority,
        "num_majority": num,
        "mean_tokens": problem.mean_tokens,
    }
