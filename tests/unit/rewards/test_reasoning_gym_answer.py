from typing import Any

import pytest

from megatron_bapo.data.reasoning_gym_tasks import generate_entries
from megatron_bapo.rewards.reasoning_gym_answer import compute_score


def entry_of(task: str) -> dict[str, Any]:
    ((_, entry),) = generate_entries({task: {}}, size=1, seed=0)
    return entry


def score(task: str, answer: str, entry: dict[str, Any]) -> float:
    return compute_score(f"reasoning_gym/{task}", answer, str(entry["answer"]), entry)["score"]


SUM = {"question": "40 + 2 =", "answer": "42", "metadata": {}}


@pytest.mark.parametrize(
    ("answer", "reward"),
    [
        ("42", 1.0),
        (" 42\n", 1.0),
        ("42.", 1.0),
        ("<answer>42</answer>", 1.0),
        ("40 and 2, so <answer> 42 </answer>.", 1.0),
        ("<answer>7</answer> no, <answer>42</answer>", 1.0),
        ("42 <answer>7</answer>", 0.0),
        ("41", 0.0),
        ("", 0.0),
        ("The answer is 42", 2 / 16),
        ("142", 2 / 3),
    ],
)
def test_chain_sum_scores(answer, reward):
    assert score("chain_sum", answer, SUM) == pytest.approx(reward)


@pytest.mark.parametrize("task", ["countdown", "simple_integration", "knights_knaves", "n_queens", "number_sorting"])
def test_a_tasks_own_answer_scores_one(task):
    entry = entry_of(task)
    assert score(task, f"<answer>{entry['answer']}</answer>", entry) == 1.0


def test_a_python_list_still_gets_the_tasks_score():
    entry = {"question": "?", "answer": "ABC", "metadata": {}}
    assert score("string_insertion", "['A', 'B', 'C']", entry) == 0.1


@pytest.mark.parametrize(
    "task",
    [
        "binary_matrix",
        "bitwise_arithmetic",
        "countdown",
        "intermediate_integration",
        "n_queens",
        "puzzle24",
        "simple_integration",
        "spiral_matrix",
        "string_insertion",
    ],
)
@pytest.mark.parametrize("form", ["plain", "without_quotes", "wide_letters"])
def test_an_answer_is_never_executed_as_code(task, form, tmp_path):
    created = tmp_path / "created"
    spelled = "+".join(f"chr({ord(letter)})" for letter in str(created))
    code = {
        "plain": f"open({str(created)!r}, 'w')",
        "without_quotes": f"open({spelled},chr(119))",
        "wide_letters": f"ｏｐｅｎ({spelled},chr(119))",
    }[form]
    assert score(task, code, entry_of(task)) < 0.1
    assert not created.exists()


@pytest.mark.parametrize(
    ("task", "field"), [("intermediate_integration", "integrand"), ("bitwise_arithmetic", "problem")]
)
def test_a_prompt_is_never_executed_as_code(task, field, tmp_path):
    created = tmp_path / "created"
    metadata = {"variable": "x", field: f"open({str(created)!r}, 'w')"}
    assert score(task, "1", {"question": "?", "answer": "1", "metadata": metadata}) == 0.0
    assert not created.exists()


def test_a_ground_truth_that_is_evaluated_is_never_executed_as_code(tmp_path):
    created = tmp_path / "created"
    entry = {"question": "?", "answer": f"open({str(created)!r}, 'w')", "metadata": {"answer": "1"}}
    assert score("polynomial_multiplication", "1", entry) == 0.0
    assert not created.exists()


def test_an_integral_is_right_where_the_generator_wrote_none():
    entry = {
        "question": "?",
        "answer": "-x*cos(x) + Integral(cos(x), x) + C",
        "metadata": {"integrand": "x*sin(x)", "variable": "x"},
    }
    assert score("intermediate_integration", "-x*cos(x) + sin(x) + C", entry) == 1.0
    assert score("intermediate_integration", "-x*cos(x) + C", entry) == 0.0
    assert score("intermediate_integration", "Integral(x*sin(x), x)", entry) == 0.0


def test_an_answer_its_scorer_cannot_parse_scores_zero():
    assert score("prime_factorization", "two times three", entry_of("prime_factorization")) == 0.0


def test_a_prompt_of_another_source_raises():
    with pytest.raises(ValueError, match=r"from 'openai/gsm8k'; use reward\.type=math_verify"):
        compute_score("openai/gsm8k", "42", "42", {})
