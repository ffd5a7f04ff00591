"""Whole runs, some resumed or failing, with real parts: Ray, a vLLM engine, reward workers and two trainer ranks."""

import gzip
import ipaddress
import json
import re
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from statistics import fmean
from typing import IO

import numpy as np
import psutil
import pyarrow.parquet as pq
import pytest
import torch
from mlflow import MlflowClient
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from transformers import AutoModelForCausalLM, AutoTokenizer

from megatron_bapo.config.model import CreateModelConfig
from megatron_bapo.data.rollout_files import read_rollouts, rollout_files
from megatron_bapo.data.rollout_table import MAX_TEXT
from megatron_bapo.metrics.sinks import read_rows
from megatron_bapo.model.hf_create import create_checkpoint
from megatron_bapo.run_directory import RunDirectory
from megatron_bapo.text import visible
from megatron_bapo.viewer.timeline import Timeline
from megatron_bapo.weight_sync.transport import PREFIX, SHARED_MEMORY
from tests.e2e.small_disk import fill, free, small_disk
from tests.parallel.tensors import load_folder
from tests.processes import command_line, is_alive, sockets, suspended
from tests.tolerances import ENGINE_LOG_PROB
from tests.unit.metrics.wandb_files import read_wandb

CONFIG = """
run_dir: {run_dir}
model:
  dtype: float32
  create: {{num_hidden_layers: 2, hidden_size: 64, intermediate_size: 128, num_attention_heads: 2,
           num_key_value_heads: 2, head_dim: 32}}
parallel: {{world_size: 2, tensor_model_parallel_size: 2, sequence_parallel: true}}
data:
  chat_template: false
  max_prompt_length: 24
  train:
    reasoning_gym: {{chain_sum: &task {{min_terms: 2, max_terms: 2, min_digits: 1, max_digits: 1}}}}
    size: 60
  validation: {{reasoning_gym: {{chain_sum: *task}}, size: 8, seed: 1}}
reward: {{type: reasoning_gym}}
warm_start: {{num_steps: 6, batch_size: 16}}
rollout: {{n: 4, max_response_length: 4}}
evaluation: {{max_response_length: 6}}
trainer: {{total_steps: 4, train_batch_size: 32, ppo_mini_batch_size: 16, max_tokens_per_gpu: 128}}
optimizer: {{lr: 1.0e-3}}
checkpoint: {{every_steps: 2}}
logging: {{dump_rollouts: true, dump_validation: true, rollouts: {{every_steps: 1, num_prompts: 8}}}}
"""
TRACKERS = (
    *("logging.wandb.project=e2e", "logging.wandb.mode=offline", "logging.wandb.rollouts=true"),
    "logging.mlflow.experiment=e2e",
)
RUN_LIMIT_S = 1800
ENGINE_AND_TIMING_METRICS = (
    "rollout/",
    "weight_sync/",
    "timing_s/",
    "checkpoint/",
    "perf/throughput",
    "perf/tflops_per_gpu",
    "perf/cpu_",
)
MISMATCH_METRICS = (
    *("training/rollout_probs_", "training/gen_kl_error", "training/token_mult_prob_error"),
    *("training/sampling_importance_ratio", "actor/bapo_specul", "perf/model_flops"),
)
"""Metrics of the mismatch with engines, and of the check of the bounds that takes the place of a scoring pass there."""


def start(run_dir: Path, *overrides: str, log: IO[str] | None = None) -> subprocess.Popen:
    """Start a run; with `log` it prints there."""
    config = run_dir.parent / f"{run_dir.name}.yaml"
    config.write_text(CONFIG.format(run_dir=run_dir))
    command = [sys.executable, "-m", "megatron_bapo", "train", str(config), *overrides]
    out = log or subprocess.PIPE
    return subprocess.Popen(command, stdout=out, stderr=out, text=True, cwd=run_dir.parent)


def finish(process: subprocess.Popen) -> tuple[int, str, str]:
    output, errors = process.communicate(timeout=RUN_LIMIT_S)
    return process.returncode, output, errors


