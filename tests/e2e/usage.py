"""Resource usage of a run's processes after each step: memory, open files and threads.

`python -m tests.e2e.usage --prompts 200 --steps 20` prints its growth over such a run.
"""

import argparse
import tempfile
import time
from collections import defaultdict
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import psutil

from megatron_bapo.metrics.sinks import read_rows
from tests.e2e.test_training import RUN_LIMIT_S, family_of, finish, leftovers, start, train_steps, weight_stores

ANSWERS = 4
ROLES = {
    "torch.distributed.run": "torchrun",
    "ray::Engine": "engine",
    "VLLM::EngineCore": "vLLM's core",
    "ray::RolloutService": "rollout service",
    "controller.trainer_rank": "trainer",
    "functions.worker": "reward",
    "raylet/raylet": "raylet",
    "gcs_server": "Ray's control store",
}


@dataclass(frozen=True)
class Usage:
    """Resource usage of one process after a step."""

    step: int
    anonymous_mib: float
    """Resident memory without file pages, which the kernel may drop and read again."""
    num_files: int
    num_threads: int


@dataclass
class Growth:
    """Growth of one process's usage over the second half of the steps."""

    role: str
    mib_per_step: float
    mib: float
    files: int
    threads: int


@dataclass
class WatchedRun:
    """Resource usage of a run with two engines."""

    num_steps: int
    usages: dict[tuple[str, int], list[Usage]]
    """Usage after each step, by role and process id."""
    num_shared: list[int]
    """Number of files in its weight store after each step."""
    num_processes: list[int]

    def growths(self) -> list[Growth]:
        found = []
        for (role, _), usages in sorted(self.usages.items()):
            late = [usage for usage in usages if usage.step > self.num_steps // 2]
            if len(late) < 3:  # a short-lived process
                continue
            steps, mib = ([getattr(u, name) for u in late] for name in ("step", "anonymous_mib"))
            slope = float(np.polyfit(steps, mib, 1)[0])
            files, threads = (_rise([getattr(u, name) for u in late]) for name in ("num_files", "num_threads"))
            found.append(Growth(role, slope, mib[-1], files, threads))
        return found


def _rise(counts: list[int]) -> int:
    """Return the rise of the median from the first three counts to the last three; a single count may be an outlier."""
    return int(np.median(counts[-3:]) - np.median(counts[:3]))


def watched_run(folder: Path, num_prompts: int, num_steps: int) -> WatchedRun:
    """Run a training to its end and record the resource usage after each step."""
    run_dir = folder / "run"
    process = start(
        run_dir,
        *("rollout.mode=async", "rollout.num_engines=2", "rollout.kv_cache_gib=0.02", "reward.num_workers=2"),
        *("rollout.max_response_length=16", "rollout.partial_rollout.token_budget=6", "data.max_prompt_length=32"),
        *("warm_start=null", "data.validation=null", "checkpoint.every_steps=100000"),
        *(f"data.train.size={(num_steps + 3) * num_prompts}", "data.train.reasoning_gym.chain_sum.max_digits=3"),
        *(f"trainer.total_steps={num_steps}", f"trainer.train_batch_size={ANSWERS * num_prompts}"),
        *(f"trainer.ppo_mini_batch_size={ANSWERS * num_prompts // 2}", "trainer.max_tokens_per_gpu=2048"),
    )
    run, seen = WatchedRun(num_steps, defaultdict(list), [], []), 0
    family: list[psutil.Process] = []
    stores: set[Path] = set()
    deadline = time.monotonic() + RUN_LIMIT_S
    while process.poll() is None:
        if time.monotonic() > deadline:
            process.terminate()
            raise AssertionError(f"step {seen + 1} of {num_steps} did not finish in time: {finish(process)}")
        time.sleep(0.1)
        steps = train_steps(run_dir)
        if not steps or steps[-1] == seen or steps[-1] == num_steps:
            continue
        seen, deadline = steps[-1], time.monotonic() + RUN_LIMIT_S
        if not stores:
            stores = weight_stores(family_of(process))
        family = family_of(process)
        for key, usage in _usages(family, seen):
            run.usages[key].append(usage)
        run.num_shared.append(sum(len(list(store.rglob("*"))) for store in stores))
        run.num_processes.append(len(family))
    code, output, errors = finish(process)
    assert code == 0, output + errors
    rows = [row["metrics"] for row in read_rows(run_dir / "metrics.jsonl") if row["phase"] == "train"]
    assert len(rows) == num_steps
    for row in rows:  # at most the groups of the current and of the next batch
        assert row["rollout/accounting/in_flight"] + row["rollout/accounting/buffered"] <= 2 * num_prompts
    assert leftovers(family, stores) == []
    return run


def _usages(family: list[psutil.Process], step: int) -> list[tuple[tuple[str, int], Usage]]:
    found = []
    for process in family:
        with suppress(psutil.NoSuchProcess), process.oneshot():
            command = " ".join([process.name(), *process.cmdline()])
            role = next((role for part, role in ROLES.items() if part in command), "other")
            memory = process.memory_info()
            mib = (memory.rss - memory.shared) / 2**20
            found.append(((role, process.pid), Usage(step, mib, process.num_fds(), process.num_threads())))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description="Print the growth of a run's resource usage over its second half.")
    parser.add_argument("--prompts", type=int, default=200, help="number of prompts per step")
    parser.add_argument("--steps", type=int, default=20, help="number of steps")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        run = watched_run(Path(folder), arguments.prompts, arguments.steps)
    print("| process | MiB | MiB a step | files | threads |\n| --- | --- | --- | --- | --- |")
    for growth in run.growths():
        files, threads = growth.files, growth.threads
        print(f"| {growth.role} | {growth.mib:.0f} | {growth.mib_per_step:+.2f} | {files:+d} | {threads:+d} |")
    for name, counts in (("processes", run.num_processes), ("files in the weight store", run.num_shared)):
        print(f"{name}: {counts[0]} after the first step, then {min(counts[1:])} to {max(counts[1:])}")


if __name__ == "__main__":
    main()
