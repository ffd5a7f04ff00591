"""Tests of programs, as the ground truths of data sets have them, and the comparison of what a program gives.

| ground truth, as JSON | data sets |
| --- | --- |
| `{"inputs": [...], "outputs": [...]}`, with `"fn_name"` for calls | APPS, TACO, Eurus-2-RL; verl's `prime_code` |
| `[{"input", "output", "testtype": "stdin" or "functional"}, ...]` | LiveCodeBench, DeepCoder |
| `{"assert_case": ["assert f(1) == 2", ...]}`, or a list of such texts | MBPP, AceCode; verl's `sandbox_fusion` |
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from decimal import Decimal, InvalidOperation
from typing import Any


@dataclass(frozen=True)
class OutputTest:
    """The program reads `stdin` and prints `expected`."""

    mode = "script"
    """How `code_runner.py` executes the program."""
    stdin: str
    expected: str

    def is_passed(self, output: str) -> bool:
        """Return whether the output has the expected lines, up to blanks at their ends and notations of numbers.

        This is the rule of LiveCodeBench (`grade_stdio` in lcb_runner/evaluation/testing_util.py).
        """
        found, expected = _lines(output), _lines(self.expected)
        return len(found) == len(expected) and all(map(_is_equal_line, found, expected))


@dataclass(frozen=True)
class CallTest:
    """A function of the program, or a method of its class `Solution`, returns one of `accepted`."""

    mode = "call"
    function: str
    arguments: Sequence[Any]
    accepted: Sequence[Any]

    @property
    def stdin(self) -> str:
        return json.dumps({"function": self.function, "arguments": self.arguments})

    def is_passed(self, output: str) -> bool:
        """Return whether the output is an accepted value as JSON."""
        try:
            value = json.loads(output)
        except (ValueError, RecursionError):
            return False
        return value in self.accepted


@dataclass(frozen=True)
class AssertTest:
    """A statement that raises nothing after the program."""

    mode = "assert"
    statement: str
    passed: str = field(default_factory=secrets.token_hex, compare=False)
    """What is written after the statement, which no program knows beforehand."""

    @property
    def stdin(self) -> str:
        return json.dumps({"statement": self.statement, "passed": self.passed})

    def is_passed(self, output: str) -> bool:
        """Return whether the statement has been executed."""
        return output == self.passed


Test = OutputTest | CallTest | AssertTest
FORMATS = '{"inputs": [...], "outputs": [...]}, [{"input": ..., "output": ...}, ...] or {"assert_case": [...]}'


def read_tests(ground_truth: str, extra_info: Mapping[str, Any]) -> list[Test]:
    """Return the tests of a ground truth; `extra_info` may name the function that LiveCodeBench keeps apart.

    Raises ValueError, with the rule that is broken, if there are none or they have another form.
    """
    try:
        content = json.loads(ground_truth)
    except (ValueError, RecursionError):
        raise ValueError(f"the tests {ground_truth!r:.80} are not JSON; write them as {FORMATS}") from None
    if isinstance(content, dict) and "test_cases" in content:
        content = content["test_cases"]
    if isinstance(content, dict) and "assert_case" in content:
        content = content["assert_case"]
    elif isinstance(content, dict):
        content = _rows(content)
    if not isinstance(content, list) or not content:
        raise ValueError(f"the tests {ground_truth!r:.80} are not a list with an element; write them as {FORMATS}")
    return [_test(each, extra_info) for each in content]


def _rows(columns: Mapping[str, Any]) -> list[dict[str, Any]]:
    inputs, outputs, function = (columns.get(name) for name in ("inputs", "outputs", "fn_name"))
    if not isinstance(inputs, list) or not isinstance(outputs, list) or len(inputs) != len(outputs):
        raise ValueError("the tests need two lists of equal length, `inputs` and `outputs`, or a list `assert_case`")
    return [{"input": i, "output": o, "fn_name": function} for i, o in zip(inputs, outputs, strict=True)]


def _test(content: Any, extra_info: Mapping[str, Any]) -> Test:
    if isinstance(content, str):
        return AssertTest(content)
    if not isinstance(content, dict) or not {"input", "output"} <= content.keys():
        raise ValueError(f"the test {content!r:.80} is neither an assertion nor an object with `input` and `output`")
    function = _function(content, extra_info)
    if function is not None:
        return CallTest(function, _arguments(content["input"]), _accepted(content["output"]))
    return OutputTest(_text(content["input"]), _text(content["output"]))


def _function(content: Mapping[str, Any], extra_info: Mapping[str, Any]) -> str | None:
    """Return the name of the function to call; None for a test of the output."""
    kind = content.get("testtype", content.get("type"))
    if kind is None:
        return _named(content)
    if kind in ("stdin", "stdin_stdout"):
        return None
    function = _named(content, content.get("metadata"), extra_info, extra_info.get("metadata"))
    if function is None:
        raise ValueError(
            f"the test {content!r:.80} calls a function, but neither it nor extra_info names one (fn_name, func_name)"
        )
    return function


def _named(*places: Any) -> str | None:
    """Return the first name of a function in objects; None if there is none."""
    names = (place.get(key) for place in places if isinstance(place, Mapping) for key in ("fn_name", "func_name"))
    return next((name for name in names if isinstance(name, str) and name), None)


def _arguments(given: Any) -> list[Any]:
    """Return the arguments from a list, or from a text with the JSON of one argument in each line."""
    if isinstance(given, list):
        return given
    try:
        return [json.loads(line) for line in str(given).split("\n")]
    except (ValueError, RecursionError):
        raise ValueError(f"the input {given!r:.80} of a call has no JSON in each line") from None


def _accepted(given: Any) -> list[Any]:
    """Return the values that count: the given one, that in its JSON, and that in a list around it, as in APPS."""
    accepted = [given]
    if isinstance(given, str):
        with suppress(ValueError, RecursionError):
            accepted.append(json.loads(given))
    elif isinstance(given, list) and len(given) == 1:
        accepted.append(given[0])
    return accepted


def _text(given: Any) -> str:
    return "\n".join(map(str, given)) if isinstance(given, list) else str(given)


def _lines(text: str) -> list[str]:
    return [line.strip() for line in text.strip().split("\n")]


def _is_equal_line(found: str, expected: str) -> bool:
    if found == expected:
        return True
    try:
        return [Decimal(word) for word in found.split()] == [Decimal(word) for word in expected.split()]
    except InvalidOperation:
        return False
