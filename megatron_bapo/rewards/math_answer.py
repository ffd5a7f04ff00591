r"""Reward for mathematical equality with the ground truth, by math-verify (https://github.com/huggingface/Math-Verify).

math-verify evaluates what it reads: a response that only repeats its task, such as \boxed{12+34} for 46, equals the
ground truth. The response must therefore also be written as a result (see `number_form`).
"""

from __future__ import annotations

import json
import logging
import math
import re
from itertools import accumulate, takewhile
from typing import Any

import sympy
from math_verify import parse, verify

from megatron_bapo.rewards.answer_text import (
    has_other_base,
    is_same_name,
    repeating_decimal,
    split_choice,
    without_percent,
)
from megatron_bapo.rewards.formula import elements, has_variable, tokens
from megatron_bapo.rewards.number_form import is_result, kinds_of_constants

# math-verify's own timeouts use SIGALRM, which does not stop some computations (verl PR #5635). They are disabled, and
# the scorer kills the process instead. The log level hides math-verify's warning about this.
NO_TIMEOUT = 0
SMALL_TOLERANCE = 1e-3
"""Relative difference of two numbers below 1 that may count as equal."""
logging.getLogger("math_verify").setLevel(logging.ERROR)

# Spellings that math-verify 0.9 misreads or cannot read.
_CORRECTIONS = [
    (r"\\(?:bf|bm|boldsymbol|small|normalsize|[lL]arge|LARGE|[hH]uge|(?:text|script)style)(?![A-Za-z])", ""),
    (r"\\(?:text)?color\s*\{[A-Za-z]+\}", ""),
    # \mbox{204} and \textbf{\frac{1}{2}}; a text that begins with a letter may be a name or a choice.
    (r"^\\(?:text|mbox|hbox|underline)\s*\{\s*(?=[-+.\d\\])((?:[^{}]|\{(?:[^{}]|\{[^{}]*\})*\})*)\}$", r"\1"),
    (r"(\d{0,99})\.(\d{0,99})\\(?:overline|bar|dot)\s*\{(\d{1,99})\}", repeating_decimal),  # 0.\overline{3}
    (r"\\varnothing(?![A-Za-z])|∅|\\\{\s*\\\}", r"\\emptyset"),
    (r"(?<![\d.])\d{1,3}(?:(?:\\[,;:! ]|~|\s)\d{3}(?!\d))+", lambda match: re.sub(r"\D", "", match[0])),  # 12\,345
    (r"(?<![A-Za-z0-9.\\])(\d+(?:\.\d+)?|\.\d+)[eE]([-+]?\d+)(?![\d.A-Za-z])", r"\1 \\times 10^{\2}"),  # 3e8
    (r"\\pmod\s*(?:\d+|\{[^{}]*\})|\((?:\\?[bp]?mod|\\text\{mod\s*\})[^()]*\)", ""),  # 46 \pmod{100}
    (r"^(?:\\approx|≈|[\s*])+", ""),
    (r"(?<!\^)°", r"^\\circ"),
    (r"[·•]", r"\\cdot "),
    (r"(?s)^.*\\begin\{(?:align|gather|split)\w*\*?\}.*=(.*)\\end\{\w+\*?\}", r"\1"),
    (r"(?:\\[,;:! ]|(?<=[\d}])\s0\.|[.\s]|(?<!\^)\*)+$", ""),  # math-verify reads "2 ." as "2 0."
]
_EMPTY_BOX = re.compile(r"\\boxed\s*\{\s*\}")
_MAX_DEPTH = 10
"""Most braces within braces of an answer: math-verify takes 1 s for `{{5}}` with 10 of them, and 38 s with 100."""
# Signs of work that is left to do, even with variables.
_TASK = re.compile(
    r"\\(?:i*nt|oint|sum|prod|lim|det|gcd|lcm|operatorname|partial)(?![A-Za-z])|vmatrix"
    r"|\\frac \{ d (?:[^{}]* )?\} \{ d \S+ (?=\})"
)


