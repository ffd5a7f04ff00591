"""`eval` with a real engine, killed in the middle and continued with more responses per problem."""

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megatron_bapo.config.model import CreateModelConfig
from megatron_bapo.metrics.sinks import read_rows
from megatron_bapo.model.hf_create import create_checkpoint
from tests.e2e.small_disk import fill, free, small_disk
from tests.e2e.test_training import family_of, leftovers, weight_stores
from tests.processes import suspended

CONFIG = """
run_dir: {folder}/eval
model: {{path: {folder}/model}}
data:
  chat_template: false
  max_prompt_length: 400
  validation:
    reasoning_gym:
      chain_sum: {{min_terms: 2, max_terms: 2, min_digits: 1, max_digits: 1}}
      coin_flip: {{}}
    size: 40
reward: {{type: reasoning_gym}}
rollout: {{max_response_length: 4, max_num_seqs: 4}}
"""
NUM_PROBLEMS = 40
RUN_LIMIT_S = 1800


def start(folder: Path, *arguments: str) -> subprocess.Popen:
    command = [sys.executable, "-m", "megatron_bapo", "eval", str(folder / "eval.yaml"), *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=folder)


@pytest.fixture(scope="module")
def evaluated(tmp_path_factory: pytest.TempPathFactory) -> dict:
    folder = tmp_path_factory.mktemp("eval")
    model = CreateModelConfig(num_hidden_layers=1, hidden_size=32, intermediate_size=32, num_attention_heads=1,
                              num_key_value_heads=1, initializer_range=1.0)  # fmt: skip
    create_checkpoint(folder / "model", model, ["abc", "xyz"], seed=0)
    (folder / "eval.yaml").write_text(CONFIG.format(folder=folder))
    responses = folder / "eval" / "responses.jsonl"
    killed, deadline = start(folder, "evaluation.n=3"), time.monotonic() + RUN_LIMIT_S
    try:
        while not (responses.exists() and responses.stat().st_size):
            assert killed.poll() is None, killed.communicate()
            assert time.monotonic() < deadline, "no response was recorded in time"
            time.sleep(0.05)
        family = family_of(killed)
        with suspended(family):
            stores = weight_stores(family)
            killed.kill()
    finally:
        killed.kill()
        killed.communicate(timeout=RUN_LIMIT_S)
    kept = responses.read_text()
    with responses.open("a") as file:
        file.write('{"problem": 0, "sam')  # an incomplete line, as a crash of the machine may leave it
    continued = start(folder, "evaluation.n=4", "--json")
    output, errors = continued.communicate(timeout=RUN_LIMIT_S)
    return {
        "folder": folder / "eval",
        "kept": kept,
        "continued": (continued.returncode, output, errors),
        "left": leftovers(family, stores),
    }


def test_a_killed_evaluation_continues_and_leaves_no_processes(evaluated: dict) -> None:
    code, output, errors = evaluated["continued"]
    assert code == 0, output + errors
    num_kept = evaluated["kept"].count("\n")
    assert 0 < num_kept < 3 * NUM_PROBLEMS
    assert (evaluated["folder"] / "responses.jsonl").read_text().startswith(evaluated["kept"])
    assert f"{NUM_PROBLEMS} problems x 4 = {4 * NUM_PROBLEMS} responses" in errors
    assert f"{num_kept} exist already" in errors
    # Ray's agents take a while to notice that their parent has ended.
    assert [process for process in evaluated["left"] if "Agent" not in process] == []


def test_every_response_is_recorded_once_and_the_results_are_their_means(evaluated: dict) -> None:
    rows = read_rows(evaluated["folder"] / "responses.jsonl")
    results = json.loads((evaluated["folder"] / "results.json").read_text())

    assert sorted((row["problem"], row["sample"]) for row in rows) == [
        (p, s) for p in range(NUM_PROBLEMS) for s in range(4)
    ]
    assert json.loads(evaluated["continued"][1]) == results
    assert list(results["sources"]) == ["all", "reasoning_gym/chain_sum", "reasoning_gym/coin_flip"]
    for source, found in results["sources"].items():
        members = [row for row in rows if source in ("all", row["data_source"])]
        assert found["num_responses"] == len(members)
        assert found["mean_score"] == pytest.approx(sum(row["reward"] for row in members) / len(members))
        assert found["mean_tokens"] == pytest.approx(sum(row["num_tokens"] for row in members) / len(members))
        right = sum(row["reward"] >= 1.0 for row in members)
        assert found["metrics"]["mean@4"]["value"] == pytest.approx(right / len(members))
    # Responses to one problem are sampled with different seeds.
    assert len({row["text"] for row in rows if row["problem"] == 0}) > 1


def test_a_full_disk_ends_an_evaluation_with_a_message_and_the_same_command_continues_it(
    evaluated: dict, tmp_path: Path
) -> None:
    folder = evaluated["folder"].parent
    with small_disk(tmp_path / "disk", mib=8) as disk:
        arguments = (f"run_dir={disk / 'eval'}", "evaluation.n=1")
        process = start(folder, *arguments)
        reserved, deadline = disk / "eval" / "logs" / "messages.reserved", time.monotonic() + RUN_LIMIT_S
        while not (reserved.exists() and reserved.stat().st_size == 1 << 20):
            assert process.poll() is None, process.communicate()
            assert time.monotonic() < deadline, "the evaluation has not begun in time"
            time.sleep(0.01)
        fill(disk)  # no response is there yet, because the engine takes seconds to start
        _check_that_the_disk_is_full(process)
        fill(disk)  # what the failed evaluation has freed
        _check_that_the_disk_is_full(start(folder, *arguments))
        free(disk)
        continued = start(folder, *arguments)
        output, errors = continued.communicate(timeout=RUN_LIMIT_S)
        assert continued.returncode == 0, output + errors
        assert len(read_rows(disk / "eval" / "responses.jsonl")) == NUM_PROBLEMS


def _check_that_the_disk_is_full(process: subprocess.Popen) -> None:
    """Wait for the end of an evaluation, which must name its reason and keep its responses."""
    output, errors = process.communicate(timeout=RUN_LIMIT_S)
    assert process.returncode == 1, output + errors
    assert "No space left on device" in errors
    assert "0 responses are kept" in errors
    assert "Traceback" not in output + errors
