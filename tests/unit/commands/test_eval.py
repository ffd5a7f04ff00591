"""Tests of `eval` without engines: checks, continuation and reports. tests/e2e/test_eval.py starts engines."""

import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from megatron_bapo.cli.main import app
from megatron_bapo.commands.eval import BenchmarkDirectory, Subject
from megatron_bapo.commands.evaluated_model import find_model
from megatron_bapo.config.evaluation import EvalConfig
from megatron_bapo.config.loading import dump_config, load_section
from megatron_bapo.config.model import CreateModelConfig
from megatron_bapo.data.prompts import load_prompts
from megatron_bapo.model.hf_create import create_checkpoint

MODEL = CreateModelConfig(num_hidden_layers=1, hidden_size=32, intermediate_size=32, num_attention_heads=1,
                          num_key_value_heads=1)  # fmt: skip
CONFIG = """
run_dir: {folder}/eval
model: {{path: {folder}/model}}
data: {{chat_template: false, max_prompt_length: 40, validation: {{path: {folder}/sums.jsonl}}}}
reward: {{type: function, function: "argparse:Namespace"}}  # it takes all keywords, and is never called
evaluation: {{n: 2}}
rollout: {{max_response_length: 8}}
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    create_checkpoint(tmp_path / "model", MODEL, ["abc", "xyz"], seed=0)
    write(tmp_path / "sums.jsonl", [{"prompt": f"{n} + 1?", "answer": str(n + 1)} for n in range(3)])
    (tmp_path / "eval.yaml").write_text(CONFIG.format(folder=tmp_path))
    return tmp_path


def write(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def evaluate(folder: Path, *arguments: str):
    return CliRunner().invoke(app, ["eval", str(folder / "eval.yaml"), *arguments], env={"COLUMNS": "200"})


def interrupted(folder: Path, *, n: int = 2) -> None:
    """Write the files of an evaluation with all responses; the first one to each problem is right."""
    config = load_section(EvalConfig, folder / "eval.yaml")
    prompts = load_prompts(config.data.validation, name="validation", system_prompt=None).prompts
    directory = BenchmarkDirectory(config.run_dir)
    directory.root.mkdir()
    directory.config.write_text(dump_config(config))
    directory.subject.write_text(json.dumps(asdict(Subject.of(find_model(config.model, directory.export), prompts))))
    answer = {"data_source": "sums", "finish_reason": "stop", "num_tokens": 3, "timed_out": False, "text": "?"}
    write(
        directory.responses,
        [
            {"problem": problem, "sample": sample, "reward": float(sample == 0), "answer": str(sample), **answer}
            for problem in range(3)
            for sample in range(n)
        ],
    )


def test_a_dry_run_prints_the_work_and_writes_nothing(folder: Path) -> None:
    before = sorted(folder.rglob("*"))
    result = evaluate(folder, "--dry-run")
    assert result.exit_code == 0
    assert "3 problems x 2 = 6 responses" in result.output
    assert sorted(folder.rglob("*")) == before


@pytest.mark.parametrize(
    ("row", "arguments", "message"),
    [
        (
            {"prompt": "4?"},
            [],
            "sums.jsonl:1: no ground truth under 'reward_model.ground_truth' or 'answer' or 'label'",
        ),
        ({}, [], "Correct it, or set data.validation.on_bad_line=skip to skip such rows."),
        (
            {"prompt": "4?", "answer": " "},
            ["reward.type=math_verify", "reward.function=null"],
            "reward.type=math_verify cannot read",
        ),
        (None, ["evaluation.k=[1,8]"], "k=8 must not exceed n=2, the responses per problem; raise n or lower k"),
        (
            None,
            [
                "reward={type: remote, remote: {url: 'http://localhost', authorization_env: NO_SUCH_VARIABLE}}",
                "reward.function=null",
            ],
            "reward.remote.authorization_env=NO_SUCH_VARIABLE names an environment variable that is not set",
        ),
        (None, ["reward.function=nowhere:f"], "there is no module 'nowhere'"),
        (None, ["model.path=nowhere"], "model.path=nowhere does not exist; give a Hugging Face folder"),
        (None, ["model.path=/dev/null"], "model.path=/dev/null is not a folder; give a Hugging Face folder"),
        (None, ["data.validation.path=nowhere.jsonl"], "data.validation.path=nowhere.jsonl must be an existing file"),
        (None, ["data.max_prompt_length=2"], "prompt validation:0, counted from 0, has 6 tokens"),
        (
            None,
            ["reward.type=reasoning_gym", "reward.function=null"],
            "reward.type=reasoning_gym scores only reasoning-gym tasks",
        ),
        (None, ["run_dir=/dev/null/x"], "run_dir=/dev/null/x cannot be written to (Not a directory: /dev/null"),
        (None, ["rollout.quantization=fp8_per_block"], "on a machine without a GPU"),
    ],
    ids=[
        "no answers",
        "no columns",
        "unreadable answer",
        "k > n",
        "no variable",
        "no function",
        "no model",
        "a file as the model",
        "no problems",
        "long prompt",
        "reward",
        "unwritable",
        "quantization",
    ],
)
def test_a_wrong_input_is_named_with_exit_code_2_before_anything_starts(folder, row, arguments, message) -> None:
    if row is not None:
        write(folder / "sums.jsonl", [row])
    result = evaluate(folder, *arguments)
    assert result.exit_code == 2, result.output
    assert message in result.stderr
    assert "Traceback" not in result.output
    assert not (folder / "eval").exists()


def test_a_folder_with_another_model_is_refused(folder: Path) -> None:
    (folder / "model").rename(folder / "hf")
    result = evaluate(folder, "--dry-run", f"model.path={folder}/hf", f"run_dir={folder}")
    assert result.exit_code == 2, result.output
    assert f"{folder} contains hf but not subject.json, so it is not of an evaluation; choose run_dir=" in result.stderr


def test_a_missing_model_and_missing_problems_are_named_at_once(folder: Path) -> None:
    result = evaluate(folder, "--dry-run", "model.path=nowhere", "data.validation.path=nowhere.jsonl")
    assert result.exit_code == 2, result.output
    assert "model.path=nowhere does not exist; give a Hugging Face folder" in result.stderr
    assert "data.validation.path=nowhere.jsonl must be an existing file" in result.stderr


def test_a_skipped_row_is_shown_verbatim(folder: Path) -> None:
    with (folder / "sums.jsonl").open("a") as file:
        file.write('{"question": "[bold]x [/INST] y", "answer": "3"}\n')
    result = evaluate(folder, "--dry-run", "data.validation.on_bad_line=skip")
    assert result.exit_code == 0, result.output
    assert "1 malformed lines skipped" in result.output
    assert "[bold]x [/INST] y" in result.output


def test_with_all_responses_done_only_the_results_are_written(folder: Path) -> None:
    interrupted(folder)
    result = evaluate(folder, "--json")
    assert result.exit_code == 0, result.output
    results = json.loads((folder / "eval" / "results.json").read_text())
    assert json.loads(result.stdout) == results
    assert "6 exist already" in result.stderr
    metrics = results["sources"]["sums"]["metrics"]
    assert {name: metrics[name]["value"] for name in metrics} == {"mean@2": 0.5, "pass@2": 1.0, "maj@2": 0.5}
    assert [row["num_right"] for row in results["problems"]] == [1, 1, 1]
    assert results["config"]["evaluation"]["n"] == 2


def test_the_tables_are_printed_for_readers(folder: Path) -> None:
    interrupted(folder)
    result = evaluate(folder)
    assert result.exit_code == 0, result.output
    assert "sums: 3 problems, 6 responses" in result.stdout
    assert f"results are in {folder / 'eval' / 'results.json'}" in result.stdout


def test_only_the_first_n_responses_count(folder: Path) -> None:
    interrupted(folder, n=5)
    result = evaluate(folder, "--json", "evaluation.n=3")
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["sources"]["sums"]["metrics"]["mean@3"]["value"] == pytest.approx(1 / 3)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["evaluation.temperature=0.5"], "evaluation.temperature: 1.0 in the run directory, 0.5 now"),
        (["data.max_prompt_length=41", "seed=1"], "seed: 0 in the run directory, 1 now"),
        (["reward.partial_credit=false"], "reward.partial_credit: true in the run directory, false now"),
    ],
)
def test_responses_of_another_evaluation_are_refused_by_name(folder: Path, arguments: list[str], message: str) -> None:
    interrupted(folder)
    result = evaluate(folder, *arguments)
    assert result.exit_code == 2
    assert f"{folder / 'eval'} contains another evaluation:" in result.stderr
    assert message in result.stderr
    assert "Choose run_dir=<another folder>" in result.stderr


def test_other_problems_or_other_weights_under_the_same_name_are_refused(folder: Path) -> None:
    interrupted(folder)
    weights = folder / "model" / "model.safetensors"
    os.utime(weights, (0, 0))
    write(folder / "sums.jsonl", [{"prompt": f"{n} + 2?", "answer": str(n + 2)} for n in range(3)])
    result = evaluate(folder)
    assert result.exit_code == 2
    assert "  weights: " in result.stderr
    assert "  problems: " in result.stderr
    assert "  model: " not in result.stderr


def test_responses_under_the_name_of_an_earlier_version_are_refused_with_the_name_to_give_them(folder: Path) -> None:
    interrupted(folder)
    responses = folder / "eval" / "responses.jsonl"
    responses.rename(old := responses.with_name("answers.jsonl"))
    result = evaluate(folder, "--dry-run")
    assert result.exit_code == 2
    assert f"{old} has the responses of an earlier version, which are now in responses.jsonl" in result.stderr
    old.rename(responses)
    assert evaluate(folder, "--dry-run").exit_code == 0


def test_a_converted_checkpoint_is_not_used_for_another_model(folder: Path) -> None:
    """Before the first response everything may still change, except the model from which hf/ was made."""
    interrupted(folder)
    (folder / "eval" / "responses.jsonl").unlink()
    assert evaluate(folder, "--dry-run", "seed=3", "model.dtype=bfloat16").exit_code == 0
    (folder / "eval" / "hf").mkdir()
    assert evaluate(folder, "--dry-run", "seed=3").exit_code == 0
    result = evaluate(folder, "--dry-run", "model.dtype=bfloat16")
    assert result.exit_code == 2
    assert "dtype: float32 in the run directory, bfloat16 now" in result.stderr


def test_a_training_runs_folder_is_not_written_to(folder: Path) -> None:
    (folder / "eval").mkdir()
    (folder / "eval" / "metrics.jsonl").touch()
    result = evaluate(folder)
    assert result.exit_code == 2
    assert "contains a training run; choose run_dir=<another folder>" in result.stderr
