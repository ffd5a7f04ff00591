"""A calculator as an environment: the worked example of a tool.

A turn that holds <calculator>(3 + 4) * 2</calculator> is answered with 14; of several calls the last one counts. Exact
arithmetic on numbers with + - * / // % ** and parentheses, read by Python's parser and never run as Python.
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable
from fractions import Fraction
from typing import Any

MAX_CHARACTERS = 200
MAX_POWER_BITS = 2048
"""Of a result, and of each power on the way; 200 characters of other operations make no numbers that take long."""

_CALL = re.compile(r"<calculator>(.*?)</calculator>", re.DOTALL)
_PROBLEM = re.compile(r"[\d(][\d\s.+*/%()-]*[\d)]")
_OPERATIONS: dict[type[ast.AST], Callable[..., Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.UAdd: operator.pos,
    ast.USub: operator.neg,
}


def reply(
    messages: list[dict[str, str]], data_source: str, ground_truth: str, extra_info: dict[str, Any] | None = None
) -> str | None:
    """The result, or what is wrong with the expression; None when the last message calls no calculator."""
    calls = _CALL.findall(messages[-1]["content"])
    if not calls:
        return None
    try:
        return _shown(calculate(calls[-1]))
    except ValueError as error:
        return f"error: {error}"


def demonstration(
    messages: list[dict[str, str]], data_source: str, ground_truth: str, extra_info: dict[str, Any] | None = None
) -> list[str]:
    """A call with the longest expression of the last message, its result, and the ground truth as the answer.

    Raises ValueError for a message without an expression, or with one that cannot be calculated.
    """
    problem = max(_PROBLEM.findall(messages[-1]["content"]), key=len, default="")
    return [f"<calculator>{problem}</calculator>", _shown(calculate(problem)), ground_truth]


def calculate(expression: str) -> Fraction:
    """The exact value; raises ValueError that says what cannot be calculated."""
    if len(expression) > MAX_CHARACTERS:
        raise ValueError(f"more than {MAX_CHARACTERS} characters")
    try:
        tree = ast.parse(expression.strip(), mode="eval")
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        raise ValueError("not an arithmetic expression") from None
    try:
        return _value(tree.body)
    except ZeroDivisionError:
        raise ValueError("division by zero") from None


def _value(node: ast.AST) -> Fraction:
    match node:
        case ast.Constant(value=int() | float() as number) if not isinstance(number, bool):
            try:
                return Fraction(repr(number))
            except ValueError:
                raise ValueError("number too large") from None
        case ast.BinOp(op=ast.Pow(), left=left, right=right):
            return _power(_value(left), _value(right))
        case ast.BinOp(op=op, left=left, right=right) if type(op) in _OPERATIONS:
            return Fraction(_OPERATIONS[type(op)](_value(left), _value(right)))
        case ast.UnaryOp(op=op, operand=operand) if type(op) in _OPERATIONS:
            return _OPERATIONS[type(op)](_value(operand))
    raise ValueError("only numbers, + - * / // % ** and parentheses")


def _power(base: Fraction, exponent: Fraction) -> Fraction:
    if exponent.denominator != 1:
        raise ValueError("exponents must be whole numbers")
    if max(base.numerator.bit_length(), base.denominator.bit_length()) * abs(exponent.numerator) > MAX_POWER_BITS:
        raise ValueError("number too large")
    return base**exponent.numerator


def _shown(value: Fraction) -> str:
    if max(value.numerator.bit_length(), value.denominator.bit_length()) > MAX_POWER_BITS:
        raise ValueError("number too large")
    if value.denominator == 1:
        return str(value.numerator)
    try:
        return f"{float(value):.12g}"
    except OverflowError:
        raise ValueError("number too large") from None
