import json
from pathlib import Path
from typing import Any

import pytest

from megatron_bapo.config.checks import check_config, check_planned, resume_conflicts
from megatron_bapo.config.model import CreateModelConfig
from megatron_bapo.config.model_checks import created_architecture
from megatron_bapo.config.schema import Config
from megatron_bapo.errors import UserError
from tests.unit.config.examples import config, problems
from tests.unit.config.test_model_checks import EXPERTS, hf_folder

WIDE_VOCABULARY = {"vocab_size": 512}


def distilled(teacher: Path, **values: Any) -> Config:
    """Return a configuration of pure distillation from a teacher into the created model, which has 320 tokens."""
    return config(algorithm={"objective": "distill", "distillation": {"teacher": teacher}}, **values)


def test_a_teacher_of_another_size_and_family_passes_in_every_kind_of_parallelism(tmp_path: Path) -> None:
    teacher = hf_folder(tmp_path / "teacher", **EXPERTS, num_hidden_layers=9, vocab_size=512)
    sizes = {
        "tensor_model_parallel_size": 2,
        "sequence_parallel": True,
        "pipeline_model_parallel_size": 2,
        "pipeline_model_parallel_layout": (3, 1),
        "context_parallel_size": 2,
    }
    assert check_config(distilled(teacher, parallel={"world_size": 8, **sizes})) == []


def test_distillation_needs_neither_a_group_nor_a_reward(tmp_path: Path) -> None:
    teacher = hf_folder(tmp_path / "teacher", **WIDE_VOCABULARY)
    assert check_config(distilled(teacher, rollout__n=1, reward={"type": "none"})) == []


def test_a_teacher_beside_bapo_passes(tmp_path: Path) -> None:
    teacher = hf_folder(tmp_path / "teacher", **WIDE_VOCABULARY)
    assert check_config(config(algorithm={"distillation": {"teacher": teacher, "coef": 0.1}})) == []


@pytest.mark.parametrize(
    ("values", "value", "rule", "way_out"),
    [
        (
            {"algorithm": {"objective": "distill"}},
            "algorithm.objective=distill",
            "needs a teacher",
            "set algorithm.distillation.teacher",
        ),
        (
            {"algorithm": {"objective": "distill", "distillation": {"teacher": "Qwen/Qwen3-8B"}}},
            "algorithm.distillation.teacher=Qwen/Qwen3-8B",
            "must be an existing folder of a Hugging Face checkpoint",
            "set algorithm.distillation.teacher=models/Qwen3-8B",
        ),
        ({"reward": {"type": "none"}}, "reward.type=none", "learns from rewards", "set another reward"),
    ],
    ids=str,
)
def test_what_is_missing_is_named(values: dict[str, Any], value: str, rule: str, way_out: str) -> None:
    (found,) = problems(config(**values))
    assert all(part in found for part in (value, rule, way_out)), found


@pytest.mark.parametrize(
    ("algorithm", "values", "named"),
    [
        ({"kl_reward_coef": 0.1}, {}, "algorithm.kl_reward_coef=0.1"),
        ({"clip_ratio_c": 3.0}, {}, "algorithm.clip_ratio_c=3.0"),
        ({"overlong": {"mode": "penalty", "buffer_length": 8}}, {}, "algorithm.overlong.mode=penalty"),
        ({}, {"rollout__filter_groups": {"enable": True}}, "rollout.filter_groups.enable=true"),
        ({}, {"logging": {"entropy_clip_rule": True}}, "logging.entropy_clip_rule=true"),
    ],
    ids=str,
)
def test_settings_of_rewards_advantages_are_refused_without_them(
    tmp_path: Path, algorithm: dict[str, Any], values: dict[str, Any], named: str
) -> None:
    teacher = hf_folder(tmp_path / "teacher", **WIDE_VOCABULARY)
    whole = {"objective": "distill", "distillation": {"teacher": teacher}} | algorithm
    (found,) = problems(config(algorithm=whole, **values))
    assert found.strip().startswith(named)
    assert "remove it, or set another objective beside algorithm.distillation" in found


@pytest.mark.parametrize(
    ("fields", "layout", "expected"),
    [
        ({"vocab_size": 319}, {}, "vocab_size=319 of algorithm.distillation.teacher must be at least the policy's 320"),
        (
            {"num_hidden_layers": 1},
            {"world_size": 2, "pipeline_model_parallel_size": 2},
            "num_hidden_layers=1 must be at least",
        ),
        (
            {"num_attention_heads": 3, "num_key_value_heads": 1},
            {"world_size": 2, "tensor_model_parallel_size": 2},
            "num_attention_heads=3 must be a multiple of parallel.tensor_model_parallel_size=2",
        ),
        ({"max_position_embeddings": 150}, {}, "must not exceed the model's max_position_embeddings=150"),
        ({"model_type": "gpt2"}, {}, "model_type is 'gpt2', which the trainer does not support"),
    ],
    ids=str,
)
def test_a_teacher_that_cannot_score_the_policys_samples_is_refused(
    tmp_path: Path, fields: dict[str, Any], layout: dict[str, Any], expected: str
) -> None:
    teacher = hf_folder(tmp_path / "teacher", **WIDE_VOCABULARY | fields)
    (found,) = problems(distilled(teacher, parallel={"world_size": 1} | layout))
    assert str(teacher / "config.json") in found
    assert expected in found


@pytest.mark.parametrize(
    ("absent", "named"),
    [("config.json", "config.json"), ("model.safetensors", "*.safetensors"), ("tokenizer.json", "tokenizer")],
)
def test_an_incomplete_teacher_names_what_is_missing(tmp_path: Path, absent: str, named: str) -> None:
    teacher = hf_folder(tmp_path / "teacher", absent=(absent,), **WIDE_VOCABULARY)
    (found,) = problems(distilled(teacher))
    assert f"algorithm.distillation.teacher={teacher} has no {named}" in found


