import re
import warnings
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel, ValidationError

from megatron_bapo.config.checks import check_config, resume_conflicts
from megatron_bapo.config.model_checks import VLLM_VOCAB_MULTIPLE
from megatron_bapo.config.schema import Config
from tests.unit.config.examples import ARITHMETIC, config, problems

FIXED_ON_RESUME = (
    *("seed", "model.path", "model.create", "model.dtype", "model.lora", "model.freeze_router", "fp8", "data"),
    *("algorithm", "optimizer", "warm_start"),
    *("trainer.train_batch_size", "trainer.ppo_mini_batch_size", "trainer.ppo_epochs"),
    *("rollout.temperature", "rollout.top_p", "rollout.top_k", "rollout.min_p", "rollout.n"),
    *("rollout.max_response_length", "rollout.mode", "rollout.max_staleness", "rollout.max_reuse", "rollout.on_stale"),
    *("rollout.partial_rollout", "rollout.filter_groups"),
    *("reward.type", "reward.function", "reward.partial_credit", "reward.max_tests", "reward.sandbox"),
    *("reward.timeout_reward", "reward.truncated_reward"),
    *("environment.type", "environment.function", "environment.max_turns", "environment.role"),
    *("environment.timeout_reply", "environment.sandbox"),
)
BUT_FREE = ("algorithm.clip_bounds.method", "optimizer.cpu_offload")


def test_engines_pad_the_vocabulary_as_vllm_does() -> None:
    vllm = find_spec("vllm")
    assert vllm is not None
    assert vllm.origin is not None
    source = Path(vllm.origin).parent / "model_executor/layers/vocab_parallel_embedding.py"
    assert f"\nDEFAULT_VOCAB_PADDING_SIZE = {VLLM_VOCAB_MULTIPLE}\n" in source.read_text()


def test_a_valid_config_passes_without_warnings() -> None:
    assert check_config(config()) == []


@pytest.mark.parametrize(
    "values",
    [
        {"evaluation__top_p": 0.9, "evaluation__top_k": 20, "data__validation": ARITHMETIC | {"seed": 2}},
        {"rollout__top_k": 20, "algorithm__behaviour_policy": "recomputed"},
        {"rollout__n": 1, "algorithm__adv_estimator": "reinforce_plus_plus"},
        {"algorithm__objective": "gspo", "algorithm__loss_agg_mode": "seq-mean-token-mean"},
    ],
    ids=str,
)
def test_settings_that_do_not_bias_the_ratios_are_allowed(values: dict[str, Any]) -> None:
    assert check_config(config(**values)) == []


def test_an_offloaded_optimizer_takes_no_gradients_in_bfloat16() -> None:
    for key in ("grads_dtype", "moments_dtype"):
        optimizer = {key: "bfloat16", "cpu_offload": True, "adam_beta2": 0.95}
        (problem,) = problems(config(optimizer=optimizer, model__dtype="bfloat16"))
        assert f"set {key}=float32, or cpu_offload=false" in problem
    with pytest.raises(ValidationError, match=r"set adam_beta2=0\.996 or lower, or moments_dtype=float32"):
        config(optimizer={"moments_dtype": "bfloat16"})
    moments = {"moments_dtype": "bfloat16", "adam_beta2": 0.996}
    assert check_config(config(optimizer={"grads_dtype": "bfloat16", **moments}, model__dtype="bfloat16")) == []


def test_minibatches_need_not_split_evenly_over_ranks() -> None:
    assert check_config(config(parallel__world_size=3, warm_start={"num_steps": 1, "batch_size": 10})) == []


def test_gspo_with_another_loss_aggregation_than_its_papers_is_warned_about() -> None:
    (warning,) = check_config(config(algorithm__objective="gspo"))
    assert "loss_agg_mode=token-mean" in warning
    assert "Set loss_agg_mode=seq-mean-token-mean" in warning


