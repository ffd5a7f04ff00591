from pathlib import Path
from typing import Any

import pytest

from megatron_bapo.config.checks import differences
from megatron_bapo.config.evaluation import FREE_ON_RESUME, EvalConfig
from megatron_bapo.config.loading import dump_config, load_section
from megatron_bapo.config.rollout import EngineConfig, EvaluationConfig
from megatron_bapo.config.schema import Config
from megatron_bapo.errors import UserError

CONFIGS = sorted((Path(__file__).parents[3] / "configs" / "eval").glob("*.yaml"))
CONFIG = """
run_dir: runs/eval/test
model: {path: models/m}
data: {validation: {path: aime.jsonl}}
"""


def load(folder: Path, *overrides: str) -> EvalConfig:
    (folder / "eval.yaml").write_text(CONFIG)
    return load_section(EvalConfig, folder / "eval.yaml", overrides)


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_a_shipped_evaluation_survives_being_written_out_and_is_named_as_its_run_directory(path, tmp_path):
    config = load_section(EvalConfig, path)
    (tmp_path / "config.yaml").write_text(dump_config(config))

    assert load_section(EvalConfig, tmp_path / "config.yaml") == config
    assert config.run_dir == Path("runs/eval") / path.stem


def test_the_papers_protocol_is_a_preset():
    found = {path.stem: load_section(EvalConfig, path) for path in CONFIGS if path.stem.startswith("paper")}

    assert {config.evaluation.n for config in found.values()} == {16}
    assert {config.evaluation.temperature for config in found.values()} == {0.6}
    assert {name: config.rollout.max_response_length for name, config in found.items()} == {
        "paper": 32768,
        "paper_8k": 8192,
    }


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["evaluation.k=[4,32]"], "k=32 must not exceed n=16, the responses per problem; raise n or lower k"),
        (["evaluation.nn=4"], "evaluation.nn=4: unknown key; did you mean evaluation.n?"),
        (["rollout.mode=async"], "rollout.mode=async: unknown key;"),
        (["trainer.total_steps=1"], "trainer="),
    ],
)
def test_wrong_keys_are_refused_by_name(tmp_path, overrides, expected):
    with pytest.raises(UserError, match=expected.replace("?", r"\?").replace("[", r"\[")):
        load(tmp_path, *overrides)


@pytest.mark.parametrize(("n", "sizes"), [(16, (1, 2, 4, 8, 16)), (1, (1,)), (6, (1, 2, 4, 6))])
def test_every_power_of_two_up_to_n_is_reported(tmp_path, n, sizes):
    assert load(tmp_path, f"evaluation.n={n}").evaluation.sizes == sizes


def test_shared_keys_have_the_same_type_and_default_as_in_training(tmp_path):
    """The number of responses, 16, is the exception."""

    def described(section: Any) -> dict[str, tuple[Any, Any]]:
        return {name: (field.annotation, field.default) for name, field in section.model_fields.items()}

    rollout, evaluation, data = (Config.model_fields[name].annotation for name in ("rollout", "evaluation", "data"))
    config = load(tmp_path)
    assert described(EngineConfig).items() <= described(rollout).items()
    shared = described(type(config.evaluation)).keys() & described(EvaluationConfig).keys() - {"n"}
    assert len(shared) == 4
    assert all(described(type(config.evaluation))[key] == described(evaluation)[key] for key in shared)
    prompts = described(type(config.data)).keys() - {"validation"}
    assert len(prompts) == 4
    assert all(described(type(config.data))[key] == described(data)[key] for key in prompts)


def test_the_serving_run_has_the_settings_of_the_evaluation(tmp_path):
    config = load(
        tmp_path,
        *("evaluation.temperature=0.6", "evaluation.top_p=0.9", "seed=5", "data.max_prompt_length=77"),
        *("rollout.num_engines=3", "rollout.max_response_length=99", "reward.num_workers=2"),
    )

    serving = config.serving(tmp_path, "bfloat16")

    assert (serving.model_path, serving.model.dtype, serving.seed) == (tmp_path, "bfloat16", 5)
    assert (serving.evaluation.temperature, serving.evaluation.top_p) == (0.6, 0.9)
    assert (serving.rollout.num_engines, serving.max_model_len, serving.reward.num_workers) == (3, 176, 2)
    assert serving.data.train == config.data.validation


@pytest.mark.parametrize("key", ["evaluation.n=32", "rollout.num_engines=2", "run_dir=elsewhere"])
def test_an_evaluation_may_continue_with_more_responses_or_on_another_machine(tmp_path, key):
    assert differences(load(tmp_path), load(tmp_path, key), FREE_ON_RESUME) == []


@pytest.mark.parametrize(
    "change",
    [
        {"reward": {"type": "remote", "remote": {"url": "http://other:8000/score"}, "concurrency": 64}},
        {"environment": {"timeout_s": 60, "num_workers": 2, "concurrency": 2, "worker_memory_gib": 8}},
    ],
    ids=["reward", "environment"],
)
def test_an_evaluation_may_continue_with_a_reward_server_elsewhere_and_more_workers(tmp_path, change):
    """The same keys are free when a training run continues."""
    functions = {"reward": {"type": "remote", "remote": {"url": "http://one:8000/score"}}, "environment": {}}
    one, other = ({**load(tmp_path).model_dump(), **functions, **extra} for extra in ({}, change))
    assert differences(EvalConfig.model_validate(one), EvalConfig.model_validate(other), FREE_ON_RESUME) == []


@pytest.mark.parametrize(
    ("key", "conflict"),
    [
        ("evaluation.temperature=0.6", "evaluation.temperature: 1.0 in the run directory, 0.6 now"),
        ("rollout.max_response_length=9", "rollout.max_response_length: 1024 in the run directory, 9 now"),
        ("rollout.kv_cache_dtype=fp8_e4m3", 'rollout.kv_cache_dtype: "auto" in the run directory, "fp8_e4m3" now'),
        ("seed=3", "seed: 0 in the run directory, 3 now"),
        ("data.system_prompt=Think.", 'data.system_prompt: null in the run directory, "Think." now'),
    ],
)
def test_an_evaluation_may_not_continue_with_settings_that_change_responses(tmp_path, key, conflict):
    assert differences(load(tmp_path), load(tmp_path, key), FREE_ON_RESUME) == [conflict]
