r"""Written answers whose letters are no variables: multiple-choice labels, geometric names, bases and percentages.

math-verify reads letters in a row as a product, so that `\angle BCA` equals `\angle CAB`, and `\textbf{(D)}\ 5` is five
times d. It ignores bases, and tells `12.5\%` from `12.5` but not `12\%` from `12`.
"""

from __future__ import annotations

import re
from fractions import Fraction

_FONT = r"\\(?:text|mbox|mathrm|mathbf|mathsf|mathit)\s*\{\s*"
_SPACES = r"(?:\\[ ,;:!]|~|\s|\\q?quad(?![A-Za-z]))"
# (D), \text{(D)}, \text{D} and D.
_LETTER = re.compile(rf"(?:{_FONT})?\(?({_FONT})?([A-J])\}}?[).:]?\s*\}}?\.?")
_LABELS = [
    re.compile(rf"{_FONT}(?:\(([A-J])\)|([A-J])[).:])\s*\}}{_SPACES}*(?P<content>.+)"),  # \text{(D)} 5
    re.compile(rf"{_FONT}(?:\(([A-J])\)|([A-J])[).:])\s*(?P<content>[^{{}}]+)\}}"),  # \text{(D) 5}
    re.compile(rf"(?:\(([A-J])\)|([A-J])[).:]){_SPACES}+(?P<content>.+)"),  # (D) 5
]
# Behind a label: `(E)`, `E. 6`, `or E` or only `E`, but neither the article in `A cell` nor the numeral in `I and III`.
_SECOND_LETTER = re.compile(
    r"\([A-J]\)|(?<![A-Za-z\\])[A-J][.:)]\s*\S|(?:[,;/&]|\b(?:or|and))\s*[A-HJ](?![A-Za-z])|^\s*[A-J]\W*$"
)
_NAME = re.compile(rf"(\\(?:angle|triangle|overline)\s*)?(?:{_FONT}|\{{)?([A-Z](?:[,\s]*[A-Z])+)\s*\}}?")
_BASE = re.compile(r"[0-9A-Z]+\s*_\s*\{?\s*([0-9]{1,99})\s*\}?")
_RATIO = re.compile(r"[0-9]{1,99}(?:\.[0-9]{1,99})?(?:\s*:\s*[0-9]{1,99}(?:\.[0-9]{1,99})?){2,}")
_GROUPS_OF_DIGITS = re.compile(r"[0-9]{1,3}(?:,[0-9]{3})+")
_SPACED_LIST = re.compile(r"[0-9]+(?:,\s+[0-9]+)+")
_PERCENT = re.compile(r"\s*\\?%\s*$")


def split_choice(text: str) -> tuple[str | None, str]:
    r"""Return the letter and the content of a multiple-choice answer.

    The content of a letter alone is empty. The letter of any other text, and of several letters, is None.
    """
    if letter := _LETTER.fullmatch(text.strip()):
        return letter[2], ""
    for label in _LABELS:
        if (match := label.fullmatch(text.strip())) and not _SECOND_LETTER.search(match["content"]):
            return match[1] or match[2], match["content"]
    return None, text


def is_same_name(gold: str, answer: str) -> bool | None:
    r"""Return whether two names of capital letters are the same, and None if one of the texts is no name.

    Angles and segments may be read backwards, and the letters of triangles and of lists such as `A, C` in any order. A
    name without such a sign must be spelled alike.
    """
    expected, found = _NAME.fullmatch(gold.strip()), _NAME.fullmatch(answer.strip())
    if not expected or not found:
        return None
    figure, other_figure = (expected[1] or "").strip(), (found[1] or "").strip()
    letters, other = re.sub("[^A-Z]", "", expected[2]), re.sub("[^A-Z]", "", found[2])
    if other_figure not in ("", figure):
        return False
    if figure == r"\triangle" or "," in expected[2]:
        return sorted(letters) == sorted(other)
    return other == letters or (figure != "" and other == letters[::-1])


def has_other_base(gold: str, answer: str) -> bool:
    """Return whether both texts are numbers with bases, and the bases differ."""
    expected, found = _BASE.fullmatch(gold.strip()), _BASE.fullmatch(answer.strip())
    return expected is not None and found is not None and int(expected[1]) != int(found[1])


def is_same_ratio(gold: str, answer: str) -> bool | None:
    """Return whether a ratio of three or more numbers is proportional to the answer; None if the gold text is none."""
    if not _RATIO.fullmatch(gold.strip()):
        return None
    if not _RATIO.fullmatch(answer.strip()):
        return False
    parts, others = ([Fraction(part.strip()) for part in text.split(":")] for text in (gold, answer))
    return len(parts) == len(others) and all(
        part * sum(others) == other * sum(parts) for part, other in zip(parts, others, strict=True)
    )


def like_lists(gold: str, answer: str) -> tuple[str, str] | None:
    """Return both texts as lists if one is `101, 102` and the other `101,102`, which alone is the number 101102."""
    for spaced, grouped in ((gold, answer), (answer, gold)):
        if _SPACED_LIST.fullmatch(spaced) and _GROUPS_OF_DIGITS.fullmatch(grouped):
            return gold.replace(",", ", "), answer.replace(",", ", ")
    return None


def without_percent(text: str) -> str | None:
    """Return the text without the percent sign at its end, and None if there is none."""
    return _PERCENT.sub("", text) if _PERCENT.search(text) else None


def repeating_decimal(match: re.Match[str]) -> str:
    r"""Return the fraction of a repeating decimal, matched as its whole, fixed and repeating digits."""
    whole, fixed, repeating = match.groups()
    numerator = int(f"0{whole}{fixed}{repeating}") - int(f"0{whole}{fixed}")
    value = Fraction(numerator, 10 ** len(fixed + repeating) - 10 ** len(fixed))
    return str(value) if value.denominator == 1 else rf"\frac{{{value.numerator}}}{{{value.denominator}}}"