def test_clip_bounds_with_other_token_weights_than_the_loss_are_warned_about() -> None:
    by_answer = {"algorithm__loss_agg_mode": "seq-mean-token-mean"}
    (warning,) = check_config(config(**by_answer))
    assert "clip_bounds.weights=token" in warning
    assert "Set clip_bounds.weights=loss" in warning
    assert check_config(config(**by_answer, algorithm__clip_bounds__weights="loss")) == []
    assert check_config(config(algorithm__loss_agg_mode="seq-mean-token-sum-norm")) == []


@pytest.mark.parametrize(
    ("values", "value", "rule", "way_out"),
    [
        (
            {"parallel__world_size": 7, "parallel__tensor_model_parallel_size": 2},
            "parallel.world_size=7",
            "tensor_model_parallel_size=2 x pipeline_model_parallel_size=1 x context_parallel_size=1 = 2",
            "set parallel.world_size to 6 or 8",
        ),
        (
            {"parallel__world_size": 1, "parallel__pipeline_model_parallel_size": 2},
            "parallel.world_size=1",
            "pipeline_model_parallel_size=2 x context_parallel_size=1 = 2",
            "set parallel.world_size to 2",
        ),
        (
            {"parallel__world_size": 6, "parallel__context_parallel_size": 4},
            "parallel.world_size=6",
            "must be a multiple of tensor_model_parallel_size=1 x",
            "set parallel.world_size to 4 or 8",
        ),
        (
            {"parallel__virtual_pipeline_model_parallel_size": 2},
            "parallel.virtual_pipeline_model_parallel_size=2",
            "interleaves the chunks of several stages, but parallel.pipeline_model_parallel_size=1",
            "raise pipeline_model_parallel_size",
        ),
        (
            {"parallel__world_size": 2, "parallel__expert_tensor_parallel_size": 4},
            "the 2 ranks of a pipeline stage (parallel.world_size=2 / pipeline_model_parallel_size=1)",
            "must be a multiple of expert_tensor_parallel_size=4 x expert_model_parallel_size=1 = 4",
            "set parallel.world_size to 4",
        ),
        (
            {"parallel__sequence_parallel": True},
            "parallel.sequence_parallel=true",
            "splits sequences over tensor-parallel ranks, but parallel.tensor_model_parallel_size=1",
            "set sequence_parallel=false or raise tensor_model_parallel_size",
        ),
        (
            {"parallel__world_size": 64},
            "trainer.ppo_mini_batch_size=32 trajectories",
            "must be at least one for each of the 64 data-parallel ranks (parallel.world_size=64 / 1)",
            "set it to 64 or more",
        ),
        (
            {"parallel__world_size": 4, "warm_start": {"num_steps": 1, "batch_size": 3}},
            "warm_start.batch_size=3",
            "must be at least one for each of the 4 data-parallel ranks",
            "set it to 4 or more",
        ),
        (
            {"warm_start": {"num_steps": 1, "demonstration": "mine:shown"}},
            "warm_start.demonstration=mine:shown",
            "demonstrates replies of an environment, but environment is not set",
            "set it, or remove warm_start.demonstration",
        ),
        (
            {"optimizer": {"grads_dtype": "bfloat16"}},
            "optimizer.grads_dtype=bfloat16 with model.dtype=float32",
            "less precise than the parameters",
            "set model.dtype=bfloat16, or grads_dtype=float32",
        ),
        ({"rollout__n": 1}, "rollout.n=1", "zero in a group of one", "set rollout.n to 2 or more"),
        (
            {"algorithm__rollout_correction": {"rollout_is": "token"}},
            "algorithm.rollout_correction with algorithm.behaviour_policy=rollout",
            "the difference between rollout and recomputed log-probs",
            "set behaviour_policy=recomputed",
        ),
        (
            {"algorithm__clip_ratio_c": 3.0, "algorithm__objective": "cispo"},
            "algorithm.clip_ratio_c=3.0",
            "weights are clipped",
            "remove clip_ratio_c",
        ),
        *(
            (
                {"algorithm__objective": "sapo"} | setting,
                text,
                "which algorithm.objective=sapo does not use",
                "remove it",
            )
            for setting, text in (
                ({"algorithm__clip_ratio_c": 3.0}, "algorithm.clip_ratio_c=3.0"),
                ({"logging__entropy_clip_rule": True}, "logging.entropy_clip_rule=true"),
            )
        ),
        *(
            (
                {"algorithm__objective": objective, "logging__entropy_clip_rule": True},
                "logging.entropy_clip_rule=true is about PPO's clipping of tokens",
                f"which algorithm.objective={objective} does not use",
                "remove it",
            )
            for objective in ("cispo", "gspo")
        ),
        (
            {
                "rollout__top_k": 20,
                "algorithm__behaviour_policy": "recomputed",
                "algorithm__off_policy_mask_threshold": 0.5,
            },
            "top_k=20",
            "every ratio of the two is too small",
            "without rollout_correction and off_policy_mask_threshold",
        ),
        (
            {"algorithm__keep_sampling_mask": True, "rollout__top_p": 0.9},
            "keep_sampling_mask=true with rollout.top_k=-1",
            "top_k bounds their number",
            "set rollout.top_k, say to 64",
        ),
        (
            {"algorithm__keep_sampling_mask": True, "rollout__top_k": 20, "data__validation": ARITHMETIC | {"seed": 2}},
            "keep_sampling_mask=true with evaluation.top_k=-1",
            "engines then return the tokens that they sample from with every response",
            "set evaluation.top_k, say to 64",
        ),
        *(
            (
                {"trainer__skip_zero_advantage": True, f"algorithm__{key}": value} | more,
                f"trainer.skip_zero_advantage=true with algorithm.{key}={value}",
                "tokens of trajectories with equal rewards then contribute to the update",
                "set skip_zero_advantage=false",
            )
            for key, value, more in (
                *(("adv_estimator", "reinforce_plus_plus", {}), ("kl_loss_coef", 0.1, {})),
                *(("kl_reward_coef", 0.1, {}), ("entropy_coeff", 0.01, {})),
                ("function", "losses:f", {"algorithm__objective": "function"}),
            )
        ),
        (
            {"algorithm__overlong": {"mode": "penalty", "buffer_length": 101}},
            "algorithm.overlong.buffer_length=101",
            "must not exceed rollout.max_response_length=100",
            "lower it",
        ),
        (
            {"rollout__top_p": 0.9},
            "rollout.top_p=0.9",
            "the engine then normalizes over the tokens that it keeps",
            "set top_p=1, top_k=-1, min_p=0",
        ),
        (
            {
                "rollout__min_p": 0.1,
                "algorithm__behaviour_policy": "recomputed",
                "algorithm__rollout_correction": {"rollout_rs": "token"},
            },
            "min_p=0.1",
            "every ratio of the two is too small",
            "behaviour_policy=recomputed without rollout_correction",
        ),
        (
            {"rollout__n": 6},
            "trainer.train_batch_size=64 counts trajectories",
            "must be a multiple of rollout.n=6",
            "set it to 96",
        ),
        (
            {"trainer__ppo_mini_batch_size": 48},
            "trainer.train_batch_size=64 trajectories",
            "must split evenly into minibatches of trainer.ppo_mini_batch_size=48",
            "set train_batch_size to 48 or 96",
        ),
        (
            {"trainer__max_tokens_per_gpu": 199},
            "trainer.max_tokens_per_gpu=199",
            "data.max_prompt_length=100 + rollout.max_response_length=100 = 200",
            "raise max_tokens_per_gpu to at least 200, or shorten the two",
        ),
        (
            {"trainer__max_tokens_per_gpu": 67, "parallel__context_parallel_size": 3, "parallel__world_size": 3},
            "trainer.max_tokens_per_gpu=67 x parallel.context_parallel_size=3",
            "response_length=100 = 200, 204 with the layout's padding",
            "raise max_tokens_per_gpu to at least 68",
        ),
        (
            {"evaluation__every_steps": 5},
            "evaluation.every_steps=5",
            "needs held-out prompts",
            "set evaluation.every_steps=0",
        ),
        (
            {"data__validation": ARITHMETIC},
            "reasoning_gym chain_sum with seed 1",
            "held-out prompts are excluded from training",
            "another seed",
        ),
        (
            {"data__train": {"path": "no/such.jsonl"}, "reward__type": "math_verify"},
            "data.train.path=no/such.jsonl",
            "must be an existing file",
            f"relative paths start at {Path.cwd()}. docs/guides/data.md says how to make one",
        ),
        (
            {"data__validation": {"path": "data.csv"}, "reward__type": "math_verify"},
            "data.validation.path=data.csv",
            "must end in .jsonl or .parquet",
            "convert it",
        ),
        (
            {"model__create__num_attention_heads": 6, "model__create__num_key_value_heads": 4},
            "model.create: num_attention_heads=6",
            "must be a multiple of num_key_value_heads=4",
            "change one of them",
        ),
        (
            {"rollout__tensor_parallel_size": 8},
            "model.create: num_attention_heads=4",
            "must be a multiple of rollout.tensor_parallel_size=8",
            "choose a size that divides 4",
        ),
        (
            {
                **dict.fromkeys(("model__create__num_attention_heads", "model__create__num_key_value_heads"), 6),
                "model__create__intermediate_size": 384,
                "rollout__tensor_parallel_size": 3,
            },
            "model.create: vocab_size=320, which vLLM pads to 320",
            "must be a multiple of rollout.tensor_parallel_size=3",
            "choose a size that divides 320",
        ),
        (
            {"model__create__max_position_embeddings": 150},
            "data.max_prompt_length=100 + rollout.max_response_length=100 = 200 tokens",
            "must not exceed the model's max_position_embeddings=150 (model.create)",
            "shorten one of the two",
        ),
    ],
)
def test_a_broken_rule_names_value_rule_and_way_out(
    values: dict[str, Any], value: str, rule: str, way_out: str
) -> None:
    (problem,) = problems(config(**values))
    assert value in problem
    assert rule in problem
    assert way_out in problem


