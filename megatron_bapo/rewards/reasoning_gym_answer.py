"""Reward of reasoning-gym questions by each task's own scorer.

Scores are in [0, 1] and not always 0 or 1. Most number tasks (chain_sum, gcd, products, ...) give 1.0 to the right
number alone, and len(truth) / len(answer) to any text that contains the right digits: for 42, "42." gives 1.0, "The
answer is 42" 2/16 and "142" 2/3. Answers in <answer> tags, or prompts that ask for the answer alone, avoid this partial
credit. Puzzles (countdown, puzzle24, rush_hour, ...) give 0.01 to 0.05 to any answer.
"""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Callable
from typing import Any

from reasoning_gym import algorithmic, games
from reasoning_gym.factory import get_score_answer_fn
from reasoning_gym.utils import extract_answer

from megatron_bapo.tasks import grid_walk as grid_walk  # registers the task

DATA_SOURCE_PREFIX = "reasoning_gym/"

# reasoning-gym 0.1.25: these scorers call eval() on the answer to accept Python lists, so a model could execute code.
# Remove when upstream uses literal_eval.
for _module in (
    algorithmic.binary_matrix,
    algorithmic.number_sorting,
    algorithmic.spiral_matrix,
    algorithmic.string_insertion,
    games.n_queens,
):
    _module.eval = ast.literal_eval  # pyright: ignore[reportAttributeAccessIssue]

# reasoning-gym 0.1.25: these scorers pass the response to sympy.parse_expr or eval(), both of which execute code, and
# with it the named texts of the entry. Remove when upstream no longer does.
EVALUATED_TEXTS = {
    "bitwise_arithmetic": ("problem",),
    "countdown": (),
    "intermediate_integration": ("integrand",),
    "polynomial_multiplication": ("answer",),
    "puzzle24": (),
    "simple_integration": ("integrand",),
}
_MATH_CHARACTERS = re.compile(r"[\w\s+\-*/^().,&|~<>]*", re.ASCII)
_NUMBER = re.compile(r"0x[0-9a-fA-F]+|\d+\.?\d*(?:[eE][+-]?\d+)?")
_NAME = re.compile(r"[A-Za-z_]\w*")
_ATTRIBUTE = re.compile(r"\.\s*[A-Za-z_]")
_FUNCTION = re.compile(r"a?(sin|cos|tan)|sec|csc|cot|(sin|cos|tan)h|exp|log|ln|sqrt|pi")

# Errors that scorers raise on answers they cannot parse (prime_factorization on words, coin_flip on long numbers, ...).
_UNPARSABLE = (ValueError, TypeError, AttributeError, ArithmeticError, LookupError, SyntaxError, RecursionError)


def compute_score(
    data_source: str, solution_str: str, ground_truth: str, extra_info: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Return the task's score of the last <answer>...</answer> content, or of the whole stripped text without one.

    `data_source` is reasoning_gym/<task> and `extra_info` the generator's entry. An answer that the scorer cannot parse
    scores 0.0. Raises ValueError for a prompt of another source.
    """
    task = data_source.removeprefix(DATA_SOURCE_PREFIX)
    if task == data_source or extra_info is None or not {"question", "answer", "metadata"} <= extra_info.keys():
        raise ValueError(
            f"reward.type=reasoning_gym scores only prompts of reasoning_gym sources, and this one is from "
            f"{data_source!r}; use reward.type=math_verify or function"
        )
    score = _scorer(task)
    tagged = extract_answer(solution_str)
    answer = solution_str.strip() if tagged is None else tagged
    if not all(map(_is_harmless, _evaluated_texts(task, answer, extra_info))):
        return {"score": 0.0, "pred": answer}
    try:
        return {"score": float(score(answer, extra_info)), "pred": answer}
    except _UNPARSABLE:
        return {"score": 0.0, "pred": answer}


@functools.cache
def _scorer(task: str) -> Callable[[str, dict[str, Any]], float]:
    return get_score_answer_fn(task)  # pyright: ignore[reportReturnType]


def _evaluated_texts(task: str, answer: str, entry: dict[str, Any]) -> list[str]:
    """Return the texts that the task's scorer would execute as code."""
    if task not in EVALUATED_TEXTS:
        return []
    given = entry["metadata"] | {"answer": entry["answer"]}
    return [answer, *(str(given.get(name, "")) for name in EVALUATED_TEXTS[task])]


def _is_harmless(text: str) -> bool:
    """Return whether a text is arithmetic: numbers, one-letter variables and known functions."""
    return bool(
        _MATH_CHARACTERS.fullmatch(text)
        and not _ATTRIBUTE.search(text)
        and all(len(name) == 1 or _FUNCTION.fullmatch(name) for name in _NAME.findall(_NUMBER.sub(" ", text)))
    )