def train_steps(run_dir: Path) -> list[int]:
    rows = read_rows(run_dir / "metrics.jsonl") if (run_dir / "metrics.jsonl").exists() else []
    return [row["step"] for row in rows if row["phase"] == "train"]


def groups_of_step(run_dir: Path, step: int) -> set[tuple]:
    """Return the step's prompt ids with the tokens of their responses."""
    responses: dict[str, list] = {}
    for row in pq.read_table(run_dir / f"rollouts/step-{step:08d}.parquet").to_pylist():
        responses.setdefault(row["prompt_id"], []).append(tuple(row["response_token_ids"]))
    return {(prompt_id, *tokens) for prompt_id, tokens in responses.items()}


def wait_for_step(run_dir: Path, step: int) -> None:
    deadline = time.monotonic() + RUN_LIMIT_S
    while step not in train_steps(run_dir):
        assert time.monotonic() < deadline, f"step {step} did not finish in time"
        time.sleep(0.2)


def family_of(process: subprocess.Popen) -> list[psutil.Process]:
    """Return the launcher and all processes that it has started: Ray, engines, reward workers, trainer ranks."""
    launcher = psutil.Process(process.pid)
    return [launcher, *launcher.children(recursive=True)]


def weight_stores(family: list[psutil.Process]) -> set[Path]:
    """Return the weight stores, folders in shared memory, that these processes use."""
    stores = set()
    for process in family:
        with suppress(psutil.Error):
            folders = [Path(argument) for argument in process.cmdline() if f"/{PREFIX}" in argument]
            folders += [Path(file.path) for file in process.open_files() if f"/{PREFIX}" in file.path]
            stores |= {SHARED_MEMORY / folder.relative_to(SHARED_MEMORY).parts[0] for folder in folders}
    return stores


def leftovers(family: list[psutil.Process], stores: set[Path]) -> list[str]:
    """Return the processes and weight stores of a run that are left after its end."""
    assert stores, "a run has a weight store"
    _, alive = psutil.wait_procs(family, timeout=10)
    return [*map(str, filter(is_alive, alive)), *(str(store) for store in stores if store.exists())]


def open_to_the_network(family: list[psutil.Process]) -> list[str]:
    """Return the listening sockets that other machines could reach."""
    return [
        f"{command_line(process)}: {connection.laddr}"
        for process in family
        for connection in sockets(process, "tcp")
        if connection.status == psutil.CONN_LISTEN
        and not ipaddress.ip_address(connection.laddr.ip.removeprefix("::ffff:")).is_loopback
    ]


