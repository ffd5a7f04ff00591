"""NeMo-RL's loss and reward keys: the translated configuration computes what their documentation says."""

from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from megatron_bapo.algorithm.advantages import overlong_penalty
from megatron_bapo.algorithm.rollout_correction import rollout_correction
from megatron_bapo.commands.translate import Translation, translate
from megatron_bapo.commands.translated_text import config_text
from megatron_bapo.config.loading import load_config
from megatron_bapo.config.schema import Config

TRUNCATED = "truncated_importance_sampling"
LENGTHS = [2, 3]
RATIOS = torch.tensor([0.3, 1.5, 0.9, 6.0, 1.1])
"""Ratios of trainer to engine of two responses."""
GEOMETRIC = torch.tensor([(0.3 * 1.5) ** (1 / 2)] * 2 + [(0.9 * 6.0 * 1.1) ** (1 / 3)] * 3)
PRODUCTS = torch.tensor([0.3 * 1.5] * 2 + [0.9 * 6.0 * 1.1] * 3)


def translated(
    folder: Path, loss_fn: dict[str, Any] | None = None, grpo: dict[str, Any] | None = None
) -> tuple[Translation, Config]:
    content = {
        "grpo": {"num_prompts_per_step": 8, "num_generations_per_prompt": 8, "max_num_steps": 10} | (grpo or {}),
        "loss_fn": {"reference_policy_kl_penalty": 0.0} | (loss_fn or {}),
        "policy": {"train_global_batch_size": 64, "model_name": "models/A", "max_total_sequence_length": 3072},
        "data": {"train": {"data_path": "train.jsonl"}, "max_input_seq_length": 1024},
        "cluster": {"num_nodes": 1, "gpus_per_node": 8},
    }
    (folder / "theirs.yaml").write_text(yaml.safe_dump(content))
    result = translate(folder / "theirs.yaml")
    (folder / "ours.yaml").write_text(config_text(result))
    return result, load_config(folder / "ours.yaml")


def weights(config: Config) -> torch.Tensor:
    """Return the weights of a training on `RATIOS`."""
    settings = config.algorithm.rollout_correction
    if not settings.active:
        return torch.ones_like(RATIOS)
    return rollout_correction(RATIOS.log(), torch.zeros(5), torch.tensor(LENGTHS), settings).weights_T.float()


def reasons(result: Translation) -> dict[str, str]:
    return {each.setting: each.reason for each in result.without}


@pytest.mark.parametrize("sequence", [False, True])
@pytest.mark.parametrize("kind", [None, "tis", "icepop"])
def test_weights_are_those_of_nemo_rl(tmp_path: Path, kind: str | None, sequence: bool) -> None:
    """`tis` clamps weights, `icepop` sets those outside of the bounds to 0, and null leaves them as they are."""
    bounds = {f"{TRUNCATED}_ratio": 2.0, f"{TRUNCATED}_ratio_min": 0.5 if kind == "icepop" else None}
    loss_fn = {"use_importance_sampling_correction": True, f"{TRUNCATED}_type": kind} | (bounds if kind else {})
    levels = {"sequence_level_importance_ratios": sequence, "token_level_loss": not sequence}
    result, config = translated(tmp_path, loss_fn | levels)

    ratios = PRODUCTS if sequence else RATIOS
    is_kept = (ratios >= 0.5) & (ratios <= 2.0)
    expected = {None: ratios, "tis": ratios.clamp(max=2.0), "icepop": torch.where(is_kept, ratios, 0.0)}[kind]
    torch.testing.assert_close(weights(config), expected)
    assert config.algorithm.objective == ("gspo" if sequence else "ppo")
    assert config.algorithm.behaviour_policy == "recomputed"
    assert result.broken_rules == []
    assert any("denominators" in line for line in result.converted) == (kind == "icepop")


