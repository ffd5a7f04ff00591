r"""Units behind a quantity, which a ground truth and an answer may have or leave out.

math-verify's own removal of units starts at the first \text of an answer, so that `2 \text{ hours } 45 \text{ minutes}`
is 2, and takes the single letters c, d, g, h, l, m, s and t for units, so that `2t` is 2.
"""

from __future__ import annotations

import re

_EXPONENT = r"(?:\s*\^\s*(?:-?[0-9]|\{\s*-?[0-9]\s*\}))?"
_SPACE = r"(?:\s|~|\\[,;:! ])"
# \text{ cm}^2, \text{~m/s}, \text{kg~m}^2
_IN_TEXT = rf"\\(?:text|mbox|hbox)\s*\{{(?:[^{{}}0-9\\]|\\[,;:! ]|\\circ|\^\s*-?[0-9]|\^\{{-?[0-9]\}})*\}}{_EXPONENT}"
_SHORT = (
    r"[ckmnd]m|ft|in|mi|yd|[km]g|lbs?|oz|m[lL]|hrs?|mins?|secs?|day|yrs?|mph|kph|kmh|rpm|deg|rad|sq|cu|cc|[kMG]?Hz"
    r"|[kM]W|[kMG]?eV|kJ|kPa|atm|mol|[kMG]B|[ck]?m/s|[km]m/h|mi/h|ft/s"
)
# Letters that cannot be a product of variables: `5 apples` and `5cm`, but not `5abcd` and `5 m`.
_WORD = rf"(?:(?<![A-Za-z\\])(?:{_SHORT})|(?<=[\s~/(])[A-Za-z]{{4,}})(?![A-Za-z]){_EXPONENT}"
_PART = rf"(?:{_IN_TEXT}|{_WORD})"
_TOKEN = re.compile(
    rf"(?P<part>{_PART})|(?P<space>{_SPACE})|(?P<joint>[-/.*·()]|\\(?:cdot|times|Omega|mu)(?![a-z]))|.", re.DOTALL
)
_QUANTITY = re.compile(r"[\w})\]!|'%]")
_UNIT_INSIDE = re.compile(rf"[0-9}}]{_SPACE}*{_PART}")
# Words that change the value or hedge it.
_NO_UNIT = re.compile(r"(?i)\b(?:and|or|but|not|maybe|if|unless|otherwise|squared|cubed|factorial|choose|times|mod)\b")
_STATEMENT = re.compile(r"(?i)\b(?:is|are|for|where|when|than|only|even|odd|prime)\b")


def without_unit(text: str) -> str:
    r"""Return the quantity before the unit at the end of a text, and the text itself if there is no unit.

    A unit consists of one or more \text{} or words. `and`, `or` and other words that change the value are no units.
    """
    end, start = 0, None  # of the quantity, and of the unit
    for token in _TOKEN.finditer(text):
        if token.lastgroup == "part":
            start = token.start() if start is None else start
        elif token.lastgroup is None or (token.lastgroup == "joint" and start is None):
            end, start = token.end(), None
    quantity, unit = text[:end], "" if start is None else text[start:]
    is_number = re.search(r"[0-9]|\\(?:pi|infty|sqrt)", quantity)
    has_words = re.search(r"(?<![A-Za-z\\])[A-Za-z]{2,}", quantity) or not unit.startswith("\\")
    is_formula = not has_words and not _STATEMENT.search(unit)
    is_quantity = (
        unit and _QUANTITY.fullmatch(quantity[-1:]) and (is_number or is_formula) and not _NO_UNIT.search(unit)
    )
    return quantity if is_quantity else text


def several_quantities(text: str) -> str | None:
    r"""Return the words and numbers of a text such as `2 \text{ hours } 30 \text{ minutes}`, in one spelling.

    None: the text does not have several quantities with units.
    """
    quantity = without_unit(text)
    if quantity == text or not _UNIT_INSIDE.search(quantity):
        return None
    text = re.sub(r"\\frac\s*\{([0-9]+)\}\s*\{([0-9]+)\}", r"\1/\2", text)
    words = re.sub(r"\\(?:text|mbox|hbox)(?![A-Za-z])|[{},]|\b(?:and|And)\b", " ", text)
    singular = re.sub(r"(?<=[A-Za-z]{2})s(?![A-Za-z])", "", words)
    return re.sub(rf"{_SPACE}+|\.(?![0-9])", "", singular).lower()
