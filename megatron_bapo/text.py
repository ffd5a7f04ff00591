"""Text that every encoder accepts."""

from __future__ import annotations


def without_lone_surrogates(text: str) -> str:
    """Return the text with U+FFFD for each lone surrogate, and with one character for each surrogate pair.

    JSON and Python strings may contain surrogates. UTF-8, tokenizers and Arrow refuse them.
    """
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return text