def compute_score(
    data_source: str, solution_str: str, ground_truth: str, extra_info: dict[str, Any] | None = None
) -> dict[str, Any]:
    r"""Return `score`, 1.0 if the answer equals the ground truth and 0.0 if not, and the extracted answer as `pred`.

    The answer is the response's last \boxed{} (several close together form a set), else its last formula or number. The
    ground truth is a number or LaTeX, with or without \boxed{} or dollar signs, or a JSON list of such texts, any of
    which counts. An answer that leaves work to do, such as a repetition of the task, scores 0.0 unless the ground truth
    is written in the same way. Raises ValueError if the ground truth cannot be read.
    """
    golds = [gold for text in _alternatives(ground_truth) if (gold := _read_ground_truth(text))]
    if not golds:
        raise ValueError(f"math-verify finds no number or formula in the ground truth {ground_truth!r:.120}")
    answer = _read(solution_str) if _has_readable_box(solution_str) else []
    return {"score": float(any(_is_right(gold, answer) for gold in golds)), "pred": _written(answer)}


def _has_readable_box(text: str) -> bool:
    r"""Return whether the last \boxed{} has content that is not nested too deeply; True for a text without one."""
    start = text.rfind("\\boxed")
    if start < 0:
        return True
    braces = re.findall(r"(?<!\\)[{}]", text[start:])
    depths = accumulate(1 if brace == "{" else -1 for brace in braces)
    in_box = takewhile(lambda depth: depth > 0, depths)
    return not _EMPTY_BOX.match(text, start) and max(in_box, default=0) <= _MAX_DEPTH


def _alternatives(ground_truth: str) -> list[str]:
    """Return the texts of a JSON list of strings, as in public data sets; `[1,2]` and `[1,2)` are single answers."""
    try:
        texts = json.loads(ground_truth)
    except (ValueError, RecursionError):
        return [ground_truth]
    is_list = isinstance(texts, list) and all(isinstance(text, str) for text in texts)
    return texts if is_list else [ground_truth]


def _read_ground_truth(text: str) -> list[Any]:
    is_delimited = "\\boxed" in text or re.search(r"(?<!\\)\$", text)
    delimited = text if is_delimited else f"\\boxed{{{text}}}"
    read = _read(delimited)
    # A formula that cannot be read counts as the last number in it.
    return [*parse(delimited, parsing_timeout=NO_TIMEOUT)[:1], *read] if len(read) == 1 else read


def _read(text: str) -> list[Any]:
    """Return the value of the last formula or number and its own text, or its text alone if it cannot be read."""
    read = _parse(text)
    if read and (corrected := _corrected(read[-1])) not in ("", read[-1]):
        read = _parse(f"\\boxed{{{corrected}}}")
    if len(read) == 1 and "=" in read[0]:
        last_side = _corrected(read[0].rpartition("=")[2])
        return last if len(last := _parse(f"\\boxed{{{last_side}}}")) > 1 else read
    return read


def _parse(text: str) -> list[Any]:
    # By default math-verify returns the text of the last formula with the value of an earlier one if the last one
    # cannot be read.
    return parse(text, extraction_mode="first_match", parsing_timeout=NO_TIMEOUT)


def _corrected(text: str) -> str:
    for pattern, correction in _CORRECTIONS:
        text = re.sub(pattern, correction, text)
    return text.strip()


def _is_right(gold: list[Any], answer: list[Any]) -> bool:
    if not answer:
        return False
    (letter, content), (chosen, found) = split_choice(gold[-1]), split_choice(answer[-1])
    if letter and chosen and (letter != chosen or not content or not found):
        return letter == chosen
    if not content or not found:
        return False
    expected = gold if content == gold[-1] else _read(f"\\boxed{{{content}}}")
    return _is_equal(expected, answer if found == answer[-1] else _read(f"\\boxed{{{found}}}"))


