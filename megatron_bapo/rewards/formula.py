"""The tokens of a LaTeX formula, and the elements of a set, tuple, interval, union or matrix."""

from __future__ import annotations

import re

_TIMES = r"(?:\*|×|\\times|\\cdot)"
_NUMBER = r"[0-9]+(?:\.[0-9]+)?|\.[0-9]+"
_POWER_OF_TEN = r"10\s*\^\s*(?:[0-9]+|\{\s*[-+]?[0-9]+\s*\})"
# 234.5, 3 \\times 10^5, 3E5 and 101_2
LITERAL = rf"{_POWER_OF_TEN}|(?:{_NUMBER})(?:E[-+]?[0-9]+|\s*{_TIMES}\s*{_POWER_OF_TEN}|_[0-9]+|_\{{[0-9]+\}})?"
MIXED_NUMBER = r"[0-9]{1,99}\s*\\frac\s*\{\s*([0-9]{1,99})\s*\}\s*\{\s*([0-9]{1,99})\s*\}"
_DEGREE = r"\^\s*\{?\s*(?:\\circ|\\degree|°)\s*\}?|\\degree|°"
_ENVIRONMENT = r"\\(?:begin|end)\{[A-Za-z]+\*?\}(?:\{[clr|]*\})?"
_TOKEN = re.compile(
    rf"{MIXED_NUMBER}|{LITERAL}|{_DEGREE}|{_ENVIRONMENT}|\\mathbb\{{[A-Z]\}}|[<>!=]=|\\[A-Za-z]+|\\.|\S"
)
_SPACE = re.compile(r"\s+|~|\\[,;:! ]|\\(?:q?quad|displaystyle|left|right)(?![A-Za-z])")
_NUMBER_IN_TEXT = re.compile(r"\\text\s*\{([-.,0-9\s]+|\s*[ei]\s*)\}")
_SPELLINGS = {
    "*": (r"\times", r"\cdot", "×", "⋅"),
    "/": (r"\over", ":"),
    "-": ("−",),
    "±": (r"\pm",),
    "%": (r"\%",),
    "(": (r"\(",),
    ")": (r"\)",),
    "[": (r"\lbrack",),
    "]": (r"\rbrack",),
    r"\{": (r"\lbrace",),
    r"\}": (r"\rbrace",),
    r"\pi": ("π",),
    r"\infty": ("∞",),
    r"\cup": ("∪",),
    r"\in": ("∈",),
    r"\equiv": ("≡",),
    r"\approx": ("≈",),
}
_SPELLING_OF = {variant: spelling for spelling, variants in _SPELLINGS.items() for variant in variants}

_SEPARATORS = {",", ";", "&", r"\\", r"\cup", r"\approx", "<", ">", "≤", "≥", "≠", "<=", ">=", "!="}
_SEPARATORS |= {rf"\{name}" for name in ("lt", "le", "leq", "leqslant", "gt", "ge", "geq", "geqslant", "ne", "neq")}
_EQUALITIES = {"=", "==", r"\in", r"\equiv"}
_OPERATORS = {"+", "-", "*", "/", "^", r"\frac", r"\sqrt"}
_NAME_MARKS = {"_", "{", "}", "(", ")", r"\text", r"\angle"}
STANDARD_SET = re.compile(r"\\mathbb\{[A-Z]\}|\\emptyset|\\varnothing|∅")
_GREEK = re.compile(
    r"\\(?:var)?(?i:alpha|beta|gamma|delta|epsilon|zeta|eta|theta|iota|kappa|lambda|mu|nu|xi|rho|sigma|tau|upsilon|phi"
    r"|chi|psi|omega)"
)


def tokens(text: str) -> list[str]:
    """Return the tokens of a formula without spaces, with one spelling for each operator and constant."""
    # math-verify joins the texts of several formulas by " and ".
    text = _NUMBER_IN_TEXT.sub(lambda match: re.sub(r"\s", "", match[1]), text).replace(" and ", " , ")
    found, position = [], 0
    while position < len(text):
        space = _SPACE.match(text, position)
        token = space or _TOKEN.match(text, position)
        assert token, f"no token matches {text[position]!r}"
        position = token.end()
        if not space:
            found.append("°" if re.fullmatch(_DEGREE, token[0]) else _SPELLING_OF.get(token[0], token[0]))
    return found


def has_variable(formula: list[str]) -> bool:
    """Return whether a token is a letter other than the constants e and i."""
    return any((token.isalpha() and token not in ("e", "i")) or _GREEK.fullmatch(token) for token in formula)


def elements(formula: list[str], keep_relations: bool = False) -> list[list[str]]:
    """Return the elements of a list, set, tuple, interval, union, matrix or chain of inequalities, else the formula.

    An equation counts as its last side. With `keep_relations` one between expressions, as that of a circle, is kept.
    """
    name, *approximations = _split(formula, {r"\approx"})
    if approximations and _is_name(name):
        formula = formula[len(name) + 1 :]
    parts = [part for part in _split(formula, _SEPARATORS) if part]
    if len(parts) > 1:
        return [element for part in parts for element in elements(part, keep_relations)]
    sides = _split(formula, _EQUALITIES)
    if keep_relations and len(sides) > 1 and has_variable(sides[0]) and not _OPERATORS.isdisjoint(sides[0]):
        return [formula]
    matrix = next((position for position, token in enumerate(formula) if token.startswith(r"\begin{")), 0)
    if len(sides) == 1 and matrix and r"\frac" in formula[:2]:
        return [formula[:matrix], *elements(formula[matrix:])]
    inner = sides[-1] if len(sides) > 1 else _inner(formula)
    return [formula] if inner is None else elements(inner, keep_relations)


def _is_name(formula: list[str]) -> bool:
    r"""Return whether the tokens are a name, such as `x_1` or `\angle ABC`."""
    is_word = all(token.isalnum() or token in _NAME_MARKS for token in formula)
    return is_word and not "".join(formula[:1]).isdigit()


def _split(formula: list[str], separators: set[str]) -> list[list[str]]:
    """Split the tokens at those separators that stand outside all brackets."""
    parts, depth = [[]], 0
    for token in formula:
        depth += _nesting(token)
        if token in separators and depth == 0:
            parts.append([])
        else:
            parts[-1].append(token)
    return parts


def _inner(formula: list[str]) -> list[str] | None:
    """Return the tokens between a bracket at the start and its counterpart at the end, or what is taken from a set."""
    if len(formula) > 2 and STANDARD_SET.fullmatch(formula[0]) and formula[1] in (r"\setminus", r"\backslash"):
        return formula[2:]
    depth = 0
    for position, token in enumerate(formula):
        depth += _nesting(token)
        if depth == 0:
            is_enclosed = 0 < position == len(formula) - 1 and "vmatrix" not in formula[0]
            return formula[1:-1] if is_enclosed else None
    return None


def _nesting(token: str) -> int:
    if token in ("(", "[", "{", r"\{") or token.startswith(r"\begin{"):
        return 1
    return -(token in (")", "]", "}", r"\}") or token.startswith(r"\end{"))