def test_reasoning_gyms_scorers_are_refused_for_prompts_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "train.jsonl"
    file.touch()
    (problem,) = problems(config(data__train={"path": file}))
    assert f"reward.type=reasoning_gym scores only reasoning-gym tasks, but data.train.path={file} is a file" in problem
    assert "set data.train.reasoning_gym, or reward.type=math_verify or function" in problem


def test_the_files_and_variables_of_rewards_and_curriculum_must_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    remote = {"url": "https://host/score", "authorization_env": "REWARD_TOKEN"}
    broken = config(reward={"type": "remote", "remote": remote}, data__curriculum={"pass_rates": "no/such/rates.jsonl"})
    monkeypatch.delenv("REWARD_TOKEN", raising=False)
    file, variable = problems(broken)
    assert "data.curriculum.pass_rates=no/such/rates.jsonl must be an existing file" in file
    assert "reward.remote.authorization_env=REWARD_TOKEN names an environment variable that is not set" in variable
    assert "set it to the whole Authorization header" in variable
    monkeypatch.setenv("REWARD_TOKEN", "Bearer word")
    assert len(problems(broken)) == 1


@pytest.mark.parametrize(
    ("section", "values", "rule"),
    [
        ("reward", {"type": "remote"}, "reward.remote is required by reward.type=remote and allowed only there"),
        (
            "reward",
            {"remote": {"url": "http://host"}},
            "reward.remote is required by reward.type=remote and allowed only there",
        ),
        (
            "reward",
            {"type": "function", "function": "f"},
            "write it as path.to.module:function",
        ),
        *(
            (
                "reward",
                {"type": "function", "function": path},
                "write it as path.to.module:function, with dots for / and without .py",
            )
            for path in ("rewards.py:f", "rewards/sums:f", ":f", "rewards:")
        ),
        ("environment", {"type": "function"}, "environment.function is required by environment.type=function"),
        ("algorithm", {"objective": "function"}, "algorithm.function is required by algorithm.objective=function"),
        ("algorithm", {"adv_function": "a:f"}, "adv_function is required by algorithm.adv_estimator=function"),
        ("algorithm", {"function": "losses:f"}, "algorithm.function is required by algorithm.objective=function"),
        ("algorithm", {"objective": "function", "function": "losses.py:f"}, "write it as path.to.module:function"),
        ("environment", {"type": "function", "function": "a.b"}, "write it as path.to.module:function"),
        ("environment", {"max_turns": 1}, "greater than or equal to 2"),
        ("data__curriculum", {"min_pass_rate": 0.8, "max_pass_rate": 0.2}, "need min_pass_rate <= max_pass_rate"),
    ],
)
def test_inconsistent_reward_environment_and_curriculum_sections_are_refused(
    section: str, values: dict[str, Any], rule: str
) -> None:
    with pytest.raises(ValidationError, match=re.escape(rule)):
        config(**{section: values})


