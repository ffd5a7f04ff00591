import dataclasses
import itertools
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron_bapo.config.algorithm import LossAggMode
from megatron_bapo.metrics.values import scalars
from megatron_bapo.parallel.groups import ParallelGroups
from megatron_bapo.records import Trajectory
from megatron_bapo.trainer.micro_batches import Example
from megatron_bapo.trainer.rollout_batch import make_examples, minibatch, minibatches, packed_together
from megatron_bapo.trainer.worker import create_reference
from tests.unit.config.examples import config
from tests.unit.controller.test_training_loop import make_config, start
from tests.unit.trainer.test_token_reservoir import example

MODES: tuple[LossAggMode, ...] = ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")

IN_TWOS = {"trainer__ppo_mini_batch_size": 2}


def truncated(length: int) -> Example:
    whole = example(length, 1.0)
    return dataclasses.replace(whole, trajectory=dataclasses.replace(whole.trajectory, finish_reason="length"))


def corrected(length: int, kept: int) -> Example:
    """Create an example with an importance weight of 2 for its first `kept` tokens; the others are rejected."""
    return dataclasses.replace(example(length, 1.0), correction_weights=np.where(np.arange(length) < kept, 2.0, 0.0))


def found(examples: list[Example], mode: LossAggMode, **algorithm: Any) -> list[Example]:
    return minibatch(config(algorithm={"loss_agg_mode": mode, **algorithm}), examples)


@pytest.mark.parametrize("mode", MODES)
def test_a_minibatch_without_tokens_to_train_on_is_empty(mode: LossAggMode) -> None:
    assert found([], mode) == []
    assert found([corrected(3, kept=0), corrected(5, kept=0)], mode) == []


def test_rejected_tokens_are_excluded_from_the_loss_normalization_as_in_verl() -> None:
    """Divide sums over accepted tokens by their number; sequences without accepted tokens still count."""
    examples = [corrected(4, kept=1), corrected(6, kept=3), corrected(5, kept=0), example(2, 1.0)]
    weights = {mode: [e.weight for e in found(examples, mode)] for mode in MODES}
    assert weights["token-mean"] == pytest.approx([1 / 6] * 4)
    assert weights["seq-mean-token-mean"][:2] == pytest.approx([1 / (4 * 1), 1 / (4 * 3)])
    assert weights["seq-mean-token-mean"][3] == pytest.approx(1 / (4 * 2))
    assert np.isfinite(weights["seq-mean-token-mean"][2])
    assert weights["seq-mean-token-sum"] == pytest.approx([1 / 4] * 4)
    assert weights["seq-mean-token-sum-norm"] == pytest.approx([1 / (4 * 100)] * 4)


def token_advantages(e: Example) -> np.ndarray:
    return np.broadcast_to(e.advantage, e.trajectory.num_sampled)


def with_random_advantages(e: Example, rng: np.random.Generator) -> Example:
    """Return the example with advantages of its tokens and with their sums."""
    advantages = rng.normal(-0.5, 1.0, e.trajectory.num_sampled)
    gains = advantages if e.correction_weights is None else advantages * e.correction_weights
    sums = float(gains[gains > 0].sum()), -float(gains[gains < 0].sum())
    return dataclasses.replace(e, advantage=advantages, token_advantage_sums=sums)


