"""Calculator environment, an example of a tool.

The reply to a turn that contains <calculator>(3 + 4) * 2</calculator> is 14; of several calls only the last one counts.
The arithmetic is exact, on numbers with + - * / // % ** and parentheses. Expressions are parsed as Python but never
executed.
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable
from fractions import Fraction
from typing import Any

from megatron_bapo.environments.tool_call import last_call

MAX_CHARACTERS = 200
MAX_POWER_BITS = 2048
"""Maximum bits of a result and of each intermediate power. Other operations cannot get slow within 200 characters."""

_ARITHMETIC = re.compile(r"[\d\s.+*/%()-]+")
"""Text that may contain an expression."""
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
    """Return the result or an error text; None if the last message has no calculator call."""
    call = last_call(messages[-1]["content"], "calculator")
    if call is None:
        return None
    try:
        return _shown(calculate(call))
    except ValueError as error:
        return f"error: {error}"


def demonstration(
    messages: list[dict[str, str]], data_source: str, ground_truth: str, extra_info: dict[str, Any] | None = None
) -> list[str]:
    """Return a demonstration: a call with the last message's longest expression, its result, and the ground truth.

    Raises ValueError if the message has no expression or its value cannot be calculated.
    """
    problem = longest_expression(messages[-1]["content"])
    return [f"<calculator>{problem}</calculator>", _shown(calculate(problem)), ground_truth]


def longest_expression(text: str) -> str:
    """Return the longest part that may be an expression, from a digit or ( to a digit or ); empty if there is none."""
    return max((_trimmed(run) for run in _ARITHMETIC.findall(text)), key=len, default="")


def _trimmed(run: str) -> str:
    starts = (index for index, character in enumerate(run) if character.isdecimal() or character == "(")
    ends = (index for index in reversed(range(len(run))) if run[index].isdecimal() or run[index] == ")")
    first, last = next(starts, len(run)), next(ends, 0)
    return run[first : last + 1] if first < last else ""


def calculate(expression: str) -> Fraction:
    """Return the exact value. Raises ValueError with the reason if it cannot be calculated."""
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
