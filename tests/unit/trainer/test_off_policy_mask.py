import dataclasses
import math

import pytest
import torch

from megatron_bapo.trainer.off_policy_mask import off_policy_mask, without_masked
from megatron_bapo.trainer.policy_update import loss_tokens
from megatron_bapo.trainer.worker import Worker
from tests.unit.config.examples import config
from tests.unit.trainer.test_bound_scopes import GROUPS
from tests.unit.trainer.test_token_reservoir import example, lay_out

LENGTHS = [3, 5, 4, 2]
ADVANTAGES = [-1.0, -2.0, 1.0, -0.5]
THRESHOLD = 0.3


def masked(changes: list[float], threshold: float | None = THRESHOLD, **columns: torch.Tensor) -> list[float]:
    """Return the advantage of each sequence whose log-probs changed by so much since they were sampled."""
    return [part.unique().item() for part in masked_tokens(changes, threshold, **columns).split(LENGTHS)]


def masked_tokens(changes: list[float], threshold: float | None = THRESHOLD, **columns: torch.Tensor) -> torch.Tensor:
    """Return the advantages of all tokens, as `masked` does those of sequences."""
    settings = config(algorithm__off_policy_mask_threshold=threshold)
    worker = Worker(settings, GROUPS, model=None, optimizer=None)  # pyright: ignore[reportArgumentType]
    batch = lay_out([example(*pair) for pair in zip(LENGTHS, ADVANTAGES, strict=True)])
    batch = dataclasses.replace(batch, **columns)
    change_N = torch.tensor(changes).repeat_interleave(torch.tensor(LENGTHS))
    change_N[1] += 0.2  # the mean over the sequence counts
    change_N[2] -= 0.2
    masked_N = off_policy_mask(worker, batch, batch.rollout_log_probs_N + change_N)
    assert (masked_N is None) == (threshold is None)
    return without_masked(batch, masked_N).advantages_N


def test_bad_responses_that_the_policy_has_left_lose_their_advantage_and_no_others() -> None:
    assert masked([-0.29, -0.31, -9.0, 5.0]) == [-1.0, 0.0, 1.0, -0.5]
    assert masked([-0.31, -0.29, 0.0, -0.5]) == [0.0, -2.0, 1.0, 0.0]


def test_without_a_threshold_nothing_is_masked() -> None:
    assert masked([-9.0] * 4, threshold=None) == ADVANTAGES


def test_the_engines_log_probs_count_and_not_recomputed_ones() -> None:
    ahead = torch.full((sum(LENGTHS),), 7.0)
    assert masked([-0.4, 0.0, 0.0, 0.0], behaviour_log_probs_N=ahead) == [0.0, -2.0, 1.0, -0.5]


@pytest.mark.parametrize("name", ["weights_N", "corrections_N", "rollout_log_probs_N"])
def test_unusable_tokens_do_not_count(name: str) -> None:
    """The third token has the largest change of the first sequence."""
    batch = lay_out([example(*pair) for pair in zip(LENGTHS, ADVANTAGES, strict=True)])
    values = getattr(batch, name).clone()
    values[2] = math.nan if name == "rollout_log_probs_N" else 0.0
    changes = [-0.35, -0.2, 0.0, 0.0]
    assert masked(changes)[0] == 0.0
    assert masked(changes, **{name: values})[0] == -1.0


@pytest.mark.parametrize("name", ["weights_N", "corrections_N"])
def test_tokens_that_the_loss_leaves_out_are_not_counted_as_masked(name: str) -> None:
    values = getattr(lay_out([example(*pair) for pair in zip(LENGTHS, ADVANTAGES, strict=True)]), name).clone()
    values[2] = 0.0
    assert masked_tokens([-9.0, 0.0, 0.0, 0.0], **{name: values})[:3].tolist() == [0.0, 0.0, -1.0]


def test_the_loss_knows_which_tokens_are_masked() -> None:
    settings = config(algorithm__off_policy_mask_threshold=THRESHOLD)
    worker = Worker(settings, GROUPS, model=None, optimizer=None)  # pyright: ignore[reportArgumentType]
    batch = lay_out([example(*pair) for pair in zip(LENGTHS, ADVANTAGES, strict=True)])
    tokens = loss_tokens(worker, batch, batch.rollout_log_probs_N - 2 * THRESHOLD)
    assert tokens.masked_T is not None
    assert tokens.masked_T.tolist() == (batch.advantages_N < 0).tolist()
    assert tokens.advantages_T.tolist() == batch.advantages_N.clamp(min=0).tolist()
    assert loss_tokens(worker, batch, None).masked_T is None