def positive_share(examples: list[Example]) -> float:
    """Return P / (P + N), with P and N summed token by token, as the loss has them at ratio 1."""
    sums = {True: 0.0, False: 0.0}
    for e in examples:
        for t, advantage in enumerate(token_advantages(e)):
            correction = 1.0 if e.correction_weights is None else e.correction_weights[t]
            sums[advantage > 0] += e.weight * correction * abs(advantage)
    return sums[True] / (sums[True] + sums[False])


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("by_token", [False, True])
def test_positive_advantages_get_their_minimum_share_of_the_loss_by_one_factor(
    mode: LossAggMode, by_token: bool
) -> None:
    examples = [example(3, 1.5), example(2, 0.5), example(9, -1.0), example(4, 0.0), example(30, -2.0)]
    examples[2] = dataclasses.replace(examples[2], correction_weights=np.where(np.arange(9) < 5, 2.0, 0.0))
    if by_token:
        rng = np.random.default_rng(0)
        examples = [with_random_advantages(e, rng) for e in examples]
    without = found(examples, mode)
    assert positive_share(without) < 0.45

    scaled = found(examples, mode, min_positive_loss_share=0.45)

    assert positive_share(scaled) == pytest.approx(0.45)
    ratios = np.concatenate(
        [token_advantages(b) / token_advantages(a) for a, b in zip(without, scaled, strict=True) if np.any(a.advantage)]
    )
    is_positive = np.concatenate([token_advantages(a) for a in without if np.any(a.advantage)]) > 0
    assert np.ptp(ratios[is_positive]) < 1e-9
    assert set(ratios[~is_positive]) == {1.0}
    assert [e.weight for e in scaled] == [e.weight for e in without]


@pytest.mark.parametrize(
    "advantages",
    [(1.0, -1.0), (1.0, 1.0), (-1.0, -1.0), (0.0, 0.0)],
    ids=["share reached", "no negative tokens", "no positive tokens", "no signal"],
)
def test_advantages_do_not_change_where_no_factor_above_1_gives_the_share(advantages: tuple[float, float]) -> None:
    examples = [example(4, advantages[0]), example(4, advantages[1])]
    assert [e.advantage for e in found(examples, "token-mean", min_positive_loss_share=0.4)] == [*advantages]


def test_truncated_responses_are_excluded_from_the_updates_if_they_are_filtered() -> None:
    trajectories = [example(3, 1.0).trajectory, truncated(4).trajectory, truncated(5).trajectory]
    filtering = config(algorithm={"overlong": {"mode": "filter"}}, **IN_TWOS)
    assert minibatches(filtering, trajectories, step=0) == [[0], []]
    assert minibatches(config(**IN_TWOS), trajectories, step=0) == [[0, 1], [2]]


def test_each_later_pass_shuffles_the_trajectories() -> None:
    updates = minibatches(config(**IN_TWOS, trainer__ppo_epochs=3), [example(3, 1.0).trajectory] * 8, step=5)
    first, second, third = updates[:4], updates[4:8], updates[8:]
    assert first == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert first != second != third != first
    assert all(sorted(itertools.chain(*each)) == [*range(8)] for each in (second, third))


@pytest.mark.parametrize("algorithm", [{"behaviour_policy": "recomputed"}, {"kl_loss_coef": 0.1}])
def test_all_trajectories_are_packed_together_where_log_probs_are_computed_before_the_updates(
    algorithm: dict[str, Any],
) -> None:
    trajectories = [example(3, 1.0).trajectory] * 4
    assert packed_together(config(**IN_TWOS), trajectories, step=0) == [[0, 1], [2, 3]]
    scored = config(**IN_TWOS, algorithm=algorithm)
    assert packed_together(scored, trajectories, step=0) == [[0, 1], [2, 3], [0, 1, 2, 3]]


@pytest.mark.parametrize("mode", MODES)
def test_examples_with_advantage_0_are_left_out_and_keep_the_weights_of_the_others(mode: LossAggMode) -> None:
    examples = [example(4, 0.0), example(9, 1.5), example(3, 0.0), example(5, -0.5)]
    skips = config(algorithm={"loss_agg_mode": mode}, trainer__skip_zero_advantage=True)
    all_of_them = found(examples, mode)
    assert minibatch(skips, examples) == [all_of_them[1], all_of_them[3]]
    without_signal = [dataclasses.replace(each, advantage=0.0) for each in examples]
    assert minibatch(skips, without_signal) == [found(without_signal, mode)[2]]
    assert minibatch(skips, []) == []