def test_all_broken_rules_are_reported_at_once() -> None:
    found = problems(config(rollout__n=7, trainer__max_tokens_per_gpu=1, parallel__sequence_parallel=True))
    assert len(found) == 3


def test_clip_bounds_that_can_never_move_are_warned_about() -> None:
    (warning,) = check_config(config(algorithm__clip_bounds={"ratio_lower_start": 0.89}))
    assert "ratio_lower_start=0.89 + ratio_lower_step=0.02 exceeds ratio_lower_max=0.9" in warning
    assert "the bounds never move. Raise ratio_lower_max" in warning
    (warning,) = check_config(config(algorithm__clip_bounds={"positive_contribution_target": 0}))
    assert "positive_contribution_target=0 is met by every minibatch" in warning
    still = {"search_order": "lower_first", "ratio_lower_max": 0.6, "ratio_upper_max": 1.2}
    (warning,) = check_config(config(algorithm__clip_bounds=still))
    assert "Widen one range" in warning
    (warning,) = check_config(config(algorithm__clip_bounds={"ratio_upper_max": 1.2}))
    assert "ratio_upper_start=1.2 + ratio_upper_step=0.05 exceeds ratio_upper_max=1.2" in warning


@pytest.mark.parametrize(
    "algorithm",
    [
        {"clip_bounds": {"ratio_lower_start": 0.88}},  # exactly one step left, which float64 would deny
        {"clip_bounds": {"ratio_lower_start": 0.89, "search_order": "lower_first"}},
    ],
)
def test_clip_bounds_that_move_are_not_warned_about(algorithm: dict[str, Any]) -> None:
    assert check_config(config(algorithm=algorithm)) == []


