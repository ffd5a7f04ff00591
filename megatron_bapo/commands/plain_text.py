"""Text from data files and functions, made safe and short for a terminal."""

from __future__ import annotations

import unicodedata

_ESCAPED = ("Cc", "Cf", "Cs", "Zl", "Zp")
"""Unicode categories of characters that control a terminal, or that nobody sees."""
_TAIL_SHARE = 0.35
"""Part of a shortened text that is its end."""


def escaped(text: str) -> str:
    """Return the text with control and invisible characters as escape sequences; line breaks and tabs stay."""
    return "".join(
        character.encode("unicode_escape").decode()
        if character not in "\n\t" and unicodedata.category(character) in _ESCAPED
        else character
        for character in text
    )


def shortened(text: str, max_characters: int) -> str:
    """Return the text; of one that is longer than `max_characters`, the beginning and the end."""
    if len(text) <= max_characters:
        return text
    num_tail = int(_TAIL_SHARE * max_characters)
    num_left_out = len(text) - max_characters
    head, tail = text[: max_characters - num_tail], text[-num_tail:]
    return f"{head} [... {num_left_out:,} characters not shown ...] {tail}"
