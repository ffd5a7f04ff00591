"""Multiple-choice tasks: choices become lettered lines of the prompt, and the right one's letter the ground truth."""

from __future__ import annotations

import random
import string
from collections.abc import Sequence
from typing import Any

from megatron_bapo.data.prompt_files import Malformed

LETTERS = string.ascii_uppercase[:10]
"""Letters of the choices, those that `rewards.answer_text` reads."""


def lettered(question: str, choices: Sequence[Any], right: Any, *, shuffled: bool) -> tuple[str, str]:
    """Return the question with one line per choice, and the letter of the right one.

    `right` is the number of a choice, from 0, its letter, or its text. With `shuffled` it is the text, and the order of
    the choices depends only on the question. Raises Malformed.
    """
    if not 2 <= len(choices) <= len(LETTERS) or not all(
        isinstance(choice, str) and choice.strip() for choice in choices
    ):
        raise Malformed(f"the choices are {choices!r:.120}; they must be 2 to {len(LETTERS)} texts")
    texts = [choice.strip() for choice in choices]
    index, order = _index(texts, right, only_text=shuffled), list(range(len(texts)))
    if shuffled:
        random.Random(question).shuffle(order)
    lines = (f"{letter}. {texts[place]}" for letter, place in zip(LETTERS, order, strict=False))
    return "\n".join((question.rstrip(), "", *lines)), LETTERS[order.index(index)]


def _index(texts: Sequence[str], right: Any, *, only_text: bool) -> int:
    if isinstance(right, str):
        written = right.strip()
        if not only_text and written in tuple(LETTERS[: len(texts)]):
            return LETTERS.index(written)
        if texts.count(written) == 1:
            return texts.index(written)
    elif not only_text and type(right) is int and 0 <= right < len(texts):
        return right
    raise Malformed(
        f"the ground truth {right!r:.80} is no choice's number, letter or own text; the choices are {texts!r:.120}"
    )
