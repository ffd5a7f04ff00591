r"""The boxed answer of a response.

math-verify joins boxes that are up to 70 characters apart, prefers some formulas around a box to the box, and takes
cubic time for a response that repeats its box. The answer is therefore cut out before math-verify reads it.
"""

from __future__ import annotations

import re
from itertools import accumulate

_BOX = re.compile(r"\\(?:boxed|fbox)\s*\{")
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)
# What stands between the boxes of one list: punctuation, dollar signs, `and`, `or`, and the name of the next value.
_BETWEEN = re.compile(
    r"(?:[\s,;&$()*]|\\(?:[\[\]() ,;:!]|q?quad(?![a-z])|(?:text|mbox)\s*\{)|\}|\b(?:and|or)\b"
    r"|\b[A-Za-z](?:_\{?\w\}?)?\s*=)*"
)
# `\boxed{1} papers and \boxed{2} bins`
_WORDS_BETWEEN = re.compile(r"(?!.*\b(?:not?|but|wrong|incorrect)\b)[^.:;!?\n]*\band[\s}$\\(]*")
_MAX_BETWEEN = 70
_PERCENT = re.compile(r"(?:\s|~|\$|\\[)\] ,])*(?:\\?%|percent\b)")
_MAX_DEPTH = 10
"""Most braces within braces of an answer: math-verify takes 1 s for `{{5}}` with 10 of them, and 38 s with 100."""
_MAX_LENGTH = 10_000
"""Most characters of an answer: math-verify takes quadratic time for repetitions."""


def last_boxed(text: str) -> str | None:
    r"""Return the content of the last \boxed{}, after those of boxes that form a list with it, joined by commas.

    The content is empty if the box is, if it is not closed, or if it is too long or too deeply nested to be read. A
    percent sign behind the box belongs to it. None: no box.
    """
    boxes = list(_BOX.finditer(text))
    if not boxes:
        return None
    contents: list[str] = []
    next_start, percent = len(text), ""
    for box in reversed(boxes):
        end = _closing_brace(text, box.end())
        if not contents:
            if end is None:
                return ""
            percent = r"\%" if _PERCENT.match(text, end + 1) else ""
        elif end is None or not _is_one_list(text, end + 1, next_start):
            break
        if (content := text[box.end() : end].strip()) not in contents[-1:]:
            contents.append(content)
        next_start = box.start()
    answer = ",".join(reversed(contents)) + percent
    is_readable = contents[0] and len(answer) <= _MAX_LENGTH and _depth(answer) < _MAX_DEPTH
    return answer if is_readable else ""


def _closing_brace(text: str, start: int) -> int | None:
    """Return the position of the brace that closes the one before `start`."""
    depth = 1
    for brace in _BRACE.finditer(text, start):
        depth += {"{": 1, "}": -1}.get(brace[0], 0)
        if depth == 0:
            return brace.start()
    return None


def _is_one_list(text: str, start: int, end: int) -> bool:
    between = text[start:end]
    is_near = start <= end <= start + _MAX_BETWEEN
    return is_near and bool(_BETWEEN.fullmatch(between) or _WORDS_BETWEEN.fullmatch(between))


def _depth(text: str) -> int:
    steps = ({"{": 1, "}": -1}.get(brace, 0) for brace in _BRACE.findall(text))
    return max(accumulate(steps), default=0)
