r"""The written form of a number, which tells a result from a task that is left to do.

math-verify evaluates what it reads, so the value of `12+34`, `\gcd(12,18)` or `\sum_{k=1}^{9}k` does not show that a
response only repeats its task. The text shows it. This is the grammar of a result:

    result   = sum ["%"] ["°"]
    sum      = [sign] term {sign term}                  no two terms have the same constants; none is 0 or a sum
    term     = product ["/" product]                    integers are divided only if a remainder is left
    product  = factor {["*"] factor}                    at most one rational factor; each kind of constant once
    factor   = base {"^" group | "!"}
    base     = literal | mixed number | "\frac" group group | "\sqrt" ["[" literal "]"] group | "\binom" group group
             | constant ["^" factor] | function ["_" factor] ["^" factor] factor | group
    group    = "(" sum ")" | "{" sum "}" | factor

A literal is `234.5`, `3 \times 10^5` or `101_2`, and a mixed number is `2\frac{1}{3}`. A constant is `\pi`, `e`, `i`
or `\infty`. A function is a logarithm or a trigonometric function. Roots, powers, factorials, constants and functions
may occur only if the ground truth has them too.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import chain

import sympy

from megatron_bapo.rewards.formula import LITERAL, MIXED_NUMBER, STANDARD_SET

_KINDS = {
    "root": re.compile(r"\\sqrt"),
    "logarithm": re.compile(r"\\(?:ln|log)"),
    "trigonometric": re.compile(r"\\(?:arc)?(?:sin|cos|tan|cot|sec|csc)h?"),
    "pi": re.compile(r"\\pi"),
    "e": re.compile("e"),
    "i": re.compile("i"),
    "infinity": re.compile(r"\\infty"),
    "binomial": re.compile(r"\\binom"),
    "factorial": re.compile("!"),
}

# A power with a whole exponent is a power, with another one a root.
_POWER = re.compile(r"\^ (\{ (?:[-+] )?[0-9]+ \}|[0-9]+(?: |$))?")
# An inequality and a standard set may be written as an interval without a bound.
_UNBOUNDED = re.compile(r"[<>]=?|[≤≥]|\\(?:lt|le|leq|leqslant|gt|ge|geq|geqslant)|\\mathbb\{[A-Z]\}")
_MAX_DIGITS = 1000  # Python reads whole numbers of no more than 4300 digits.


class _NotAResult(Exception):
    """Raised where the text leaves the grammar."""


def kinds_of_constants(formula: list[str]) -> set[str]:
    """Return the kinds of roots, powers, constants and functions in a formula."""
    powers = {"power" if match[1] else "root" for match in _POWER.finditer(" ".join(formula))}
    bounds = {"infinity"} if any(map(_UNBOUNDED.fullmatch, formula)) else set()
    return powers | bounds | {kind for token in formula if (kind := _kind(token))}


def is_result(formula: list[str], kinds: set[str]) -> bool:
    """Return whether the formula is the result of a computation, with no other kinds of constants than these."""
    if len(formula) == 1 and STANDARD_SET.fullmatch(formula[0]):
        return True
    try:
        _Reader(formula, kinds).result()
    except (_NotAResult, RecursionError):
        return False
    return True


def _kind(token: str | None) -> str | None:
    if token is None:
        return None
    return next((kind for kind, pattern in _KINDS.items() if pattern.fullmatch(token)), None)


@dataclass(frozen=True)
class _Part:
    """What the rules need to know of a part of a number.

    `rationals` are its rational factors, with None for those that are no integers. `constants` are the kinds and the
    texts of its other factors.
    """

    rationals: tuple[int | None, ...] = ()
    constants: tuple[tuple[str, str], ...] = ()


def _require(condition: object) -> None:
    if not condition:
        raise _NotAResult


class _Reader:
    """Reads tokens by the grammar of a result, from left to right."""

    def __init__(self, formula: list[str], kinds: set[str]) -> None:
        """Take the tokens and the kinds of constants that may occur."""
        self._formula = formula
        self._kinds = kinds
        self._position = 0

    def result(self) -> None:
        """Raise _NotAResult unless all tokens together are a result."""
        self._sum()
        is_percentage = self._accept("%")
        _require(not is_percentage or "/" not in self._formula)
        self._accept("°")
        _require(self._next() is None)

    def _next(self) -> str | None:
        return self._formula[self._position] if self._position < len(self._formula) else None

    def _accept(self, *expected: str) -> bool:
        is_next = self._next() in expected
        self._position += is_next
        return is_next

    def _sum(self) -> _Part:
        start = self._position
        self._accept("+", "-", "±")
        terms = [self._term()]
        while self._accept("+", "-", "±"):
            terms.append(self._term())
        if len(terms) == 1:
            return terms[0]
        _require(len({tuple(sorted(term.constants)) for term in terms}) == len(terms))
        _require(not any(term.rationals == (0,) or {kind for kind, _ in term.constants} == {"sum"} for term in terms))
        return _Part(constants=(("sum", self._text_from(start)),))

    def _term(self) -> _Part:
        numerator = self._product()
        return _quotient(numerator, self._product()) if self._accept("/") else numerator

    def _product(self) -> _Part:
        factors = [self._factor()]
        while self._accept("*") or self._next() not in (None, "+", "-", "±", "/", ")", "}", "]", "%", "°"):
            factors.append(self._factor())
        rationals = tuple(chain.from_iterable(factor.rationals for factor in factors))
        _require(len(rationals) <= 1)
        return _Part(rationals, _combined(factors))

    def _factor(self) -> _Part:
        start = self._position
        part = self._base()
        while (is_factorial := self._accept("!")) or self._accept("^"):
            exponent = _Part((1,)) if is_factorial else self._group()
            is_whole = not exponent.constants and exponent.rationals != (None,)
            kind = "factorial" if is_factorial else "power" if is_whole else "root"
            _require(kind in self._kinds)
            part = _Part(constants=((kind, self._text_from(start)),))
        return part

    def _base(self) -> _Part:
        token = self._next()
        if token in ("(", "{"):
            return self._group()
        self._position += 1
        if token == r"\frac":
            return _quotient(self._group(), self._group())
        kind = _kind(token)
        return self._rational(token or "") if kind is None else self._constant(kind)

    def _constant(self, kind: str) -> _Part:
        start = self._position
        _require(kind in self._kinds)
        if kind == "root":
            return self._root()
        if kind == "binomial":
            self._group()
            self._group()
        elif kind in ("logarithm", "trigonometric"):
            if self._accept("_"):
                self._factor()
            if self._accept("^"):
                self._factor()
            self._factor()
            self._accept("°")
        elif self._accept("^"):
            self._factor()
        return _Part(constants=((kind, self._text_from(start)),))

    def _root(self) -> _Part:
        start = self._position
        index = _Part((2,))
        if self._accept("["):
            index = self._product()
            _require(self._accept("]"))
        radicand = self._group()
        text = self._text_from(start)
        if (radicand.constants, index.constants) == ((), ()) and None not in radicand.rationals + index.rationals:
            root = sympy.root(radicand.rationals[0], index.rationals[0])
            _require(not root.is_rational)
            text = str(root.as_coeff_Mul()[1])  # \sqrt{12} and \sqrt{27} are alike
        return _Part(constants=(("root", text),))

    def _rational(self, token: str) -> _Part:
        mixed = re.fullmatch(MIXED_NUMBER, token)
        _require(int(mixed[1]) < int(mixed[2]) if mixed else re.fullmatch(LITERAL, token))
        return _Part((int(token) if token.isdigit() and len(token) < _MAX_DIGITS else None,))

    def _group(self) -> _Part:
        """Return the sum in brackets, or a factor without brackets."""
        closing = {"(": ")", "{": "}"}.get(self._next() or "")
        if closing is None:
            return self._factor()
        self._position += 1
        is_signed = self._next() in ("+", "-", "±")
        inner = self._sum()
        self._accept("°")
        _require(self._accept(closing))
        is_sum = any(kind == "sum" for kind, _ in inner.constants)
        _require(closing == "}" or not is_signed or is_sum)  # -(-3) is left to do
        return inner

    def _text_from(self, start: int) -> str:
        return " ".join(self._formula[start : self._position])


def _quotient(numerator: _Part, denominator: _Part) -> _Part:
    """Return the quotient, unless it divides a rational number that is no integer, or an integer without remainder."""
    if numerator.rationals and denominator.rationals:
        dividend, divisor = numerator.rationals[0], denominator.rationals[0]
        _require(dividend is not None and divisor and (divisor == 1 or dividend % divisor))
    rationals = (None,) if denominator.rationals else numerator.rationals
    return _Part(rationals, _combined([numerator, denominator]))


def _combined(parts: list[_Part]) -> tuple[tuple[str, str], ...]:
    """Return the constants of a product. Each kind may occur once, other than logarithms: their product stays one."""
    constants = tuple(chain.from_iterable(part.constants for part in parts))
    kinds = [kind for kind, _ in constants if kind != "logarithm"]
    _require(len(kinds) == len(set(kinds)))
    return constants