def test_a_warm_up_longer_than_the_run_is_warned_about() -> None:
    assert check_config(config(optimizer__lr_warmup_steps=19)) == []
    assert check_config(config(optimizer__lr_warmup_steps=19, trainer__total_steps=0)) == []
    (warning,) = check_config(config(optimizer__lr_warmup_steps=21))
    assert "optimizer.lr_warmup_steps=21 is not less than the run's 20 updates" in warning
    assert "Lower lr_warmup_steps or train longer" in warning


def test_the_offloaded_optimizer_must_be_the_distributed_one() -> None:
    assert check_config(config(optimizer__cpu_offload=True)) == []
    (problem,) = problems(config(optimizer__cpu_offload=True, parallel__use_distributed_optimizer=False))
    assert "optimizer.cpu_offload=true needs parallel.use_distributed_optimizer=true" in problem
    assert "set use_distributed_optimizer=true" in problem


@pytest.mark.parametrize("absent", ["use_distributed_optimizer", "overlap_grad_reduce"])
def test_an_overlapped_gather_needs_the_distributed_optimizer_and_overlapped_reduction(absent: str) -> None:
    settings = {"use_distributed_optimizer": True, "overlap_grad_reduce": True, "overlap_param_gather": True}
    assert check_config(config(parallel=settings)) == []
    (problem,) = problems(config(parallel=settings | {absent: False}))
    assert "parallel.overlap_param_gather=true needs use_distributed_optimizer=true" in problem
    assert "set both, or overlap_param_gather=false" in problem


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"lr": 1e-6, "min_lr": 1e-5}, "need min_lr <= lr, got 1e-05, 1e-06"),
        ({"lr_decay_style": "WSD"}, "lr_wsd_decay_steps is required by lr_decay_style=WSD"),
        ({"lr_wsd_decay_steps": 5}, "lr_wsd_decay_steps is required by lr_decay_style=WSD"),
        ({"lr_decay_steps": 5}, "lr_decay_steps has no effect with lr_decay_style=constant"),
        (
            {"lr_decay_style": "linear", "lr_decay_steps": 5, "lr_warmup_steps": 5},
            "need lr_warmup_steps < lr_decay_steps, got 5, 5",
        ),
    ],
)
def test_a_learning_rate_schedule_that_contradicts_itself_is_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        config(optimizer=settings)


