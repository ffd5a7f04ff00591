"""Decontamination: find training prompts that equal an evaluation prompt or share n consecutive words with one.

Overlap of n words is GPT-3's criterion (Brown et al. 2020, arXiv 2005.14165, appendix C; n = 13 there); DeepSeekMath
uses n = 10 (arXiv 2402.03300, section 2.1). n-grams that many evaluation prompts share belong to a template, such as
"put your final answer within", and do not count; GPT-3 likewise ignores frequent n-grams.
"""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from megatron_bapo.records import Prompt

NGRAM = 10
TEMPLATE_SHARE = 0.1
"""An n-gram in more than this share of the evaluation prompts, and in more than two, belongs to a template."""

_WORD = re.compile(r"[\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff]|[^\W\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff]+")
"""A word: a run of letters and digits, or one character in Chinese and Japanese, which do not separate words."""

Overlap = Literal["exact", "ngram"]


@dataclass(frozen=True)
class EvaluationPrompts:
    """Index of evaluation prompts: maps whole texts and n-grams to the location of the first prompt with them."""

    texts: dict[str, str]
    ngrams: dict[tuple[str, ...], str]
    n: int
    num_template_ngrams: int
    """Number of template n-grams, which `ngrams` does not contain."""


def index_evaluation_prompts(prompts: Sequence[tuple[str, Prompt]], n: int = NGRAM) -> EvaluationPrompts:
    """Build the index from (location, prompt) pairs. Prompts of fewer than n words are only compared as a whole."""
    first: dict[str, tuple[str, Prompt]] = {}  # without repeated rows, which would make all of their text a template
    for place, prompt in prompts:
        first.setdefault(normalized_text(prompt), (place, prompt))
    found = [set(_ngrams(prompt, n)) for _, prompt in first.values()]
    num_prompts = Counter(ngram for ngrams in found for ngram in ngrams)
    limit = max(2.0, TEMPLATE_SHARE * len(first))
    places: dict[tuple[str, ...], str] = {}
    for (place, _), ngrams in zip(first.values(), found, strict=True):
        for ngram in ngrams:
            if num_prompts[ngram] <= limit:
                places.setdefault(ngram, place)
    texts = {text: place for text, (place, _) in first.items()}
    return EvaluationPrompts(texts, places, n, num_template_ngrams=len(num_prompts) - len(places))


def find_overlap(prompt: Prompt, evaluation: EvaluationPrompts) -> tuple[Overlap, str] | None:
    """Return the kind of overlap and the location of an overlapping evaluation prompt; None if there is none."""
    if place := evaluation.texts.get(normalized_text(prompt)):
        return "exact", place
    places = (evaluation.ngrams.get(ngram) for ngram in _ngrams(prompt, evaluation.n))
    return next((("ngram", place) for place in places if place is not None), None)


def _task(prompt: Prompt) -> str:
    """Return the prompt's text without system messages, which many prompts share."""
    return "\n".join(message["content"] for message in prompt.messages if message["role"] != "system")


def _normal(prompt: Prompt) -> str:
    """Return the text in normalized width and case."""
    return unicodedata.normalize("NFKC", _task(prompt)).casefold()


def normalized_text(prompt: Prompt) -> str:
    """Return the normalized text without white space. Signs are kept, so that 1 + 1 differs from 1 - 1."""
    return "".join(_normal(prompt).split())


def _ngrams(prompt: Prompt, n: int) -> Iterator[tuple[str, ...]]:
    words = _WORD.findall(_normal(prompt))
    return (tuple(words[start : start + n]) for start in range(len(words) - n + 1))