def test_the_ranks_get_the_trajectories_that_the_minibatches_keep() -> None:
    """Advantages include the penalty of long responses, here of the last one."""
    lengths, rewards = (3, 4, 5, 6, 7, 95), (0.3, 0.3, 1.0, 0.0, 0.5, 0.5)
    trajectories = [
        dataclasses.replace(example(length, 0.0).trajectory, reward=reward)
        for length, reward in zip(lengths, rewards, strict=True)
    ]
    skips = {"rollout__n": 2, "trainer__skip_zero_advantage": True, **IN_TWOS}
    assert packed_together(config(**skips), trajectories, step=0) == [[0], [2, 3], [4]]
    penalty = {"overlong": {"mode": "penalty", "buffer_length": 20}}
    assert packed_together(config(**skips, algorithm=penalty), trajectories, step=0) == [[0], [2, 3], [4, 5]]


def prepared(
    folder: Path, groups: ParallelGroups, log_prob: float, algorithm: dict[str, Any]
) -> tuple[list[Example], dict[str, float]]:
    """Return examples of two groups of two responses of three tokens, and metrics.

    Every token has log-prob -5.0 in the engine, but the second token of the first response, which has `log_prob`.
    """
    run = start(make_config(folder, algorithm=algorithm), groups, {}, [0, 1, 2])
    assert run.rollouts is not None
    trajectories: list[Trajectory] = [t for group in run.rollouts.take()[0].groups for t in group.trajectories]
    trajectories[0].behaviour_log_probs[1] = log_prob
    reference = None
    if run.config.algorithm.needs_reference:
        reference = create_reference(run.config, run.config.model_path, groups)
    examples, metrics = make_examples(run.worker, reference, trajectories)
    return examples, scalars(metrics)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("unusable", [math.nan, -math.inf])
@pytest.mark.parametrize("estimator", ["grpo", "rloo", "reinforce_plus_plus", "reinforce_plus_plus_baseline"])
def test_one_unusable_log_prob_of_an_engine_is_left_out_of_the_kl_in_the_reward(
    tmp_path: Path, groups: ParallelGroups, estimator: str, unusable: float
) -> None:
    algorithm = {"adv_estimator": estimator, "kl_reward_coef": 0.1}
    examples, metrics = prepared(tmp_path, groups, unusable, algorithm)
    assert all(np.isfinite(e.advantage).all() for e in examples)
    kl, dropped = metrics["actor/reward_kl_penalty"], metrics["actor/reward_kl_dropped_tokens"]
    assert math.isfinite(kl)
    assert abs(kl) < 2.0
    assert dropped == 1.0


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("estimator", ["reinforce_plus_plus", "reinforce_plus_plus_baseline"])
def test_whitening_leaves_out_tokens_that_rollout_correction_rejects(
    tmp_path: Path, groups: ParallelGroups, estimator: str
) -> None:
    correction = {"rollout_rs": "token", "rollout_rs_threshold": 1e4}
    algorithm = {"adv_estimator": estimator, "behaviour_policy": "recomputed", "rollout_correction": correction}
    examples, _ = prepared(tmp_path, groups, -18.0, algorithm)
    counts = [int(np.count_nonzero(e.correction_weights)) for e in examples]
    assert counts == [e.num_trained_tokens for e in examples] == [e.num_corrected_tokens for e in examples]
    assert counts == [2, 3, 3, 3]
    advantages = np.repeat([e.advantage for e in examples], counts)
    assert advantages.mean() == pytest.approx(0.0, abs=1e-9)
    assert advantages.std(ddof=1) == pytest.approx(1.0, abs=1e-6)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("estimator", ["reinforce_plus_plus", "reinforce_plus_plus_baseline"])
def test_only_penalties_of_tokens_give_the_tokens_of_a_trajectory_advantages_of_their_own(
    tmp_path: Path, groups: ParallelGroups, estimator: str
) -> None:
    plain, _ = prepared(tmp_path / "plain", groups, -5.0, {"adv_estimator": estimator})
    assert [np.shape(e.advantage) for e in plain] == [()] * 4
    penalized, _ = prepared(tmp_path / "kl", groups, -5.0, {"adv_estimator": estimator, "kl_reward_coef": 0.1})
    shape = (3,) if estimator == "reinforce_plus_plus" else ()
    assert [np.shape(e.advantage) for e in penalized] == [shape] * 4