def test_a_planned_runs_teacher_is_checked_by_its_shape(tmp_path: Path) -> None:
    policy = created_architecture(CreateModelConfig(max_position_embeddings=4096))
    teacher = created_architecture(CreateModelConfig(max_position_embeddings=4096, vocab_size=300))
    with pytest.raises(UserError, match="the teacher: vocab_size=300"):
        check_planned(distilled(tmp_path), policy, "the model", teacher)


def test_the_configuration_survives_json(tmp_path: Path) -> None:
    given = distilled(tmp_path / "teacher")
    assert Config.model_validate(json.loads(given.model_dump_json())) == given


def served(teacher: Path, engines: dict[str, Any], **values: Any) -> Config:
    """Return a configuration of pure distillation from a teacher on engines."""
    return config(
        algorithm={"objective": "distill", "distillation": {"teacher": teacher, "engines": engines}}, **values
    )


def test_a_teacher_on_engines_is_bound_by_their_layout_and_not_by_the_trainers(tmp_path: Path) -> None:
    fields = {"num_hidden_layers": 1, "num_attention_heads": 3, "num_key_value_heads": 1, "intermediate_size": 48}
    teacher = hf_folder(tmp_path / "teacher", vocab_size=384, **fields)
    layout = {"world_size": 4, "tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2}
    assert check_config(served(teacher, {"tensor_parallel_size": 3}, parallel=layout)) == []
    (found,) = problems(served(teacher, {"tensor_parallel_size": 2}, parallel=layout))
    key = "algorithm.distillation.engines.tensor_parallel_size=2"
    assert f"num_attention_heads=3 must be a multiple of {key}, which splits it" in found


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"vocab_size": 319}, "vocab_size=319 of algorithm.distillation.teacher must be at least the policy's 320"),
        ({"max_position_embeddings": 199}, "= 200 tokens must not exceed the model's max_position_embeddings=199"),
    ],
    ids=str,
)
def test_a_teacher_on_engines_that_cannot_score_the_policys_samples_is_refused(
    tmp_path: Path, fields: dict[str, Any], expected: str
) -> None:
    teacher = hf_folder(tmp_path / "teacher", **WIDE_VOCABULARY | fields)
    (found,) = problems(served(teacher, {}))
    assert expected in found


def test_a_teacher_on_engines_has_no_log_probs_over_kept_tokens(tmp_path: Path) -> None:
    teacher = hf_folder(tmp_path / "teacher", **WIDE_VOCABULARY)
    given = served(teacher, {}, rollout={"top_k": 20, "max_response_length": 100}, evaluation={"top_k": 20})
    kept = given.model_copy(update={"algorithm": given.algorithm.model_copy(update={"keep_sampling_mask": True})})
    (problem,) = problems(kept)
    assert "algorithm.keep_sampling_mask=true with algorithm.distillation.engines: the teacher's engines" in problem
    assert "have the trainer score the responses, by removing the section engines" in problem


def test_expert_parallelism_of_a_teachers_engines_needs_experts(tmp_path: Path) -> None:
    engines = {"enable_expert_parallel": True}
    (problem,) = problems(served(hf_folder(tmp_path / "dense", **WIDE_VOCABULARY), engines))
    assert "algorithm.distillation.engines.enable_expert_parallel=true places whole experts" in problem
    assert "dense/config.json" in problem
    assert check_config(served(hf_folder(tmp_path / "experts", **EXPERTS, **WIDE_VOCABULARY), engines)) == []


def test_the_teachers_engines_have_their_own_size_and_the_policys_temperature_and_timeouts(tmp_path: Path) -> None:
    rollout = {"num_engines": 3, "colocate": True, "sleep_level": 2, "temperature": 0.7, "request_timeout_s": 99.0}
    checked = served(tmp_path, {"num_engines": 2, "tensor_parallel_size": 4, "kv_cache_gib": 1.0}, rollout=rollout)
    engines = checked.serving_teacher
    assert engines is not None
    assert (engines.model_path, engines.rollout.num_engines, engines.rollout.kv_cache_gib) == (tmp_path, 2, 1.0)
    assert (engines.rollout.colocate, engines.rollout.sleep_level) == (False, 0)
    assert (engines.rollout.temperature, engines.rollout.request_timeout_s) == (0.7, 99.0)
    assert engines.max_model_len == checked.max_model_len + 1  # vLLM generates a token after the sequence
    assert (checked.num_engine_ranks, checked.num_teacher_ranks) == (3, 8)
    assert distilled(tmp_path).serving_teacher is None


def test_only_a_teacher_in_the_trainer_is_a_pass_over_the_batch(tmp_path: Path) -> None:
    inside, outside = distilled(tmp_path).algorithm, served(tmp_path, {}).algorithm
    assert (inside.trainer_holds_teacher, inside.scores_batch) == (True, True)
    assert (outside.trainer_holds_teacher, outside.scores_batch) == (False, False)


def test_a_resumed_run_may_change_the_size_of_the_teachers_engines_but_not_where_the_teacher_is(tmp_path: Path) -> None:
    one, two = served(tmp_path, {}), served(tmp_path, {"num_engines": 2, "tensor_parallel_size": 4})
    assert resume_conflicts(one, two) == []
    (conflict,) = resume_conflicts(distilled(tmp_path), one)
    assert conflict.startswith("algorithm.distillation.engines: null in the run directory")
