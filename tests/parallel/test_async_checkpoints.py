"""Asynchronous checkpoints equal synchronous ones, and a process that dies while it writes one costs only that one."""

import json
import os
import subprocess
import sys
from pathlib import Path
from signal import SIGKILL, SIGXFSZ

import pytest
from transformers import AutoModelForCausalLM

from tests.parallel.launching import HERE, LIMIT_S, launch
from tests.parallel.layouts import MODELS
from tests.parallel.tensors import load_folder, same_bits, save_random_model
from tests.parallel.test_optimizer import BF16, EP2, OFFLOAD, PLAIN, PP2, SPREAD, TP2, case, experts

CASES = {
    "one": case(1, PLAIN),
    "dp2": case(2, SPREAD, timeout_s=4.0),
    "dp2-offload-bf16": case(2, OFFLOAD, **BF16),
    "pp2": case(2, SPREAD, {**PP2, "virtual_pipeline_model_parallel_size": 2}),
    "tp2-dp2": case(4, SPREAD, TP2),
    "experts-ep2-dp4": experts(4, SPREAD, EP2),
    "experts-ep2-plain-bf16": experts(2, PLAIN, EP2, **BF16),
}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with `NAME/` for every case."""
    root = tmp_path_factory.mktemp("async-checkpoints")
    for model in ("qwen3", "qwen3_moe"):
        save_random_model(AutoModelForCausalLM.from_config(MODELS[model]), root / model)
    cases = [{**settings, "name": name, "model": str(root / settings["model"])} for name, settings in CASES.items()]
    launch("checkpoint_ranks.py", cases, root, world_size=4)
    return root


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("name", CASES)
def test_an_asynchronous_checkpoint_has_the_bytes_of_a_synchronous_one(results: Path, name: str) -> None:
    waited, written = (contents(results / name / kind) for kind in ("sync", "async"))
    assert {Path(path).parts[0] for path in waited} == {"step-00000001", "step-00000002"}
    assert {Path(path).parts[1] for path in waited} == {"weights", "exp_avg", "exp_avg_sq", "state.json"}
    assert written == waited
    (first, second) = (load_folder(results / name / "async" / f"step-{step:08}" / "weights") for step in (1, 2))
    assert not same_bits(first, second)


@pytest.mark.parametrize("name", CASES)
def test_a_run_resumed_from_an_asynchronous_checkpoint_makes_the_same_update(results: Path, name: str) -> None:
    assert same_bits(*(load_folder(results / name / kind) for kind in ("continued", "resumed")))


@pytest.mark.parametrize("name", CASES)
def test_updates_do_not_change_what_is_being_written(results: Path, name: str) -> None:
    assert json.loads((results / name / "facts.json").read_text())["snapshot_keeps_its_values"]


@pytest.mark.parametrize("name", CASES)
def test_the_copy_of_the_state_takes_the_bytes_that_are_planned(results: Path, name: str) -> None:
    assert json.loads((results / name / "facts.json").read_text())["copy_is_as_planned"]


@pytest.mark.parametrize("name", CASES)
def test_both_ways_of_saving_report_their_seconds(results: Path, name: str) -> None:
    metrics = json.loads((results / name / "facts.json").read_text())["metrics"]
    for found in metrics.values():
        assert set(found) == {"checkpoint/blocked_s", "checkpoint/wait_s", "checkpoint/write_s"}
        assert found["checkpoint/wait_s"] < found["checkpoint/blocked_s"]
    assert metrics["sync"]["checkpoint/write_s"] <= metrics["sync"]["checkpoint/blocked_s"]


def test_a_commit_may_take_longer_than_a_collective(results: Path) -> None:
    assert [path.name for path in (results / "dp2" / "slow").iterdir()] == ["step-00000001"]


KILLED = {
    "killed-before-the-first-file": (1, SIGKILL, "step-00000001"),
    "killed-within-a-file": (1, SIGXFSZ, "step-00000001"),
    "killed-between-two-states": (0, SIGKILL, "step-00000001"),
    "killed-before-the-state": (0, SIGKILL, "step-00000001"),
    "killed-before-the-rename": (0, SIGKILL, "step-00000001"),
    "killed-before-old-ones-are-deleted": (0, SIGKILL, "step-00000002"),
    "killed-while-old-ones-are-deleted": (0, SIGKILL, "step-00000002"),
}
"""The rank that is killed, its signal, and the newest complete checkpoint afterwards."""


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with `FAULT/` for every fault, and `facts.json`."""
    root = tmp_path_factory.mktemp("killed")
    save_random_model(AutoModelForCausalLM.from_config(MODELS["qwen3"]), root / "model")
    command = [sys.executable, str(HERE / "killed_checkpoint_ranks.py"), str(root / "model"), str(root)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(HERE.parents[1])}
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    return root


def facts_of(root: Path, fault: str) -> dict:
    return json.loads((root / "facts.json").read_text())[fault]


@pytest.mark.parametrize("fault", KILLED)
def test_a_process_killed_at_any_stage_of_a_write_leaves_one_complete_checkpoint(killed: Path, fault: str) -> None:
    rank, signal, newest = KILLED[fault]
    found = facts_of(killed, fault)
    assert found["exit_codes"][rank] == -signal
    assert found["exit_codes"][1 - rank] == 0
    assert list(found["failures"]) == [f"failure-{1 - rank}"]
    assert found["complete"] == [newest]


@pytest.mark.parametrize("fault", [*KILLED, "cannot-write"])
def test_a_run_resumed_after_a_fault_saves_the_bytes_of_one_without_faults(killed: Path, fault: str) -> None:
    assert facts_of(killed, fault)["resumed"] == [0, 0]
    without, after = (contents(killed / name / "checkpoints") for name in ("none", fault))
    assert {Path(path).parts[0] for path in without} == {"step-00000004"}
    assert after == without


def test_a_write_that_fails_on_one_rank_fails_on_all_and_leaves_the_checkpoint_before_it(killed: Path) -> None:
    found = facts_of(killed, "cannot-write")
    assert found["exit_codes"] == [0, 0]
    assert found["complete"] == ["step-00000001"]
    assert set(found["failures"]) == {"failure-0", "failure-1"}
    assert all("File too large" in message for message in found["failures"].values())