def test_a_decay_that_starts_during_the_warm_up_is_warned_about() -> None:
    settings = {"lr_decay_style": "WSD", "lr_wsd_decay_steps": 15, "lr_warmup_steps": 5}
    assert check_config(config(optimizer=settings)) == []
    (warning,) = check_config(config(optimizer=settings | {"lr_warmup_steps": 6}))
    assert "optimizer.lr_warmup_steps=6 + lr_wsd_decay_steps=15 exceed the 20 updates" in warning


@pytest.mark.parametrize(
    ("settings", "num_conflicts"),
    [
        ({}, 0),
        ({"lr_decay_style": "linear"}, 1),
        ({"lr_decay_style": "WSD", "lr_wsd_decay_steps": 5}, 1),
        ({"lr_decay_style": "WSD", "lr_wsd_decay_steps": 5, "lr_decay_steps": 20}, 0),
    ],
)
def test_a_run_is_extended_only_if_its_learning_rate_schedule_stays_the_same(
    settings: dict[str, Any], num_conflicts: int
) -> None:
    conflicts = resume_conflicts(config(optimizer=settings), config(optimizer=settings, trainer__total_steps=99))
    assert len(conflicts) == num_conflicts
    assert all("learning-rate schedule" in conflict for conflict in conflicts)


@pytest.mark.parametrize(
    ("values", "limits"),
    [
        ({}, (3600.0, 11_700.0)),
        ({"rollout__max_response_length": 65_536}, (32_768.0, 99_204.0)),
        ({"rollout__request_timeout_s": 60.0, "rollout__start_timeout_s": 30.0}, (60.0, 210.0)),
        ({"rollout__request_timeout_s": 60.0, "rollout__max_request_failures": 1}, (60.0, 960.0)),
    ],
    ids=str,
)
def test_requests_have_time_for_each_token_and_batches_for_failures(
    values: dict[str, Any], limits: tuple[float, float]
) -> None:
    rollout = config(**values).rollout
    assert (rollout.request_limit_s, rollout.idle_limit_s) == limits


@pytest.mark.parametrize(
    ("values", "nats"),
    [
        ({}, 1e-4),
        ({"model__dtype": "bfloat16"}, 0.2),
        ({"model__dtype": "bfloat16", "rollout__kv_cache_dtype": "fp8_e4m3"}, 0.5),
        ({"model__dtype": "bfloat16", "fp8": {}}, 0.5),
        ({"model__dtype": "bfloat16", "weight_sync__probe_tolerance": 0.3}, 0.3),
    ],
    ids=str,
)
def test_the_tolerance_of_the_weight_probe_depends_on_the_precision(values: dict[str, Any], nats: float) -> None:
    assert config(**values).probe_tolerance == nats


