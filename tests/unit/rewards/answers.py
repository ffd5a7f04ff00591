"""Tables of a ground truth and an answer, and the score of a boxed answer."""

from megatron_bapo.rewards.math_answer import compute_score


def pairs(table: str) -> list[tuple[str, ...]]:
    """Return (ground truth, answer) of each line `ground truth | answer`."""
    return [tuple(line.split(" | ")) for line in table.strip().splitlines()]


def score(answer: str, ground_truth: str) -> float:
    return compute_score("math", rf"The answer is $\boxed{{{answer}}}$.", ground_truth)["score"]