def test_a_sequence_mask_is_geometric_and_leaves_weights_without_a_bound(tmp_path: Path) -> None:
    loss_fn = {f"{TRUNCATED}_type": "seq-mask-tis", f"{TRUNCATED}_ratio": 2.0, f"{TRUNCATED}_ratio_min": 0.7}
    _, config = translated(tmp_path, loss_fn | {"use_importance_sampling_correction": True})
    assert GEOMETRIC.tolist() == pytest.approx([0.671, 0.671, 1.811, 1.811, 1.811], abs=1e-3)
    torch.testing.assert_close(weights(config), torch.tensor([0.0, 0.0, 0.9, 6.0, 1.1]))


@pytest.mark.parametrize(
    ("loss_fn", "setting", "reason"),
    [
        ({"type": "icepop", "ratio": 2.0, "ratio_min": 0.5}, "type=icepop", "without loss_fn.use_importance_sampling"),
        ({"type": "tis", "ratio": None, "on": True}, "type=tis", "without truncated_importance_sampling_ratio;"),
        ({"ratio": 2.0, "on": True}, "type=null", "unless truncated_importance_sampling_type is tis, icepop or"),
        (
            {"type": "icepop", "ratio": 2.0, "on": True},
            "type=icepop",
            "without truncated_importance_sampling_ratio_min",
        ),
        (
            {"type": "seq-mask-tis", "ratio": 2.0, "ratio_min": 0.5, "on": True, "sequence": True},
            "type=seq-mask-tis",
            "with sequence_level_importance_ratios",
        ),
    ],
)
def test_what_nemo_rl_refuses_is_told(tmp_path: Path, loss_fn: dict[str, Any], setting: str, reason: str) -> None:
    keys = {"on": "use_importance_sampling_correction", "sequence": "sequence_level_importance_ratios"}
    result, config = translated(tmp_path, {keys.get(key, f"{TRUNCATED}_{key}"): each for key, each in loss_fn.items()})
    assert f"NeMo-RL refuses it {reason}" in reasons(result)[f"loss_fn.{TRUNCATED}_{setting}"]
    assert config.algorithm.rollout_correction.rollout_rs is None
    assert (config.algorithm.rollout_correction.rollout_is is not None) == loss_fn.get("on", False)


def test_a_lower_bound_of_weights_is_told(tmp_path: Path) -> None:
    loss_fn = {f"{TRUNCATED}_type": "tis", f"{TRUNCATED}_ratio": 5.0, f"{TRUNCATED}_ratio_min": 0.2}
    result, config = translated(tmp_path, loss_fn | {"use_importance_sampling_correction": True})
    assert "no lower bound" in reasons(result)[f"loss_fn.{TRUNCATED}_ratio_min=0.2"]
    assert config.algorithm.rollout_correction.rollout_is_threshold == 5.0


@pytest.mark.parametrize("kind", ["k1", "k2", "k3"])
def test_a_kl_in_the_reward_keeps_its_estimator(tmp_path: Path, kind: str) -> None:
    loss_fn = {"reference_policy_kl_penalty": 0.1, "reference_policy_kl_type": kind, "use_kl_in_reward": True}
    _, config = translated(tmp_path, loss_fn, {"adv_estimator": {"name": "reinforce_plus_plus"}})
    algorithm = config.algorithm
    assert (algorithm.kl_reward_coef, algorithm.kl_reward_type, algorithm.kl_loss_coef) == (0.1, kind, 0.0)


def test_without_reinforce_plus_plus_a_kl_in_the_reward_is_nowhere(tmp_path: Path) -> None:
    loss_fn = {"reference_policy_kl_penalty": 0.1, "use_kl_in_reward": True}
    result, config = translated(tmp_path, loss_fn, {"adv_estimator": {"name": "grpo"}})
    assert not config.algorithm.needs_reference
    assert "neither to the reward nor to the loss" in reasons(result)["loss_fn.use_kl_in_reward=true"]