def _is_equal(gold: list[Any], answer: list[Any]) -> bool:
    if not gold or not answer or has_other_base(gold[-1], answer[-1]):
        return False
    if (verdict := is_same_name(gold[-1], answer[-1])) is not None:
        return verdict
    try:
        return _is_finished(gold, answer) and (_has_value(gold, answer) or _is_same_percentage(gold, answer))
    except RecursionError:  # a thousand nested brackets
        return False


def _has_value(gold: list[Any], answer: list[Any]) -> bool:
    # math-verify's comparison is asymmetric; the ground truth must come first.
    is_verified = verify(gold, answer, timeout_seconds=NO_TIMEOUT)
    return is_verified and _is_close_if_small(gold[0], answer[0])


def _is_same_percentage(gold: list[Any], answer: list[Any]) -> bool:
    """Return whether one is a percentage, the other is not, and they are the same number of 1 or more without the sign.

    A task asks for "what percent" with or without the sign. Below 1 the number may also be the fraction itself.
    """
    bare = [without_percent(read[-1]) for read in (gold, answer)]
    if (bare[0] is None) == (bare[1] is None):
        return False
    expected, found = (
        read if text is None else _read(f"\\boxed{{{text}}}") for read, text in zip((gold, answer), bare, strict=True)
    )
    try:
        return float(found[0]) >= 1 and _has_value(expected, found)
    except (IndexError, TypeError, ValueError, OverflowError):  # no real number
        return False


def _is_close_if_small(gold: Any, answer: Any) -> bool:
    """Return False for numbers that are alike only in math-verify's six decimals, such as 1e-19 and 2e-19."""
    try:
        expected, found = float(gold), float(answer)
    except (TypeError, ValueError, OverflowError):  # no real number
        return True
    return not 0 < abs(expected) < 1 or math.isclose(expected, found, rel_tol=SMALL_TOLERANCE)


def _is_finished(gold: list[Any], answer: list[Any]) -> bool:
    """Return whether each element of the answer is a result or is written as in the ground truth."""
    gold_formula, formula = tokens(gold[-1]), tokens(answer[-1])
    if _without_braces(formula) == _without_braces(gold_formula):
        return True
    gold_elements = elements(gold_formula, keep_relations=True)
    is_symbolic = any(map(has_variable, gold_elements))
    if not is_symbolic and _is_to_be_combined(formula, gold_formula):
        return False
    kinds, tasks = kinds_of_constants(gold_formula), _tasks(gold_formula)
    alike = [_without_braces(element) for element in gold_elements]
    return all(
        _without_braces(element) in alike
        or is_result(element, kinds)
        or (is_symbolic and has_variable(element) and _tasks(element) <= tasks)
        for element in elements(formula, keep_relations=is_symbolic)
    )


def _is_to_be_combined(formula: list[str], gold: list[str]) -> bool:
    r"""Return whether the answer has more unions than the ground truth, or a factor before a matrix of integers.

    A ground truth with \setminus may be written as a union, and a matrix of fractions may have a common denominator.
    """
    num_unions = formula.count(r"\cup") - gold.count(r"\cup")
    is_scaled = "} \\begin{" in " ".join(formula)
    return (num_unions > 0 and r"\setminus" not in gold) or (is_scaled and {r"\frac", "/"}.isdisjoint(gold))


def _without_braces(formula: list[str]) -> list[str]:
    return [token for token in formula if token not in ("{", "}")]


def _tasks(formula: list[str]) -> set[str]:
    return {match[0] for match in _TASK.finditer(" ".join(formula))}


def _written(answer: list[Any]) -> str | None:
    """Return the extracted answer as canonical text, the same for 0.5, 1/2 and \\frac{1}{2}."""
    if not answer:
        return None
    value = sympy.Rational(str(answer[0])) if isinstance(answer[0], sympy.Float) else answer[0]
    try:
        return str(value)
    except ValueError:  # Python does not print integers of more than 4300 digits
        return str(answer[-1])
