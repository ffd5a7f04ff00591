import json
from typing import Any

import pytest

from megatron_bapo.rewards.code_tests import AssertTest, CallTest, OutputTest, read_tests


def read(content: Any, **extra_info: Any) -> list[Any]:
    return read_tests(json.dumps(content), extra_info)


@pytest.mark.parametrize(
    ("content", "tests"),
    [
        ({"inputs": ["1\n", "2\n"], "outputs": ["2\n", "4"]}, [OutputTest("1\n", "2\n"), OutputTest("2\n", "4")]),
        ({"inputs": [["1", "2"]], "outputs": [["3", 4]], "fn_name": None}, [OutputTest("1\n2", "3\n4")]),
        ({"inputs": [[1, "a"]], "outputs": [[3]], "fn_name": "f"}, [CallTest("f", [1, "a"], [[3], 3])]),
        ({"inputs": ['[1]\n"a"'], "outputs": ["[3]"], "fn_name": "f"}, [CallTest("f", [[1], "a"], ["[3]", [3]])]),
        ({"inputs": ["1"], "outputs": ["abc"], "fn_name": "f"}, [CallTest("f", [1], ["abc"])]),
        ([{"input": "1", "output": "2", "testtype": "stdin"}], [OutputTest("1", "2")]),
        (
            [{"input": "1", "output": "2", "testtype": "functional", "metadata": {"func_name": "f"}}],
            [CallTest("f", [1], ["2", 2])],
        ),
        ({"test_cases": [{"type": "stdin_stdout", "input": "1", "output": "2"}]}, [OutputTest("1", "2")]),
        (
            {"test_cases": [{"type": "function_call", "fn_name": "f", "input": [1], "output": [2]}]},
            [CallTest("f", [1], [[2], 2])],
        ),
        ({"assert_case": ["assert f(1) == 2"]}, [AssertTest("assert f(1) == 2")]),
        (["assert f(1) == 2", "assert f(2)"], [AssertTest("assert f(1) == 2"), AssertTest("assert f(2)")]),
    ],
)
def test_the_forms_of_data_sets_are_read(content: Any, tests: list[Any]) -> None:
    assert read(content) == tests


@pytest.mark.parametrize("extra_info", [{"func_name": "f"}, {"metadata": {"func_name": "f"}}])
def test_a_function_that_is_named_beside_the_tests_is_called(extra_info: dict[str, Any]) -> None:
    content = [{"input": "1", "output": "2", "testtype": kind} for kind in ("functional", "stdin")]
    assert read(content, **extra_info) == [CallTest("f", [1], ["2", 2]), OutputTest("1", "2")]


@pytest.mark.parametrize(
    ("ground_truth", "problem"),
    [
        ("42 or so", "the tests '42 or so' are not JSON; write them as {\"inputs\""),
        ("[" * 100_000, "are not JSON"),
        ("42", "the tests '42' are not a list with an element"),
        ("[]", "are not a list with an element"),
        ('{"inputs": [], "outputs": []}', "are not a list with an element"),
        ('{"inputs": ["1"], "outputs": []}', "two lists of equal length, `inputs` and `outputs`"),
        ('{"tests": ["1"]}', "two lists of equal length"),
        ("[1]", "the test 1 is neither an assertion nor an object with `input` and `output`"),
        ('[{"input": "1"}]', "neither an assertion nor an object"),
        ('[{"input": "1", "output": "1", "testtype": "functional"}]', "neither it nor extra_info names one"),
        ('{"inputs": ["a b"], "outputs": ["1"], "fn_name": "f"}', "the input 'a b' of a call has no JSON in each line"),
    ],
)
def test_what_cannot_be_read_is_refused_with_the_rule(ground_truth: str, problem: str) -> None:
    with pytest.raises(ValueError, match=r"test|input") as refused:
        read_tests(ground_truth, {})
    assert problem in str(refused.value)
    assert len(str(refused.value)) < 300


@pytest.mark.parametrize(
    ("output", "expected", "is_passed"),
    [
        ("1 2\n3\n", "1 2\n3", True),
        ("  1 2  \r\n 3\n\n", "1 2\n3\n", True),
        ("1.0 2e0", "1 2.00", True),
        ("1  2", "1 2", True),
        ("a  b", "a b", False),
        ("yes", "YES", False),
        ("0.1", "0.10000000000000001", False),
        ("50000000000000001", "50000000000000000", False),
        ("1\n\n2", "1\n2", False),
        ("1 2", "1\n2", False),
        ("1 2 3", "1 2", False),
        ("nan", "nan", True),
        ("NaN", "nan", False),
        ("", "", True),
        ("", "0", False),
    ],
)
def test_outputs_are_compared_by_lines_and_numbers(output: str, expected: str, is_passed: bool) -> None:
    """The results are those of LiveCodeBench's `grade_stdio` for a program that prints the output."""
    assert OutputTest("", expected).is_passed(output) is is_passed


@pytest.mark.parametrize(
    ("output", "accepted", "is_passed"),
    [
        ("[1, 2]", [[1, 2]], True),
        ("2.0", [2], True),
        ('"2"', [2], False),
        ("3", [[3], 3], True),
        ('{"a": null}', [{"a": None}], True),
        ("", [None], False),
        ("1 2", [1], False),
        ("[" * 100_000, [1], False),
    ],
)
def test_results_of_calls_are_compared_as_json(output: str, accepted: list[Any], is_passed: bool) -> None:
    assert CallTest("f", [], accepted).is_passed(output) is is_passed
