"""The text of each token of a response."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tokenizers import Tokenizer

from megatron_bapo.errors import UserError

_MAX_JOINED = 8
"""Tokens that may share one character; a character of UTF-8 has at most four bytes."""


class TokenTexts:
    """Decodes token by token, special tokens included."""

    def __init__(self, tokenizer: Path) -> None:
        """`tokenizer` is a `tokenizer.json`; without it tokens are shown as their numbers.

        Raises UserError if the file is damaged.
        """
        self._tokenizer = _read(tokenizer) if tokenizer.is_file() else None
        self._known: dict[int, str] = {}
        self._anchor: list[int] = []
        self._skipped = 0
        if self._tokenizer is not None:
            # Decoders drop a space at the start of a text, so tokens are decoded after this one.
            self._anchor = self._tokenizer.encode("a", add_special_tokens=False).ids
            self._skipped = len(self._joined([]))

    def texts(self, token_ids: Sequence[int]) -> list[str]:
        """Return the text of each token. If several tokens make up one character, the first has it, the others ""."""
        if self._tokenizer is None:
            return [f"⟨{token_id}⟩" for token_id in token_ids]
        new = list(set(token_ids) - self._known.keys())
        decoded = self._tokenizer.decode_batch([[*self._anchor, each] for each in new], skip_special_tokens=False)
        self._known.update(zip(new, (text[self._skipped :] for text in decoded), strict=True))
        texts = [self._known[each] for each in token_ids]
        position = 0
        while position < len(texts):
            position += self._join(token_ids, texts, position) if "\ufffd" in texts[position] else 1
        return texts

    def _join(self, token_ids: Sequence[int], texts: list[str], start: int) -> int:
        """Give the token at `start` the character that it shares with the next ones; return how many share it."""
        for end in range(start + 2, min(start + _MAX_JOINED, len(texts)) + 1):
            joined = self._joined(token_ids[start:end])
            if "\ufffd" not in joined:
                texts[start:end] = [joined, *[""] * (end - start - 1)]
                return end - start
        return 1

    def _joined(self, token_ids: Sequence[int]) -> str:
        assert self._tokenizer is not None
        return self._tokenizer.decode([*self._anchor, *token_ids], skip_special_tokens=False)[self._skipped :]


def _read(path: Path) -> Tokenizer:
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # tokenizers raises a plain Exception
        raise UserError(
            f"{path} is not a tokenizer ({error}); copy it again, or delete it to show tokens as their numbers"
        ) from None
