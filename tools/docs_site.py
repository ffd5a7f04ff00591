"""Hooks for MkDocs (mkdocs.yml) that finish the HTML of each page when the site is built."""

from __future__ import annotations

import html
import re

from latex2mathml.converter import convert  # pyright: ignore[reportMissingImports]

EQUATION = re.compile(r'<(span|div) class="arithmatex">\\[(\[](.*?)\\[)\]]</\1>', re.DOTALL)
LONG_NAME_OF_A_ROW = re.compile(r"(?<=<tr>\n<td><code>)[^<]{28,}(?=</code>)")


def on_page_content(content: str, **_: object) -> str:
    """Turn equations into MathML, and let long names in the first column of a table wrap after `/`, `_` and `.`."""
    return LONG_NAME_OF_A_ROW.sub(_with_breaks, EQUATION.sub(_as_mathml, content))


def _as_mathml(equation: re.Match[str]) -> str:
    """From LaTeX, `$...$` in a line or `$$...$$` on its own, which the extension arithmatex has marked."""
    tag, latex = equation.groups()
    display = "block" if tag == "div" else "inline"
    mathml = convert(html.unescape(latex), display=display)
    # Safari draws bars as high as the whole line otherwise.
    mathml = mathml.replace("<mo>&#x0007C;</mo>", '<mo stretchy="false">&#x0007C;</mo>')
    return f'<{tag} class="equation">{mathml}</{tag}>'


def _with_breaks(name: re.Match[str]) -> str:
    return re.sub(r"(?<=[/_.])(?=\w)", "<wbr>", name.group())
