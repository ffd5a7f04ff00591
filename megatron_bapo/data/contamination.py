"""Whether a training prompt also stands in an evaluation file: as a whole, or with a run of n words.

Overlap of n words is GPT-3's criterion (Brown et al. 2020, arXiv 2005.14165, appendix C; n = 13 there); DeepSeekMath
takes n = 10 (arXiv 2402.03300, section 2.1). Runs that many evaluation prompts share are their template, such as "put
your final answer within", and do not count; GPT-3 likewise ignores what is frequent.
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
"""A run of words in more than this share of the evaluation prompts, and in more than two, is a template."""

_WORD = re.compile(r"[\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff]|[^\W\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff]+")
"""A run of letters and digits; in Chinese and Japanese, which do not space words, a character."""

Overlap = Literal["exact", "ngram"]


@dataclass(frozen=True)
class EvaluationPrompts:
    """What is looked up: whole texts, and runs of words, with the place of the first prompt that has them."""

    texts: dict[str, str]
    ngrams: dict[tuple[str, ...], str]
    n: int
    num_template_ngrams: int
    """Left out of `ngrams`."""


def index_evaluation_prompts(prompts: Sequence[tuple[str, Prompt]], n: int = NGRAM) -> EvaluationPrompts:
    """From (place, prompt) pairs. A prompt of fewer than n words is looked up as a whole only."""
    found = [set(_ngrams(prompt, n)) for _, prompt in prompts]
    num_prompts = Counter(ngram for ngrams in found for ngram in ngrams)
    limit = max(2.0, TEMPLATE_SHARE * len(prompts))
    texts: dict[str, str] = {}
    places: dict[tuple[str, ...], str] = {}
    for (place, prompt), ngrams in zip(prompts, found, strict=True):
        texts.setdefault(_text(prompt), place)
        for ngram in ngrams:
            if num_prompts[ngram] <= limit:
                places.setdefault(ngram, place)
    return EvaluationPrompts(texts, places, n, num_template_ngrams=len(num_prompts) - len(places))


def find_overlap(prompt: Prompt, evaluation: EvaluationPrompts) -> tuple[Overlap, str] | None:
    """The kind of overlap and the place of an evaluation prompt that has it; None where there is none."""
    if place := evaluation.texts.get(_text(prompt)):
        return "exact", place
    places = (evaluation.ngrams.get(ngram) for ngram in _ngrams(prompt, evaluation.n))
    return next((("ngram", place) for place in places if place is not None), None)


def _task(prompt: Prompt) -> str:
    """What is asked: system messages are the same for many prompts."""
    return "\n".join(message["content"] for message in prompt.messages if message["role"] != "system")


def _normal(prompt: Prompt) -> str:
    """Without differences of width and case."""
    return unicodedata.normalize("NFKC", _task(prompt)).casefold()


def _text(prompt: Prompt) -> str:
    """Every sign counts, so that 1 + 1 is not 1 - 1, and no space does."""
    return "".join(_normal(prompt).split())


def _ngrams(prompt: Prompt, n: int) -> Iterator[tuple[str, ...]]:
    words = _WORD.findall(_normal(prompt))
    return (tuple(words[start : start + n]) for start in range(len(words) - n + 1))