@pytest.mark.parametrize(
    ("estimator", "expected"),
    [
        ({"name": "grpo", "normalize_rewards": False, "use_leave_one_out_baseline": True}, ("rloo", False)),
        ({"name": "grpo", "normalize_rewards": False, "use_leave_one_out_baseline": False}, ("grpo", False)),
        ({"name": "grpo", "normalize_rewards": True, "use_leave_one_out_baseline": True}, ("grpo", True)),
        ({"name": "reinforce_plus_plus", "minus_baseline": True}, ("reinforce_plus_plus_baseline", True)),
        (
            {"use_leave_one_out_baseline": True, "minus_baseline": False, "name": "reinforce_plus_plus"},
            ("reinforce_plus_plus", True),
        ),
    ],
)
def test_the_estimator_section_takes_precedence(
    tmp_path: Path, estimator: dict[str, Any], expected: tuple[str, bool]
) -> None:
    """NeMo-RL reads `grpo.adv_estimator`, and the keys beside it only where the section refers to them."""
    older = {"normalize_rewards": True, "use_leave_one_out_baseline": True}
    _, config = translated(tmp_path, grpo=older | {"adv_estimator": estimator})
    assert (config.algorithm.adv_estimator, config.algorithm.norm_adv_by_std) == expected


@pytest.mark.parametrize("longest", [2048, 1792, 2560])
def test_the_penalty_of_every_length_is_that_of_nemo_rl(tmp_path: Path, longest: int) -> None:
    """The penalty of a length is min(-(length - (longest - buffer)) / buffer x penalty, 0)."""
    buffer, penalty = 1024, 0.5
    shaping = {"enabled": True, "overlong_buffer_length": buffer, "overlong_buffer_penalty": penalty}
    _, config = translated(tmp_path, grpo={"reward_shaping": shaping | {"max_response_length": longest}})
    assert (config.rollout.max_response_length, config.algorithm.overlong.mode) == (2048, "penalty")

    overlong, lengths = config.algorithm.overlong, [1, longest - buffer, longest - buffer + 100, 2048]
    assert overlong.buffer_length is not None
    rewards = overlong_penalty(torch.tensor([lengths]), 2048, overlong.buffer_length, overlong.penalty_factor)
    expected = [min(-(length - (longest - buffer)) / buffer * penalty, 0.0) for length in lengths]
    assert rewards[0].tolist() == pytest.approx(expected)


def test_a_penalty_that_no_response_reaches_is_told(tmp_path: Path) -> None:
    shaping = {"enabled": True, "overlong_buffer_length": 256, "overlong_buffer_penalty": 1.0}
    result, config = translated(tmp_path, grpo={"reward_shaping": shaping | {"max_response_length": 4096}})
    assert config.algorithm.overlong.mode == "keep"
    assert "no penalty below 3840" in reasons(result)["grpo.reward_shaping.enabled=true"]


@pytest.mark.parametrize(("factor", "reward"), [(0.0, 0.0), (1.0, None), (0.5, None)])
def test_the_factor_of_truncated_responses_replaces_the_penalty(
    tmp_path: Path, factor: float, reward: float | None
) -> None:
    shaping = {"enabled": True, "overlong_buffer_length": 256, "overlong_buffer_penalty": 1.0}
    shaping |= {"max_response_length": 2048, "stop_properly_penalty_coef": factor}
    result, config = translated(tmp_path, grpo={"reward_shaping": shaping})
    assert (config.reward.truncated_reward, config.algorithm.overlong.mode) == (reward, "keep")
    told = "grpo.reward_shaping.stop_properly_penalty_coef=0.5"
    assert list(reasons(result)) == ([told] if factor == 0.5 else [])


def test_filter_and_penalty_together_are_told(tmp_path: Path) -> None:
    shaping = {"enabled": True, "overlong_buffer_length": 256, "overlong_buffer_penalty": 1.0}
    grpo = {"overlong_filtering": True, "reward_shaping": shaping | {"max_response_length": 2048}}
    result, config = translated(tmp_path, grpo=grpo)
    assert config.algorithm.overlong.mode == "penalty"
    assert "either filter or penalty" in reasons(result)["grpo.overlong_filtering=true"]
