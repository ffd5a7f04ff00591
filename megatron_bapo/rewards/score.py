"""What a reward function makes of an answer."""

from __future__ import annotations


class Score(float):
    """A number that may say what it was given for: the answer as the function read it, in one form for one meaning."""

    answer: str | None

    def __new__(cls, value: float, answer: str | None = None) -> Score:
        score = super().__new__(cls, value)
        score.answer = answer
        return score

    def __getnewargs__(self) -> tuple[float, str | None]:
        return float(self), self.answer