def test_a_probe_tighter_than_bfloat16_is_warned_about() -> None:
    assert check_config(config(model__dtype="bfloat16")) == []
    (warning,) = check_config(config(model__dtype="bfloat16", weight_sync__probe_tolerance=0.0001))
    assert "weight_sync.probe_tolerance=0.0001 is less than the 0.2 nats" in warning
    assert "with model.dtype=bfloat16" in warning
    assert check_config(config(model__dtype="bfloat16", weight_sync__probe_tolerance=0.25)) == []


def leaves(value: Any, key: str = "") -> Iterator[str]:
    """Yield the dotted keys of all values that are not sections."""
    if not isinstance(value, BaseModel):
        yield key
        return
    for name in type(value).model_fields:
        yield from leaves(getattr(value, name), f"{key}.{name}" if key else name)


@pytest.mark.parametrize(("batch", "mini_batch", "n"), [(64, 48, 8), (512, 300, 8), (900, 300, 8), (64, 32, 6)])
def test_the_batch_sizes_that_messages_suggest_pass_all_rules_of_batches(batch: int, mini_batch: int, n: int) -> None:
    def sized(batch: int) -> Config:
        return config(trainer__train_batch_size=batch, trainer__ppo_mini_batch_size=mini_batch, rollout__n=n)

    for problem in problems(sized(batch)):
        for offered in re.findall(r"\d+", problem.split("set ")[1]):
            assert check_config(sized(int(offered))) == []


def with_another_value(section: BaseModel, key: str) -> Any:
    """Return a copy with another value, without validation, because rules between keys do not matter here."""
    name, _, rest = key.partition(".")
    value = getattr(section, name)
    return section.model_copy(update={name: with_another_value(value, rest) if rest else ["another", value]})


def test_a_continued_run_may_change_where_and_how_it_runs_but_not_its_data_and_optimization() -> None:
    """Test every key of the configuration, with all optional sections given."""
    remote = {"type": "remote", "remote": {"url": "https://host/score"}}
    full = config(
        fp8={}, environment={}, warm_start={"num_steps": 1}, reward=remote, data__curriculum={},
        data__validation=ARITHMETIC,
    )  # fmt: skip
    keys = [*leaves(full)]
    with warnings.catch_warnings(action="ignore"):  # pydantic's, of values with another type
        refused = {key for key in keys if resume_conflicts(full, with_another_value(full, key))}
    assert refused == {
        key
        for key in keys
        if any(f"{key}.".startswith(f"{fixed}.") for fixed in FIXED_ON_RESUME) and key not in BUT_FREE
    }


def test_a_conflict_names_the_key_and_both_values() -> None:
    conflicts = resume_conflicts(config(), config(optimizer__lr=2e-6, seed=3, warm_start={"num_steps": 1}))
    assert sorted(conflict.split(":")[0] for conflict in conflicts) == ["optimizer.lr", "seed", "warm_start"]
    assert "seed: 0 in the run directory, 3 now" in conflicts


def test_engines_serve_the_longer_of_training_and_evaluation_and_the_trainer_that_of_training() -> None:
    def lengths(**values: Any) -> tuple[int, int]:
        checked = config(**values)
        return checked.max_sequence_length, checked.max_model_len

    held_out = {"data__validation": ARITHMETIC | {"seed": 2}}
    assert lengths(**held_out) == lengths(**held_out, evaluation__max_response_length=40) == (200, 200)
    assert lengths(**held_out, evaluation__max_response_length=300) == (200, 400)
    assert lengths(evaluation__max_response_length=300) == (200, 200)
