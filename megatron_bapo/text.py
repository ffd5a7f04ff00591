"""Text that every encoder accepts, and text that is safe to show."""

from __future__ import annotations

import re
from typing import Final

_INVISIBLE: Final = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200b\u200e\u200f\u2028-\u202e\u2060-\u2069\ufeff]")
"""Control characters except tabs and line ends, marks that change the direction of text, and invisible spaces."""
_CREDENTIALS: Final = re.compile(r"(://)[^\s/]*(?=@)|([?&]\w*(?:password|token|secret|key)=)[^&\s]*", re.IGNORECASE)


def without_lone_surrogates(text: str) -> str:
    """Return the text with U+FFFD for each lone surrogate, and with one character for each surrogate pair.

    JSON and Python strings may contain surrogates. UTF-8, tokenizers and Arrow refuse them.
    """
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return text


def visible(text: str, limit: int) -> str:
    """Return at most `limit` characters of the text, its beginning and its end, for a page of another program.

    Invisible characters, which can hide or reorder what is shown, are written as escapes such as \\u202e. A note in the
    middle gives the number of characters of the whole text.
    """
    text = _INVISIBLE.sub(lambda found: f"\\u{ord(found[0]):04x}", without_lone_surrogates(text))
    if len(text) <= limit:
        return text
    note = f" [... {len(text)} characters in all ...] "
    kept = limit - len(note)
    return text[: kept - kept // 2] + note + text[-(kept // 2) :]


def without_credentials(text: str) -> str:
    """Return the text with *** for the user and the passwords of each URL."""
    return _CREDENTIALS.sub(lambda found: f"{found[1] or found[2]}***", text)
