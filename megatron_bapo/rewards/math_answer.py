r"""Reward for mathematical equality with the ground truth, by math-verify (https://github.com/huggingface/Math-Verify).

math-verify evaluates what it reads: a response that only repeats its task, such as \boxed{12+34} for 46, equals the
ground truth. The response must therefore also be written as a result (see `number_form`).
"""

from __future__ import annotations

import json
import logging
import math
import re
from dataclasses import replace
from typing import Any, Literal

import sympy
from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

from megatron_bapo.rewards.answer_text import (
    has_other_base,
    is_same_name,
    is_same_ratio,
    like_lists,
    repeating_decimal,
    split_choice,
    without_percent,
)
from megatron_bapo.rewards.boxes import last_boxed
from megatron_bapo.rewards.formula import elements, has_variable, tokens
from megatron_bapo.rewards.number_form import is_result, kinds_of_constants
from megatron_bapo.rewards.units import several_quantities, without_unit

# math-verify's own timeouts use SIGALRM, which does not stop some computations (verl PR #5635). They are disabled, and
# the scorer kills the process instead. The log level hides math-verify's warning about this.
NO_TIMEOUT = 0
SMALL_TOLERANCE = 1e-3
"""Relative difference of two numbers below 1 that may count as equal."""
logging.getLogger("math_verify").setLevel(logging.ERROR)

_LATEX = LatexExtractionConfig()
_WITHOUT_UNITS = replace(_LATEX.normalization_config, units=False)
_EXTRACTION = [replace(_LATEX, normalization_config=_WITHOUT_UNITS), ExprExtractionConfig()]
# Spellings that math-verify 0.9 takes for texts.
_LETTERS = [
    (r"(?<![A-Za-z])\\(?:mathbf|mathit|boldsymbol|bm)\s*\{\s*([A-Za-z])\s*\}", r"\1"),  # a vector
    (r"(?<![A-Za-z])\\(?:mathrm|operatorname)\s*\{\s*([ie])\s*\}", r"\1"),
    (r"(?<![A-Za-z\\])(?:US|USD|HK|CA|AU|A|C)\s*(?=\\\$\s*\d)", ""),
]
# Spellings that math-verify 0.9 misreads or cannot read.
_CORRECTIONS = [
    (r"\\(?:mathsf|mathtt|texttt|textsf|textsc|emph)(?![A-Za-z])", r"\\text"),
    (r"\\text\s*\{\s*\\?%\s*\}", r"\\%"),
    (r"\\text\s*\{\s*\}|\\(?:pounds|yen|euro)(?![A-Za-z])|[£€¥₹]", ""),
    (r"^\\text\s*\{\s*[A-Za-z ]{4,}:\s*\}", ""),
    (r"^\\text\s*\{\s*(?:[Oo]ption|[Cc]hoice)\s*\(?([A-J])\)?\s*\}$", r"\\text{\1}"),
    (r"∞", r"\\infty "),
    (r"\\colon(?![A-Za-z])", ":"),
    (r"\\(?:bf|bm|pmb|boldsymbol|small|normalsize|[lL]arge|LARGE|[hH]uge|(?:text|script)style)(?![A-Za-z])", ""),
    (r"\\(?:text)?color(?:box)?\s*\{[A-Za-z]+\}", ""),
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
    (r"(?:\\[,;:! ]|(?<=[\d}])\s0\.|[.\s~]|(?<!\^)\*)+$", ""),  # math-verify reads "2 ." as "2 0."
]
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
    answer = _read_response(solution_str)
    return {"score": float(any(_is_right(gold, answer) for gold in golds)), "pred": _written(answer)}


def _alternatives(ground_truth: str) -> list[str]:
    """Return the texts of a JSON list of strings, as in public data sets; `[1,2]` and `[1,2)` are single answers."""
    try:
        texts = json.loads(ground_truth)
    except (ValueError, RecursionError):
        return [ground_truth]
    is_list = isinstance(texts, list) and all(isinstance(text, str) for text in texts)
    return texts if is_list else [ground_truth]


def _read_response(text: str) -> list[Any]:
    content = last_boxed(text)
    if content is None:
        return _read(text)
    return _read_formula(content) if content else []


