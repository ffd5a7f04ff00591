import dataclasses
import math
from pathlib import Path
from typing import Literal

import pytest
import torch

from megatron_bapo.algorithm.clip_bounds import find_clip_bounds
from megatron_bapo.algorithm.importance import mismatch_sums
from megatron_bapo.algorithm.loss_tokens import LossTokens
from megatron_bapo.algorithm.policy_loss import policy_loss, policy_statistics
from megatron_bapo.config.algorithm import AlgorithmConfig, ClipBoundsSettings, DistillationConfig
from megatron_bapo.metrics.values import merge, scalars
from megatron_bapo.trainer.update_metrics import (
    DeviceMetric,
    bounds_metrics,
    length_metrics,
    loss_metrics,
    mismatch_metrics,
    read,
)
from tests.unit.trainer.test_token_reservoir import example

LOG_RATIO = [0.5, -1.0, 0.1, float("nan"), 3.0]
ADVANTAGES = [1.0, -2.0, -1.0, 1.0, 2.0]
WEIGHTS = [1.0, 1.0, 1.0, 1.0, 0.0]
LOW, HIGH = torch.tensor(0.8), torch.tensor(1.2)
BAPO, WITH_KL = AlgorithmConfig(), AlgorithmConfig(kl_loss_coef=0.1)


def of_micro_batch(
    log_ratio: list[float],
    advantages: list[float],
    weights: list[float],
    share: float = 1.0,
    correction: list[float] | None = None,
    reference: list[float] | None = None,
) -> dict[str, DeviceMetric]:
    ratio, advantage, weight = (
        torch.tensor(values, dtype=torch.float64) for values in (log_ratio, advantages, weights)
    )
    behaviour = torch.full_like(ratio, -1.0)
    current, entropy = behaviour + ratio, torch.ones_like(ratio)
    given = (None if values is None else torch.tensor(values) for values in (correction, reference))
    tokens, settings = LossTokens(behaviour, advantage, weight, *given), BAPO if reference is None else WITH_KL
    loss = policy_loss(current, entropy, tokens, LOW, HIGH, settings)
    sums = policy_statistics(current, tokens, LOW, HIGH, settings)
    return loss_metrics(loss, tokens, sums, entropy, ratio, share=share)


def metrics(log_ratio: list[float], advantages: list[float], weights: list[float]) -> dict[str, float]:
    return scalars(merge(read([of_micro_batch(log_ratio, advantages, weights)])))


def test_the_loss_of_a_minibatch_is_the_sum_over_its_micro_batches_for_any_weights() -> None:
    """Use r = 1, where the loss is -sum w A; weights of 1 / trajectories, for example, do not add up to 1."""
    parts = [of_micro_batch([0.0] * 3, [1.0, -2.0, 4.0], [0.5] * 3, 1 / 2), of_micro_batch([0.0], [1.0], [0.25], 1 / 2)]
    assert scalars(merge(read(parts)))["actor/loss"] == pytest.approx(-(0.5 * 3.0 + 0.25), rel=1e-12)
    updates = [merge(read(parts)), *read([of_micro_batch([0.0], [1.0], [2.0])])]
    assert scalars(merge(updates))["actor/loss"] == pytest.approx((-1.75 - 2.0) / 2, rel=1e-12)


def test_absent_and_dropped_tokens_affect_no_metric_except_their_count():
    found = metrics(LOG_RATIO, ADVANTAGES, WEIGHTS)

    assert found["actor/ratio_max"] == pytest.approx(math.exp(0.5))
    assert found["actor/num_dropped_tokens"] == 1
    assert (found["actor/num_positive_tokens"], found["actor/num_negative_tokens"]) == (1, 2)
    assert (found["actor/pg_clipfrac_upper"], found["actor/pg_clipfrac_lower"]) == pytest.approx((1 / 3, 1 / 3))
    positive, negative = 1.2, 2 * 0.8 + math.exp(0.1)
    assert found["actor/positive_loss_share"] == pytest.approx(positive / (positive + negative))


def test_tokens_without_a_log_prob_under_the_reference_model_are_counted_where_there_is_one() -> None:
    reference = [math.nan, -1.0, math.nan, math.nan, math.nan]
    parts = [of_micro_batch(LOG_RATIO, ADVANTAGES, WEIGHTS, 1 / 2, reference=reference)] * 2
    assert scalars(merge(read(parts)))["actor/kl_loss_dropped_tokens"] == 2 * 2
    assert "actor/kl_loss_dropped_tokens" not in metrics(LOG_RATIO, ADVANTAGES, WEIGHTS)


def test_tokens_without_a_log_prob_of_the_teacher_are_counted_and_not_in_the_mean() -> None:
    ratio, columns = torch.zeros(3, dtype=torch.float64), torch.ones(3, dtype=torch.float64)
    tokens = LossTokens(-columns, columns, columns, teacher_log_probs_T=torch.tensor([math.nan, -3.0, -2.0]))
    settings = AlgorithmConfig(distillation=DistillationConfig(teacher=Path("teacher")))
    sums = policy_statistics(-columns, tokens, LOW, HIGH, settings)
    found = scalars(merge(read([loss_metrics(ratio.sum(), tokens, sums, columns, ratio, share=1.0)])))
    assert (found["actor/teacher_dropped_tokens"], found["actor/teacher_kl"]) == (1, 1.5)
    assert "actor/teacher_dropped_tokens" not in metrics(LOG_RATIO, ADVANTAGES, WEIGHTS)