def vllms_sockets(family: list[psutil.Process]) -> set[Path]:
    """Return vLLM's Unix sockets, whose names are UUIDs."""
    paths = {Path(connection.laddr) for process in family for connection in sockets(process, "unix")}
    return {path for path in paths if re.fullmatch(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", path.name)}


@pytest.fixture(scope="module")
def resumed(tmp_path_factory: pytest.TempPathFactory) -> dict:
    """A run that Ctrl-C stops after its first step and that a second command completes with another weight transport.

    At first the trainer ranks send weights to the engine; then the engine loads them from its own store. Groups are
    trained on twice.
    """
    run_dir = tmp_path_factory.mktemp("e2e") / "run"
    first = stopped(signal.SIGINT, run_dir, "rollout.max_reuse=2", "weight_sync.transport=nccl", *TRACKERS)
    again = ("rollout.max_reuse=2", "weight_sync.engine_store=own", "weight_sync.full_every=2", *TRACKERS)
    return {**first, "run_dir": run_dir, "second": finish(start(run_dir, *again))}


def stopped(number: signal.Signals, run_dir: Path, *overrides: str) -> dict:
    """Start a run, send the signal to its launcher after the first step, and return what was seen and is left of it."""
    process = start(run_dir, *overrides)
    wait_for_step(run_dir, 1)
    family = family_of(process)
    with suspended(family):
        listening, stores = open_to_the_network(family), weight_stores(family)
        sockets, rendezvous = vllms_sockets(family), [path for store in stores for path in store.glob("vllm_dist_*")]
        process.send_signal(number)
    first = finish(process)
    return {
        "first": first,
        "listening": listening,
        "stores": stores,
        "sockets": sockets,
        "rendezvous": rendezvous,
        "steps_before": train_steps(run_dir),
        "saved_step": RunDirectory(run_dir).saved_step,
        "left": leftovers(family, stores),
    }


def check_stopped(seen: dict, num_steps: int) -> None:
    """Check that a run of `num_steps` was stopped cleanly before its end."""
    code, output, errors = seen["first"]
    assert code == 130, output + errors
    assert "Stopped; the state is saved. Continue with the same command" in output
    assert "python -m megatron_bapo train" in output
    assert seen["left"] == []
    assert 1 <= len(seen["steps_before"]) < num_steps
    assert seen["saved_step"] == seen["steps_before"][-1]


def test_ctrl_c_saves_the_state_names_the_resume_command_and_leaves_nothing_running(resumed: dict) -> None:
    check_stopped(resumed, 4)


def test_sigterm_saves_the_state_and_the_same_command_continues_without_a_gap(tmp_path: Path) -> None:
    """The run is asynchronous, so its engine generates while it is stopped."""
    run_dir, num_steps = tmp_path / "run", 8
    asynchronous = ("rollout.mode=async", "rollout.max_staleness=1", f"trainer.total_steps={num_steps}")
    check_stopped(stopped(signal.SIGTERM, run_dir, *asynchronous), num_steps)
    code, output, errors = finish(start(run_dir, *asynchronous))
    assert code == 0, output + errors
    assert train_steps(run_dir) == [*range(1, num_steps + 1)]


def test_nothing_listens_beyond_the_loopback_interface(resumed: dict) -> None:
    assert resumed["listening"] == []


def test_vllms_temporary_files_are_in_the_weight_store_and_removed_with_it(resumed: dict) -> None:
    """So they are removed even if an engine is killed."""
    assert resumed["sockets"]
    assert {socket.parent for socket in resumed["sockets"]} <= resumed["stores"]
    assert resumed["rendezvous"]


def test_the_same_command_continues_and_completes(resumed: dict) -> None:
    code, output, errors = resumed["second"]
    assert code == 0, output + errors
    assert train_steps(resumed["run_dir"]) == [1, 2, 3, 4]
    warm_start = [r["step"] for r in read_rows(resumed["run_dir"] / "metrics.jsonl") if r["phase"] == "warm_start"]
    assert warm_start == [1, 2, 3, 4, 5, 6]
    last = len(resumed["steps_before"])
    assert len(groups_of_step(resumed["run_dir"], last) & groups_of_step(resumed["run_dir"], last + 1)) == 4


def test_every_weight_update_passes_the_probe(resumed: dict) -> None:
    rows = [row["metrics"] for row in read_rows(resumed["run_dir"] / "metrics.jsonl") if row["phase"] == "train"]
    assert all(0 <= row["weight_sync/probe_diff_max"] < ENGINE_LOG_PROB for row in rows)
    # Recorded for batches that the current weights sampled, which is the first one.
    assert rows[0]["training/rollout_probs_diff_max"] < ENGINE_LOG_PROB
    versions = [row["training/policy_version"] for row in rows]
    assert versions == sorted(set(versions))
    relayed = [row["weight_sync/relay_bytes"] for row in rows]
    assert relayed[0] == rows[0]["weight_sync/store_bytes"]  # from rank to rank, each byte leaves the trainer once
    assert all(0 < num_bytes < 1.01 * rows[0]["weight_sync/store_bytes"] for num_bytes in relayed[-1:])


def test_held_out_prompts_are_evaluated_before_and_after(resumed: dict) -> None:
    rows = [row for row in read_rows(resumed["run_dir"] / "metrics.jsonl") if row["phase"] == "validation"]
    assert [row["step"] for row in rows] == [0, 4]
    assert all(0.0 <= row["metrics"]["val/mean@4"] <= row["metrics"]["val/best@4"] <= 1.0 for row in rows)
    files = rollout_files(resumed["run_dir"] / "validation_rollouts")
    assert [*files] == [0, 4]
    for row, path in zip(rows, files.values(), strict=True):
        header, groups = read_rollouts(path)
        assert (header.step, header.num_groups, header.n, header.sampling["temperature"]) == (row["step"], 8, 4, 1.0)
        responses = [trajectory for group in groups for trajectory in group.trajectories]
        assert any(response.text for response in responses)
        assert fmean(response.reward for response in responses) == pytest.approx(row["metrics"]["val/score/mean@4"])


def test_the_sampled_rollouts_of_all_prompts_add_up_to_the_metrics(resumed: dict) -> None:
    files = sorted((resumed["run_dir"] / "sampled_rollouts").glob("step-*.parquet"))
    updates = read_rows(resumed["run_dir"] / "updates.jsonl")
    assert len(files) == 4
    for step, path in enumerate(files, start=1):
        rows = pq.read_table(path).to_pylist()
        for number, update in enumerate((row for row in updates if row["step"] == step), start=1):
            used, metrics = [row for row in rows if row["update"] == number], update["metrics"]
            assert len(used) == 16

            def flat(name: str, used: list[dict] = used) -> np.ndarray:
                return np.concatenate([row[name] for row in used])

            for bit, side in ((1, "upper"), (2, "lower"), (4, "dual")):
                assert np.mean((flat("marks") & bit) > 0) == pytest.approx(metrics[f"actor/pg_clipfrac_{side}"])
            log_ratio = flat("log_probs") - flat("rollout_log_probs")
            assert -log_ratio.mean() == pytest.approx(metrics["actor/ppo_kl"], rel=1e-4, abs=1e-6)
            assert np.exp(log_ratio).max() == pytest.approx(metrics["actor/ratio_max"], rel=1e-5)
            assert flat("entropy").mean() == pytest.approx(metrics["actor/entropy"], rel=1e-5)
            bounds = (metrics["actor/bapo_clip_low"], metrics["actor/bapo_clip_high"])
            assert {(row["clip_low"], row["clip_high"]) for row in used} == {tuple(np.float32(bounds).tolist())}
        texts = {row["text"] for row in pq.read_table(resumed["run_dir"] / "rollouts" / path.name).to_pylist()}
        assert {row["text"] for row in rows} == texts


@pytest.fixture(scope="module")
def replayed(resumed: dict, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A new run that trains on the recorded rollouts of the resumed run."""
    run_dir = tmp_path_factory.mktemp("e2e") / "replayed"
    profiled = "logging.profile_steps=[2,3]", "logging.profile_ranks=[1]"
    process = start(run_dir, "--rollouts-from", str(resumed["run_dir"] / "rollouts"), *profiled)
    code, output, errors = finish(process)
    assert code == 0, output + errors
    assert "held-out prompts are not evaluated" in output
    assert sorted(path.name for path in (run_dir / "logs").iterdir()) == ["phase", "trainer.log"]
    return run_dir


def test_responses_to_held_out_prompts_have_a_limit_of_their_own(resumed: dict) -> None:
    tables = [pq.read_table(path).to_pylist() for path in (resumed["run_dir"] / "validation_rollouts").iterdir()]
    held_out = [len(row["response_token_ids"]) for rows in tables for row in rows]
    trained = [len(tokens) for _, *groups in groups_of_step(resumed["run_dir"], 1) for tokens in groups]
    assert max(held_out) == 6
    assert max(trained) == 4


def test_training_on_recorded_rollouts_repeats_the_run_bit_by_bit(resumed: dict, replayed: Path) -> None:
    """All metrics but those of engines, timing and held-out prompts are equal; the second run was not interrupted.

    The mismatch with the engines is measured in the first step only, because the others could be those of another run.
    """
    left_out = ENGINE_AND_TIMING_METRICS + MISMATCH_METRICS
    original, repeated = (
        [
            {name: value for name, value in row["metrics"].items() if not name.startswith(left_out)}
            for row in read_rows(run_dir / "metrics.jsonl")
            if row["phase"] != "validation"
        ]
        for run_dir in (resumed["run_dir"], replayed)
    )
    assert repeated == original
    assert len(repeated) == 6 + 4
    assert any(row["actor/grad_norm"] > 0 for row in repeated[6:])
    weights, same = (load_folder(run_dir / "hf") for run_dir in (resumed["run_dir"], replayed))
    assert all(torch.equal(weights[name], same[name]) for name in weights)


def test_a_full_disk_ends_the_run_at_once_with_a_message_and_the_same_command_continues_it(
    resumed: dict, tmp_path: Path
) -> None:
    """The run's log is on the full disk, too."""
    with small_disk(tmp_path / "disk", mib=24) as disk:
        run_dir, log = disk / "run", disk / "log"
        arguments = ("--rollouts-from", str(resumed["run_dir"] / "rollouts"), "checkpoint.every_steps=1")
        with log.open("w") as file:
            process = start(run_dir, *arguments, log=file)
            deadline = time.monotonic() + RUN_LIMIT_S
            while not list((run_dir / "checkpoints").glob("step-????????")):
                assert process.poll() is None, log.read_text()
                assert time.monotonic() < deadline
                time.sleep(0.01)
            with suspended(family_of(process)):
                fill(disk)
            assert process.wait(timeout=RUN_LIMIT_S) == 1
        (message,) = [line for line in log.read_text().splitlines() if line.startswith("error: ")]
        assert "No space left on device" in message
        assert re.search(rf"{re.escape(str(run_dir))} has \d+ MiB free of 24 MiB", message), message
        saved = max((run_dir / "checkpoints").glob("step-????????"))  # a partial one may be there, too
        assert f"{saved.name}, after step {json.loads((saved / 'state.json').read_text())['step']}, is kept" in message
        assert "Traceback" not in log.read_text()
        assert not (run_dir / "restarts.jsonl").exists()
        fill(disk)
        config = run_dir.parent / f"{run_dir.name}.yaml"
        full = subprocess.run(
            [sys.executable, "-m", "megatron_bapo", "train", str(config), *arguments],
            capture_output=True,
            text=True,
            timeout=RUN_LIMIT_S,
            cwd=tmp_path,
        )
        assert full.returncode == 1, full.stderr
        assert "No space left on device" in full.stderr
        assert "Traceback" not in full.stderr
        free(disk)
        code, output, errors = finish(start(run_dir, *arguments))
        assert code == 0, output + errors
        assert train_steps(run_dir) == [1, 2, 3, 4]


def test_the_configured_steps_and_ranks_are_profiled(replayed: Path) -> None:
    files = sorted((replayed / "profile").iterdir())
    assert [file.name for file in files] == ["step-2-rank-1.json.gz", "step-3-rank-1.json.gz"]
    events = json.loads(gzip.decompress(files[0].read_bytes()))["traceEvents"]
    assert {"step", "update", "aten::mm"} <= {event.get("name") for event in events}


def test_every_step_reports_its_flops_and_flops_per_second(replayed: Path) -> None:
    rows = [row["metrics"] for row in read_rows(replayed / "metrics.jsonl") if row["phase"] == "train"]
    for row in rows:
        rate = row["perf/model_flops"] / row["timing_s/update"] / 2
        assert row["perf/tflops_per_gpu"] == pytest.approx(rate / 1e12)
        assert row["perf/model_flops"] > 1e8


def test_the_repeated_run_writes_the_same_rollouts_and_advantages(resumed: dict, replayed: Path) -> None:
    for step in (1, 2, 3, 4):
        name = f"rollouts/step-{step:08d}.parquet"
        written, again = (pq.read_table(run_dir / name) for run_dir in (resumed["run_dir"], replayed))
        assert again.equals(written, check_metadata=True)
        assert len(written) == 32
        lengths = [len(row["response_token_ids"]) for row in written.to_pylist()]
        assert [len(row["advantages"]) for row in written.to_pylist()] == lengths


def test_the_export_loads_in_transformers_with_trained_weights(resumed: dict) -> None:
    run_dir = resumed["run_dir"]
    initial = AutoModelForCausalLM.from_pretrained(run_dir / "initial_model").state_dict()
    exported = AutoModelForCausalLM.from_pretrained(run_dir / "hf").state_dict()
    assert initial.keys() == exported.keys()
    assert any(not torch.equal(initial[name], exported[name]) for name in initial)
    assert AutoTokenizer.from_pretrained(run_dir / "hf").eos_token == "<|endoftext|>"


def test_the_last_checkpoint_holds_the_exported_weights(resumed: dict) -> None:
    run_dir = resumed["run_dir"]
    newest = sorted((run_dir / "checkpoints").glob("step-*"))[-1]
    saved = load_folder(newest / "weights")
    exported = load_folder(run_dir / "hf")
    assert saved.keys() == exported.keys()
    assert all(torch.equal(saved[name], exported[name]) for name in saved)
    assert json.loads((newest / "state.json").read_text())["step"] == 4


def test_report_and_tensorboard_show_the_run(resumed: dict) -> None:
    run_dir = resumed["run_dir"]
    page = (run_dir / "report.html").read_text()
    assert page.count("<svg") >= 8
    events = EventAccumulator(str(run_dir / "tensorboard" / "train"))
    events.Reload()
    assert [event.step for event in events.Scalars("critic/score/mean")] == [1, 2, 3, 4]


def test_starts_steps_and_requests_have_times_of_one_clock(resumed: dict) -> None:
    directory = RunDirectory(resumed["run_dir"])
    starts, requests = read_rows(directory.starts), read_rows(directory.requests)
    rows = {row["step"]: row for row in read_rows(directory.metrics) if row["phase"] == "train"}
    assert len(starts) == 2
    assert all(re.fullmatch(r"[0-9]+ × .+|[0-9]+ CPU cores.*", start["hardware"]) for start in starts)
    assert starts[0]["time_s"] < rows[1]["unix_s"] < starts[1]["time_s"] < rows[4]["unix_s"] <= time.time()
    trained = [request for request in requests if request["prompt_serial"] >= 0]
    assert all(starts[0]["time_s"] < request["sent_s"] < request["answered_s"] for request in trained)
    assert all(
        request["answered_s"] < rows[request["step"]]["unix_s"] for request in trained if request["step"] in rows
    )
    lanes = Timeline(directory).answer("", None, None)
    assert [engine["num"] for engine in lanes["engines"]] == [len(requests)]
    assert [step["step"] for step in lanes["trainer"]["steps"]] == [0, 1, 2, 3, 4], "0 is the warm start"


def test_weights_and_biases_gets_the_metrics_of_both_halves_as_one_run(resumed: dict) -> None:
    rows, found = read_rows(resumed["run_dir"] / "metrics.jsonl"), read_wandb(resumed["run_dir"])
    assert found.runs == [("e2e", (resumed["run_dir"] / "wandb_id").read_text(), "run")] * 2
    assert [number for number, _ in found.rows] == list(range(len(rows)))
    for row, (_, values) in zip(rows, found.rows, strict=True):
        if row["phase"] == "train":
            assert values["training/global_step"] == row["step"]
            assert values["critic/score/mean"] == row["metrics"]["critic/score/mean"]


def test_weights_and_biases_gets_the_sampled_rollouts_of_every_step(resumed: dict) -> None:
    tables = [table for _, name, table in read_wandb(resumed["run_dir"]).tables if name == "rollouts"]
    shown = {(row["step"], row["response"], row["reward"]) for table in tables for row in table}
    stored = [
        (int(path.stem.removeprefix("step-")), row["text"], row["reward"])
        for path in (resumed["run_dir"] / "sampled_rollouts").glob("step-*.parquet")
        for row in pq.read_table(path, columns=["text", "reward"]).to_pylist()
    ]
    assert {step for step, _, _ in shown} == {1, 2, 3, 4}
    assert shown == {(step, visible(text, MAX_TEXT), reward) for step, text, reward in stored}


def test_mlflow_gets_each_step_of_both_halves_once_and_the_end(resumed: dict) -> None:
    run_dir = resumed["run_dir"]
    client = MlflowClient(tracking_uri=f"sqlite:///{run_dir}/mlflow.db")
    experiment = client.get_experiment_by_name("e2e")
    assert experiment is not None
    (run,) = client.search_runs([experiment.experiment_id])
    assert (run.info.run_name, run.info.status) == ("run", "FINISHED")
    assert run.data.params["weight_sync.transport"] == "nccl"
    rows = [row for row in read_rows(run_dir / "metrics.jsonl") if row["phase"] == "train"]
    expected = {row["step"]: row["metrics"]["critic/score/mean"] for row in rows}
    found = client.get_metric_history(run.info.run_id, "critic/score/mean")
    assert [(metric.step, metric.value) for metric in found] == sorted(expected.items())


def test_a_changed_configuration_is_refused_for_an_existing_run(resumed: dict) -> None:
    code, _, errors = finish(start(resumed["run_dir"], "optimizer.lr=1e-5"))
    assert code == 2
    assert "optimizer.lr" in errors
    assert "run_dir=" in errors
    assert "Traceback" not in errors


@pytest.fixture(scope="module")
def broken(tmp_path_factory: pytest.TempPathFactory) -> dict:
    """The results of runs that must fail, started at the same time because a starting run leaves cores idle."""
    folder = tmp_path_factory.mktemp("broken")
    (folder / "broken_reward.py").write_text(
        "def score(data_source, solution_str, ground_truth, extra_info=None):\n    return 1 / 0\n"
    )
    reward = start(folder / "reward", "reward.type=function", "reward.function=broken_reward:score", "warm_start=null")
    engine = start(folder / "engine", "rollout.kv_cache_gib=0.0000001", "warm_start.num_steps=10000")
    probe = start(folder / "probe", "weight_sync.probe_tolerance=1e-12", "warm_start=null", "data.validation=null")
    return {"reward": finish(reward), "engine": finish(engine), "probe": finish(probe), "folder": folder}


def test_a_reward_function_that_raises_ends_the_run_with_its_message(broken: dict) -> None:
    code, output, errors = broken["reward"]
    assert code == 2, output
    assert "broken_reward:score" in errors
    assert "ZeroDivisionError" in errors


def test_an_engine_that_cannot_start_ends_the_run_with_its_reason(broken: dict) -> None:
    code, output, errors = broken["engine"]
    assert code != 0, output
    assert "engine 0" in errors or "vLLM" in errors
    assert "Traceback" not in errors


def test_a_failed_weight_probe_ends_the_run_at_once_with_its_numbers(broken: dict) -> None:
    code, output, errors = broken["probe"]
    assert code == 1, output
    assert re.search(r"gives token \d+ of the probe a log-prob of -\d+\.\d+, the trainer -\d+\.\d+; all tokens", errors)
    assert "weight_sync.probe_tolerance is 1e-12" in errors
    assert not (broken["folder"] / "probe" / "restarts.jsonl").exists()


def test_a_decoupled_run_with_a_reference_model_completes_and_reports_its_corrections(tmp_path: Path) -> None:
    """While the engine generates, the policy, its optimizer and the reference model are in host memory.

    Rollouts are truncated, and all log-probs are those of the tokens that sampling has kept.
    """
    process = start(
        tmp_path / "run",
        *("trainer.total_steps=2", "warm_start.num_steps=2", "evaluation.n=1", "evaluation.top_k=5"),
        *("rollout.top_k=6", "rollout.top_p=0.9", "algorithm.keep_sampling_mask=true"),
        *("algorithm.behaviour_policy=recomputed", "algorithm.rollout_correction.rollout_is=token"),
        *("algorithm.kl_loss_coef=0.01", "algorithm.kl_reward_coef=0.01", "algorithm.entropy_coeff=0.001"),
        *("algorithm.overlong.mode=penalty", "algorithm.overlong.buffer_length=2"),
        *("rollout.colocate=true", "trainer.offload=true"),
    )
    code, output, errors = finish(process)
    assert code == 0, output + errors
    rows = [row["metrics"] for row in read_rows(tmp_path / "run" / "metrics.jsonl") if row["phase"] == "train"]
    assert len(rows) == 2
    for row in rows:
        assert abs(row["rollout_corr/rollout_is_mean"] - 1) < ENGINE_LOG_PROB
        assert row["rollout_corr/rollout_rs_masked_fraction"] == 0
        assert row["training/rollout_probs_diff_max"] < ENGINE_LOG_PROB
        assert (
            row["critic/rewards/mean"] <= row["critic/score/mean"] - 0.1
        )  # most responses of four tokens are overlong
    # In the first step the policy equals the reference model, in the second it does not.
    assert abs(rows[0]["actor/reward_kl_penalty"]) < ENGINE_LOG_PROB < abs(rows[1]["actor/reward_kl_penalty"])
    assert rows[1]["actor/kl_loss"] > 0
    initial, reference = (load_folder(tmp_path / "run" / folder) for folder in ("initial_model", "reference"))
    assert any(not torch.equal(initial[name], reference[name]) for name in reference)


def train_rows(run_dir: Path) -> list[dict[str, float]]:
    return [row["metrics"] for row in read_rows(run_dir / "metrics.jsonl") if row["phase"] == "train"]


def test_an_asynchronous_run_without_rewards_is_distilled_from_a_deeper_teacher_on_an_engine(tmp_path: Path) -> None:
    """Tokens may be two policy versions old; one response per prompt is enough.

    The trainer's own copy of the teacher then repeats the steps on the recorded responses.
    """
    texts = [f"State the final answer to the following arithmetic problem: {number}" for number in range(9)]
    create_checkpoint(tmp_path / "teacher", CreateModelConfig(num_hidden_layers=3, vocab_size=384), texts, seed=3)
    overrides = (
        *(
            "trainer.total_steps=3",
            "warm_start.num_steps=2",
            "evaluation.n=1",
            "rollout.n=1",
            "rollout.temperature=0.7",
        ),
        *("rollout.mode=async", "rollout.max_staleness=2", "reward.type=none", "data.train.size=80"),
        *("algorithm.objective=distill", f"algorithm.distillation.teacher={tmp_path / 'teacher'}"),
    )
    code, output, errors = finish(start(tmp_path / "run", *overrides, "algorithm.distillation.engines.num_engines=1"))
    assert code == 0, output + errors
    rows = train_rows(tmp_path / "run")
    assert len(rows) == 3
    assert all(row["actor/teacher_kl"] > 0.01 and row["actor/num_dropped_tokens"] == 0 for row in rows)
    assert all(row["critic/rewards/mean"] == 0 and "critic/advantages/mean" not in row for row in rows)
    assert all(row["actor/grad_norm"] > 0 for row in rows)
    assert rows[0]["rollout/teacher_s"] > 0  # later batches may be scored before the batch ahead of them is taken

    teacher = AutoModelForCausalLM.from_pretrained(tmp_path / "teacher", dtype=torch.float32)
    for path in rollout_files(tmp_path / "run" / "rollouts").values():
        for trajectory in (each for group in read_rollouts(path)[1] for each in group.trajectories):
            prompt, response = (
                torch.from_numpy(each).long() for each in (trajectory.prompt_token_ids, trajectory.response_token_ids)
            )
            with torch.no_grad():
                logits = teacher(torch.cat([prompt, response])[None]).logits[0, len(prompt) - 1 : -1] / 0.7
            expected = logits.log_softmax(-1).gather(1, response[:, None])[:, 0].numpy()
            np.testing.assert_allclose(trajectory.teacher_log_probs, expected, atol=ENGINE_LOG_PROB, rtol=0)

    recorded = ("--rollouts-from", str(tmp_path / "run" / "rollouts"))
    code, output, errors = finish(start(tmp_path / "again", *recorded, *overrides))
    assert code == 0, output + errors
    for ours, theirs in zip(train_rows(tmp_path / "again"), rows, strict=True):
        for name in ("actor/teacher_kl", "actor/grad_norm"):
            assert ours[name] == pytest.approx(theirs[name], rel=1e-3), name