def _read_ground_truth(text: str) -> list[Any]:
    content = last_boxed(text)
    if content is None and not _is_sentence(text):
        content = re.sub(r"(?<!\\)\$", "", text)
    delimited = text if content is None else _boxed(content)
    read = _read(delimited)
    # A formula that cannot be read counts as the last number in it.
    return [*_parse(delimited, "any_match")[:1], *read] if len(read) == 1 else read


def _is_sentence(text: str) -> bool:
    """Return whether there are words beside formulas in dollar signs."""
    beside = re.split(r"(?<!\\)\$+", text)[::2]
    return len(beside) > 1 and re.search(r"(?<![A-Za-z\\])[A-Za-z]{2,}", " ".join(beside)) is not None


def _read_formula(formula: str) -> list[Any]:
    return _read(_boxed(formula))


def _boxed(formula: str) -> str:
    return f"\\boxed{{{formula}}}"


def _read(text: str) -> list[Any]:
    """Return the value of the last formula or number and its own text, or its text alone if it cannot be read."""
    read = _parse(text)
    if read and (corrected := _corrected(read[-1])) not in ("", read[-1]):
        read = _parse(_boxed(corrected))
    if read and "=" in read[-1] and _is_known_by_its_last_side(read):
        last_side = _corrected(read[-1].rpartition("=")[2])
        return last if len(last := _parse(_boxed(last_side))) > 1 else read
    quantities = several_quantities(read[-1]) if read else None
    return [sympy.Symbol(quantities), quantities] if quantities else read


def _is_known_by_its_last_side(read: list[Any]) -> bool:
    """Return whether the equation cannot be read, has units, has no variables or is one of matrices.

    math-verify says that all equations without variables are equal, and all of matrices with a factor.
    """
    if len(read) == 1 or several_quantities(read[-1]):
        return True
    if not isinstance(read[0], sympy.Equality):
        return False
    return not read[0].free_symbols or getattr(read[0].rhs, "is_Matrix", False)


def _parse(text: str, extraction_mode: Literal["first_match", "any_match"] = "first_match") -> list[Any]:
    # By default math-verify returns the text of the last formula with the value of an earlier one if the last one
    # cannot be read.
    for pattern, letter in _LETTERS:
        text = re.sub(pattern, letter, text)
    return parse(text, _EXTRACTION, extraction_mode=extraction_mode, parsing_timeout=NO_TIMEOUT)


def _corrected(text: str) -> str:
    for pattern, correction in _CORRECTIONS:
        text = re.sub(pattern, correction, text)
    text = text.strip()
    return text if several_quantities(text) else without_unit(text)


def _is_right(gold: list[Any], answer: list[Any]) -> bool:
    if not answer:
        return False
    (letter, content), (chosen, found) = split_choice(gold[-1]), split_choice(answer[-1])
    if letter and chosen and (letter != chosen or not content or not found):
        return letter == chosen
    if not content or not found:
        return False
    expected = gold if content == gold[-1] else _read_formula(content)
    return _is_equal(expected, answer if found == answer[-1] else _read_formula(found))


def _is_equal(gold: list[Any], answer: list[Any]) -> bool:
    if not gold or not answer or has_other_base(gold[-1], answer[-1]):
        return False
    for is_same in (is_same_name, is_same_ratio):
        if (verdict := is_same(gold[-1], answer[-1])) is not None:
            return verdict
    if (texts := like_lists(gold[-1], answer[-1])) is not None:
        gold, answer = map(_read_formula, texts)
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
        read if text is None else _read_formula(text) for read, text in zip((gold, answer), bare, strict=True)
    )
    try:
        return float(found[0]) >= 1 and _has_value(expected, found)
    except (IndexError, TypeError, ValueError, OverflowError):  # no real number
        return False


def _is_close_if_small(gold: Any, answer: Any) -> bool:
    """Return False for numbers that are alike only in math-verify's six decimals, such as 1e-19 and 2e-19."""
    try:
        expected, found = float(gold), float(answer)
    except (TypeError, ValueError, OverflowError, RecursionError):  # no real number; a sum of matrices
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
    except (ValueError, RecursionError):  # an integer of more than 4300 digits, and 5!!!...!
        return str(answer[-1])