def test_the_ratio_of_a_rejected_token_is_not_the_largest():
    found = read([of_micro_batch([0.1, 5.0], [1.0, 1.0], [1.0, 1.0], correction=[1.0, 0.0])])
    assert scalars(found[0])["actor/ratio_max"] == pytest.approx(math.exp(0.1))


def test_a_micro_batch_of_padding_has_no_largest_ratio():
    assert metrics([], [], [])["actor/ratio_max"] == 0.0


@pytest.mark.parametrize("correction", [None, [2.0, 0.5, 0.0, 1.5]], ids=["plain", "corrected"])
@pytest.mark.parametrize("weights", ["token", "loss"])
def test_the_positive_share_of_the_loss_equals_the_share_of_the_bound_search(
    weights: Literal["token", "loss"], correction: list[float] | None
) -> None:
    ratio, advantages = torch.tensor([0.5, -1.0, 0.1, 2.0]), torch.tensor([1.0, -2.0, -1.0, 0.5])
    of_loss_T = torch.tensor([0.5, 0.5, 0.25, 0.25])
    corrections = None if correction is None else torch.tensor(correction)
    settings = ClipBoundsSettings(weights=weights)
    searched = torch.ones(4) if corrections is None else corrections
    searched = searched * of_loss_T if weights == "loss" else searched
    bounds = find_clip_bounds(ratio, advantages, settings, weights=searched)
    tokens = LossTokens(torch.zeros(4), advantages, of_loss_T, corrections)
    sums = policy_statistics(ratio, tokens, bounds.low, bounds.high, AlgorithmConfig(clip_bounds=settings))

    found = scalars(bounds_metrics(bounds))
    of_loss = {name: float(getattr(sums, name)) for name in ("positive_sum", "negative_sum")}
    assert of_loss["positive_sum"] == pytest.approx(found["actor/bapo_positive_sum"], rel=1e-6)
    assert of_loss["negative_sum"] == pytest.approx(found["actor/bapo_negative_sum"], rel=1e-6)


def test_a_share_of_no_tokens_does_not_count_in_the_mean_over_updates() -> None:
    """The highest lower bound clips all tokens, so that under the bounds that are found none contributes."""
    settings = ClipBoundsSettings(contribution="gradient")
    nothing, normal = (
        find_clip_bounds(torch.tensor([0.7, 0.75, 0.8]).log(), torch.tensor(advantages), settings)
        for advantages in ([-1.0, -1.0, -1.0], [2.0, 1.0, 1.0])
    )
    assert nothing.outcome != "no_signal"
    assert nothing.positive_share.isnan()
    found = scalars(merge([bounds_metrics(bounds) for bounds in (nothing, normal)]))
    assert found["actor/bapo_positive_share"] == 1.0
    assert found["actor/bapo_initial_positive_share"] == 0.5


def test_a_micro_batch_does_not_wait_for_the_values_of_its_metrics() -> None:
    """A tensor on the meta device has no values, so that whatever reads one raises."""
    with torch.device("meta"):
        found = of_micro_batch(LOG_RATIO, ADVANTAGES, WEIGHTS, correction=[1.0] * 5, reference=[-1.0] * 5)
        found |= mismatch_metrics(mismatch_sums(torch.tensor(LOG_RATIO), torch.tensor(LOG_RATIO)))
    with pytest.raises(RuntimeError, match="meta"):
        read([found])


def test_lengths_are_means_over_the_trained_trajectories_of_each_sign():
    examples = [example(3, 1.0), example(5, -2.0), example(9, -1.0), example(4, 0.0)]
    absent = dataclasses.replace(example(100, 1.0), weight=0.0)

    assert scalars(length_metrics([*examples, absent])) == {
        "response_length/negative": 7.0,
        "response_length/positive": 3.0,
    }
    assert math.isnan(scalars(length_metrics(examples[1:]))["response_length/positive"])


def test_mismatch_is_reported_as_means_over_the_tokens_that_both_sides_have():
    sums = mismatch_sums(torch.tensor([0.5, 0.2, math.nan]).log(), torch.tensor([0.25, 0.3, 0.1]).log())
    found = scalars(merge(read([mismatch_metrics(sums)])))

    assert found["training/rollout_probs_dropped_tokens"] == 1
    assert found["training/token_mult_prob_error"] == pytest.approx((2 + 3 / 2) / 2, rel=1e-6)
    assert found["training/sampling_importance_ratio"] == pytest.approx((2 + 2 / 3) / 2, rel=1e-6)
    assert found["training/gen_kl_error"] == pytest.approx((1 - math.log(2) - 1 / 3 - math.log(2 / 3)) / 2, rel=1e-6)
