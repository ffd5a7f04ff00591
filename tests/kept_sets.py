"""Random sets of tokens that truncated sampling might have kept."""

from collections.abc import Sequence

import numpy as np
import torch

from megatron_bapo.kept_tokens import chosen_sets


def kept_sets(labels: Sequence[int], vocab_size: int) -> list[list[int]]:
    """Return for each label a set of 1 to 9 tokens with it, in any order."""
    generator, sets = np.random.default_rng(0), []
    for label in labels:
        others = generator.choice(vocab_size, generator.integers(9), replace=False)
        sets.append(generator.permutation([label, *others[others != label]]).tolist())
    return sets


def sets_in(kept_tokens: np.ndarray | None, num_tokens: int) -> list[list[int]]:
    """Return the sets of `num_tokens` sampled tokens, joined as in `kept_tokens.py`."""
    assert kept_tokens is not None
    token_ids, sizes = chosen_sets(kept_tokens, np.arange(num_tokens))
    return [each.tolist() for each in np.split(token_ids, np.cumsum(sizes))[:-1]]


def only_kept(logits_TV: torch.Tensor, sets: Sequence[Sequence[int]]) -> torch.Tensor:
    """Return the logits with those of tokens outside the sets at minus infinity, differentiable."""
    kept_TV = torch.zeros(logits_TV.shape, dtype=torch.bool)
    for row, kept in zip(kept_TV, sets, strict=True):
        row[list(kept)] = True
    return logits_TV.masked_fill(~kept_TV, -torch.inf)
