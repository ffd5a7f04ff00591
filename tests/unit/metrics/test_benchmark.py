import io
from typing import Any

import pytest
from rich.console import Console

from megatron_bapo.metrics.benchmark import problems_of, results
from megatron_bapo.metrics.benchmark_table import MAX_PROBLEMS, print_results
from megatron_bapo.metrics.estimators import Votes
from megatron_bapo.metrics.sinks import ResponseRow
from megatron_bapo.records import Prompt


def prompt(index: int, source: str) -> Prompt:
    messages = ({"role": "system", "content": "Be brief."}, {"role": "user", "content": f"Question {index}?"})
    return Prompt(f"validation:{index}", messages, "42", source)


def row(problem: int, sample: int, reward: float, answer: str | None, **other: Any) -> ResponseRow:
    defaults: dict[str, Any] = {
        "data_source": "", "finish_reason": "stop", "num_tokens": 10, "timed_out": False, "text": "",
    }  # fmt: skip
    return ResponseRow(problem=problem, sample=sample, reward=reward, answer=answer, **{**defaults, **other})


PROMPTS = [prompt(0, "aime_2024"), prompt(1, "aime_2025")]
ROWS = [
    row(0, 1, 0.0, "7"),
    row(1, 0, 0.0, "9", num_tokens=30),
    row(0, 0, 1.0, "42"),
    row(0, 3, 0.0, None, finish_reason="length"),
    row(0, 2, 1.0, "42.0"),
    row(1, 1, 0.5, "9"),
    row(1, 2, 0.0, "8"),
    row(1, 3, 1.0, "42", timed_out=True),
]


def test_responses_are_grouped_by_problem_in_any_order() -> None:
    first, second = problems_of(PROMPTS, ROWS, n=4)

    assert [response["sample"] for response in first.responses] == [0, 1, 2, 3]
    assert first.votes == Votes(right=2, wrong=(1,), no_answer=1)
    assert second.votes == Votes(right=1, wrong=(2, 1))
    assert (first.majority, second.majority) == (("42", 2), ("9", 2))


def test_results_cover_each_data_source_and_all_combined() -> None:
    found = results(problems_of(PROMPTS, ROWS, n=4), sizes=(1, 2, 4))

    assert list(found["sources"]) == ["all", "aime_2024", "aime_2025"]
    values = {
        source: {name: estimate["value"] for name, estimate in each["metrics"].items()}
        for source, each in found["sources"].items()
    }
    assert values["aime_2024"] == pytest.approx(
        {"mean@4": 0.5, "pass@2": 5 / 6, "pass@4": 1.0, "maj@2": (1 + 2 * 0.5 + 2 * 1) / 6, "maj@4": 1.0}
    )
    assert values["aime_2025"]["maj@4"] == 0.0
    assert values["all"] == pytest.approx(
        {name: (value + values["aime_2025"][name]) / 2 for name, value in values["aime_2024"].items()}
    )
    together = found["sources"]["all"]
    assert (together["num_problems"], together["num_responses"], together["reward_timeouts"]) == (2, 8, 1)
    assert (together["mean_tokens"], together["truncated"], together["mean_score"]) == (12.5, 0.125, 3.5 / 8)


def test_responses_beyond_n_are_ignored() -> None:
    found = results(problems_of(PROMPTS, ROWS, n=2), sizes=(1, 2))
    assert found["problems"][0]["num_right"] == 1
    assert found["sources"]["all"]["num_responses"] == 4


def test_without_extracted_answers_there_is_no_majority_metric() -> None:
    rows: list[ResponseRow] = [{**each, "answer": None} for each in ROWS]
    found = results(problems_of(PROMPTS, rows, n=4), sizes=(4,))
    assert list(found["sources"]["all"]["metrics"]) == ["mean@4", "pass@4"]


def test_the_tables_show_estimates_intervals_and_problems() -> None:
    shown = io.StringIO()
    found = results(problems_of(PROMPTS, ROWS, n=4), sizes=(4,))
    found["problems"] *= MAX_PROBLEMS
    print_results(Console(width=160, file=shown), found)
    text = shown.getvalue()

    assert "aime_2025: 1 problems, 4 responses" in text
    low, high = (found["sources"]["all"]["metrics"]["mean@4"][end] for end in ("low", "high"))
    assert f"{100 * low:.1f}% to {100 * high:.1f}%" in text
    assert "9 (2)" in text
    assert f"and {MAX_PROBLEMS} more problems" in text
