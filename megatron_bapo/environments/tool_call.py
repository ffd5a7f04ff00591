"""Calls of a tool in the text of a turn: `<name>...</name>`."""

from __future__ import annotations


def last_call(text: str, name: str) -> str | None:
    """Return the content of the last call, which ends at the first closing tag; None if there is no call.

    The time is linear in the length of the text, which a lazy regular expression would not be.
    """
    opening, closing = f"<{name}>", f"</{name}>"
    call, end = None, 0
    while (start := text.find(opening, end)) >= 0:
        start += len(opening)
        stop = text.find(closing, start)
        if stop < 0:
            break
        call, end = text[start:stop], stop + len(closing)
    return call
