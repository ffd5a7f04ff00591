"""Fault injection into whole runs: measures when each fault is detected and recovered from, and what is lost.

`python -m tests.e2e.faulted_run` prints the table of docs/reliability/fault_tolerance.md; `--random 50` injects 50
random faults, and `--busy 8` does so while 8 processes keep the cores busy.
"""

import argparse
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Self

import psutil
import pyarrow.parquet as pq

from megatron_bapo.cluster.interrupts import end_with_parent
from megatron_bapo.controller.training_loop import WEIGHT_UPDATE
from megatron_bapo.data.rollout_files import read_header, rollout_files
from megatron_bapo.metrics.sinks import read_rows
from tests.e2e import planted_reward
from tests.e2e.test_training import RUN_LIMIT_S, family_of, leftovers, start, train_steps, weight_stores
from tests.processes import command_line, is_alive, status, title
from tests.tolerances import ENGINE_LOG_PROB

Kind = Literal["kill", "stop", "raise", "hang", "slow", "exit"]
"""Kind of fault: a process gets kill -9 or SIGSTOP; a reward raises, never returns, is slow, or ends its process."""
Moment = Literal["generation", "core", "sync", "update", "start", "return", "relay", "source", "trainer"]
"""When and where a signal hits. `core` is vLLM's process under an engine; `start` and `return` hit the replacement when
it starts and when it serves; `relay` receives weights into the engines' own store, and `source` sends them."""
CORES = ("core", "update")
"""Moments that hit vLLM's process under an engine; `update` does at a random point of a weight update."""
SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}
RELAY = {"relay": "weight-store-1.log", "source": "weight-store-0.log"}
"""Log file of the actor that takes part in transfers between stores."""
RAISED, ENDED_TWICE = "KeyError: 'planted'", "ended its process twice"
"""Reasons of quarantined prompts. Two random faults may end both processes that a response's reward is tried in."""
MAX_STALENESS = 1
STEPS_PER_FAULT = 4
FAST_S, AHEAD_S, LAST_STEPS_S = 0.0, 0.5, 2.0
"""Duration of each reward: while faults keep up with the run, while the run is ahead of them, and in its last steps."""
NUM_LAST_STEPS = 11
"""Enough for the recoveries on a machine that has much other work; they take little time once all faults are over."""


@dataclass(frozen=True)
class Fault:
    kind: Kind
    moment: Moment = "generation"

    def __str__(self) -> str:
        if self.kind not in SIGNALS:
            return {
                "raise": "a reward raises",
                "hang": "a reward hangs",
                "slow": f"a reward takes {planted_reward.SLOW_S:.0f} s",
                "exit": "a reward ends its process",
            }[self.kind]
        signal_name = {"kill": "kill -9", "stop": "SIGSTOP"}[self.kind]
        where = {
            "generation": "of an engine that generates",
            "core": "of vLLM's core under an engine",
            "sync": "of an engine during a weight sync",
            "update": "of vLLM's core at a random point of a weight update",
            "start": "of the replacement while it starts",
            "return": "of the replacement as soon as it serves",
            "relay": "of the actor that receives into the engines' store",
            "source": "of the actor that sends from the trainer's store",
            "trainer": "of a trainer rank",
        }[self.moment]
        return f"{signal_name} {where}"


SCRIPT = (
    Fault("kill", "trainer"),
    Fault("kill"),
    Fault("kill", "start"),
    Fault("kill", "return"),
    Fault("kill", "core"),
    Fault("stop"),
    Fault("kill", "sync"),
    Fault("kill", "update"),
    Fault("stop", "sync"),
    Fault("raise"),
    Fault("hang"),
    Fault("exit"),
)
"""Each fault waits for recovery from the one before, except faults of a replacement and of rewards. The trainer comes
first, because a restart from the checkpoint removes later records of quarantined prompts."""


def random_faults(num: int, seed: int) -> list[Fault]:
    rng = random.Random(seed)
    kinds: list[Kind] = rng.choices(["kill", "stop", "raise", "hang", "slow", "exit"], [6, 3, 3, 2, 3, 3], k=num)
    moments: list[Moment] = rng.choices(["generation", "core", "sync", "update", "start"], [3, 2, 3, 4, 1], k=num)
    faults = [Fault(kind, moment) for kind, moment in zip(kinds, moments, strict=True)]
    # A core that hangs while it loads weights is lost only after rollout.start_timeout_s.
    return [Fault("stop", "sync") if fault == Fault("stop", "update") else fault for fault in faults]


@contextmanager
def busy_processes(num: int) -> Iterator[None]:
    """Keep the machine's cores busy with `num` processes in this context."""
    command = [sys.executable, "-c", "while True: pass"]
    processes = [subprocess.Popen(command, preexec_fn=end_with_parent) for _ in range(num)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


@dataclass
class Injected:
    fault: Fault
    victim: str
    """Name of the engine, or of the planted file."""
    pid: int
    at_s: float
    detected_s: float | None = None
    """Seconds after the fault."""
    recovered_s: float | None = None
    """Seconds after the fault."""


class FaultedRun:
    """A run of two engines, one reward process and two trainer ranks in `folder`."""

    def __init__(self, folder: Path, num_faults: int, *overrides: str) -> None:
        self.run_dir = folder / "run"
        self._folder = folder
        self._paced_s = 0.0
        self.total_steps = STEPS_PER_FAULT * num_faults + NUM_LAST_STEPS + 1
        for name in (planted_reward.PLANTED, planted_reward.TAKEN):
            (folder / name.name).mkdir()
        (folder / "planted_reward.py").write_text(Path(planted_reward.__file__).read_text())
        self._set_pace(FAST_S)
        self.injected: list[Injected] = []
        self.process = start(
            self.run_dir,
            *("rollout.mode=async", "rollout.max_response_length=24", f"rollout.max_staleness={MAX_STALENESS}"),
            *("rollout.num_engines=2", "rollout.health_check_interval_s=1", "rollout.health_check_timeout_s=5"),
            *("rollout.max_engine_restarts=6", "rollout.max_reward_failures=8", "rollout.start_timeout_s=200"),
            *("reward.type=function", "reward.function=planted_reward:score", "reward.timeout_s=4"),
            *("warm_start=null", "data.validation=null", "data.max_prompt_length=32"),
            *("checkpoint.every_steps=100000", "checkpoint.every_s=30"),
            *(f"data.train.size={12 * self.total_steps}", "data.train.reasoning_gym.chain_sum.max_digits=3"),
            *(f"trainer.total_steps={self.total_steps}", *overrides),
        )
        self.family: list[psutil.Process] = []
        self.stores: set[Path] = set()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        """End the run if it has not ended."""
        for _ in range(2):  # the second signal stops the run at once
            if self.process.poll() is None:
                self.process.terminate()
                time.sleep(1.0)
        try:
            self.process.communicate(timeout=60)
        except subprocess.TimeoutExpired:
            self.process.kill()

    def wait_for_first_step(self) -> None:
        self.wait_until(lambda: train_steps(self.run_dir)[:1] == [1], "the first step")
        self.family = family_of(self.process)
        self.stores = weight_stores(self.family)

    def wait_until(self, condition: Callable[[], Any], event: str, poll_s: float = 0.1) -> None:
        deadline = time.monotonic() + RUN_LIMIT_S
        while not condition():
            assert self.process.poll() is None, f"the run ended while waiting for {event}: {self._ending()}"
            assert time.monotonic() < deadline, f"timeout while waiting for {event}"
            self._pace()
            time.sleep(poll_s)

    def inject(self, faults: list[Fault], rng: random.Random | None = None) -> None:
        """Inject faults one after the other; with `rng` at random times, so that they may overlap."""
        self.wait_for_first_step()
        for num, fault in enumerate(faults):
            if rng is not None:
                time.sleep(rng.uniform(0.0, 3.0))
            before = self.injected[-1] if self.injected else None
            if fault.moment in RELAY:
                self._hit_relay(fault)
            elif fault.moment == "trainer":
                self._hit_trainer(fault)
            elif fault.kind in SIGNALS:
                self._hit_engine(fault, before, rng or random.Random(num))
            else:
                self._plant(fault, num)
            self.family = [*dict.fromkeys([*self.family, *family_of(self.process)])]
            self.stores |= weight_stores(self.family)
            if rng is None and not any(map(_overlaps, faults[num + 1 : num + 2])):
                self._wait_for_recovery()
        if rng is None:
            self._wait_for_recovery()
        self._set_pace(FAST_S)

    def finish(self) -> None:
        """Wait for the end of the run, and check its accounting, metrics, rollouts and leftovers."""
        output, errors = self.process.communicate(timeout=2 * RUN_LIMIT_S)
        assert self.process.returncode == 0, output + errors
        self._resolve()
        rows = [row["metrics"] for row in read_rows(self.run_dir / "metrics.jsonl") if row["phase"] == "train"]
        assert len(rows) == self.total_steps
        assert len(read_rows(self.run_dir / "updates.jsonl")) == 2 * self.total_steps
        for step, row in enumerate(rows, start=1):
            counts = {name.rsplit("/")[-1]: value for name, value in row.items() if "accounting" in name}
            assert counts.pop("taken") == sum(counts.values())
            assert counts["trained"] == 8 * step
            assert row["rollout/staleness/max"] <= MAX_STALENESS
            assert row.get("weight_sync/probe_diff_max", 0.0) < ENGINE_LOG_PROB
        assert rows[-1]["training/restarts"] == sum(one.fault.moment == "trainer" for one in self.injected)
        num_raised, num_ended_twice = len(self._quarantined(RAISED)), len(self._quarantined(ENDED_TWICE))
        assert rows[-1]["rollout/accounting/quarantined"] == len(self._quarantined()) == num_raised + num_ended_twice
        assert num_raised == self._num_injected("raise")
        assert num_ended_twice <= self._num_injected("exit") // 2
        self.counts = {name.rsplit("/")[-1]: int(v) for name, v in rows[-1].items() if "accounting" in name}
        if rollout_files(self.run_dir / "rollouts"):
            self._check_rollouts()
        assert leftovers(self.family, self.stores) == []

    def table(self) -> str:
        lines = ["| fault | detected after s | recovered after s | lost |", "| --- | --- | --- | --- |"]
        lost = self.counts["taken"] - sum(num for name, num in self.counts.items() if name != "taken")
        for one in self.injected:
            spans = (f"{span:.1f}" if span is not None else "" for span in (one.detected_s, one.recovered_s))
            lines.append(f"| {one.fault} | {' | '.join(spans)} | {lost} |")
        return "\n".join(lines)

    def engines(self) -> list[psutil.Process]:
        """Return the engine processes that run or start."""
        return [
            process
            for process in family_of(self.process)
            if "ray::Engine" in title(process) and is_alive(process) and status(process) != psutil.STATUS_STOPPED
        ]

    def _wait_for_recovery(self) -> None:
        """Wait until each fault is recovered from, except those of a replacement that a later fault has hit, too."""
        last = {one.victim: one for one in self.injected}

        def waiting_for() -> list[Injected]:
            self._resolve()
            return [one for one in last.values() if one.recovered_s is None]

        self.wait_until(lambda: not waiting_for(), f"{', '.join(str(one.fault) for one in last.values())} to end")

    def _hit_engine(self, fault: Fault, before: Injected | None, rng: random.Random) -> None:
        match fault.moment:
            case "generation" | "core":
                self.wait_until(lambda: len(self._serving()) > 0, "an engine that serves")
                victim = rng.choice(self._serving())
            case "sync" | "update":
                self._wait_for_sync(at=rng.random() if fault.moment == "update" else 0.0)
                victim = rng.choice(self._serving())
            case "start":
                if before is None or before.fault.kind not in SIGNALS:
                    return self._hit_engine(Fault(fault.kind), before, rng)
                self.wait_until(lambda: self._starting(before), f"the replacement of {before.victim}")
                time.sleep(rng.uniform(0.0, 4.0))
                victim = self._starting(before)
                assert victim is not None
            case "return":
                assert before is not None
                self.wait_until(lambda: self._resolve() or before.recovered_s is not None, "a replacement")
                victim = self._starting(before)
                assert victim is not None
        at_s = time.time()
        name = _engine_name(victim)
        if fault.moment in CORES:
            (victim,) = (child for child in victim.children() if "EngineCore" in title(child))
        victim.send_signal(SIGNALS[fault.kind])
        self.injected.append(Injected(fault, name, victim.pid, at_s))
        return None

    def _hit_relay(self, fault: Fault) -> None:
        """Kill a relay actor during a weight update; the fault is recovered from at the end of the update."""
        self._wait_for_sync()
        victim = next(process for process in family_of(self.process) if RELAY[fault.moment] in _output(process))
        one = Injected(fault, "", victim.pid, time.time())
        victim.kill()
        self.injected.append(one)
        self.wait_until(lambda: not self._is_syncing(), "the sync to end", 0.01)
        one.recovered_s = time.time() - one.at_s

    def _hit_trainer(self, fault: Fault) -> None:
        """Kill a trainer rank; the fault is recovered from when the restarted run completes a new step."""
        self.wait_until(lambda: len([*(self.run_dir / "checkpoints").glob("step-*[0-9]")]) > 0, "a checkpoint")
        victim = next(
            p for p in family_of(self.process) if "megatron_bapo.controller.trainer_rank" in command_line(p)[:4]
        )
        one, done, before = (
            Injected(fault, "", victim.pid, time.time()),
            max(train_steps(self.run_dir)),
            self._restarts(),
        )
        victim.kill()
        self.injected.append(one)
        self.wait_until(lambda: len(self._restarts()) > len(before), "a restart", 0.02)
        one.detected_s = self._restarts()[-1] - one.at_s
        assert "was killed by SIGKILL" in read_rows(self.run_dir / "restarts.jsonl")[-1]["reason"]
        self.wait_until(lambda: max(train_steps(self.run_dir), default=0) > done, "a new step")
        one.recovered_s = time.time() - one.at_s

    def _wait_for_sync(self, at: float = 0.0) -> None:
        """Wait for a weight update while an engine serves, and then for this fraction of the duration of an update."""
        duration_s = 0.0
        while True:
            self.wait_until(lambda: not self._is_syncing(), "a sync to end", 0.001)
            self.wait_until(self._is_syncing, "a sync", 0.001)
            start_s = time.monotonic()
            if at and not duration_s:
                self.wait_until(lambda: not self._is_syncing(), "a sync to end", 0.001)
                duration_s = time.monotonic() - start_s
                continue
            time.sleep(at * duration_s)
            if self._serving():
                return

    def _serving(self) -> list[psutil.Process]:
        """Return the engines that serve, by the recorded events."""
        self._resolve()
        state = {f"engine {index}": "serves" for index in range(2)}
        since = self._restarts()[-1:] or [0.0]
        state |= {event["engine"]: event["event"] for event in self._events() if event["time_s"] > since[0]}
        state |= {one.victim: "hit" for one in self.injected if one.detected_s is None}
        return [engine for engine in self.engines() if state.get(_engine_name(engine)) == "serves"]

    def _starting(self, before: Injected) -> psutil.Process | None:
        """Return the process that replaces the one that the fault before has hit."""
        found = [e for e in self.engines() if _engine_name(e) == before.victim and e.pid != before.pid]
        return found[-1] if found else None

    def _is_syncing(self) -> bool:
        return (self.run_dir / "logs" / "phase").read_text() == WEIGHT_UPDATE

    def _plant(self, fault: Fault, num: int) -> None:
        name = f"{fault.kind}-{num}"
        (self._folder / planted_reward.PLANTED.name / name).touch()
        taken = self._folder / planted_reward.TAKEN.name / name
        self.wait_until(taken.exists, "a reward to take the fault", 0.02)
        one = Injected(fault, name, int(taken.read_text()), time.time())
        self.injected.append(one)
        if fault.kind in ("hang", "exit"):
            self.wait_until(lambda: not psutil.pid_exists(one.pid), "the reward's process to end", 0.02)
            one.detected_s = one.recovered_s = time.time() - one.at_s
        if fault.kind == "raise":
            num_raised = self._num_injected("raise")
            self.wait_until(lambda: len(self._quarantined(RAISED)) == num_raised, "its prompt to be quarantined", 0.02)
            one.detected_s = one.recovered_s = time.time() - one.at_s
        if fault.kind == "slow":
            one.detected_s, one.recovered_s = 0.0, planted_reward.SLOW_S

    def _num_injected(self, kind: Kind) -> int:
        return sum(one.fault.kind == kind for one in self.injected)

    def _quarantined(self, reason: str = "") -> list[dict[str, Any]]:
        path = self.run_dir / "quarantined.jsonl"
        rows = read_rows(path) if path.exists() else []
        return [row for row in rows if reason in row["failures"][-1]]

    def _resolve(self) -> None:
        """Set the detection and recovery times of engine faults from the recorded events."""
        for one in self.injected:
            if one.fault.kind in SIGNALS and one.fault.moment not in (*RELAY, "trainer"):
                later = [e for e in self._events() if e["engine"] == one.victim and e["time_s"] >= one.at_s]
                lost = [e["time_s"] for e in later if e["event"] != "serves"]
                served = [e["time_s"] for e in later if e["event"] == "serves" and lost and e["time_s"] > lost[0]]
                one.detected_s = lost[0] - one.at_s if lost else None
                one.recovered_s = served[0] - one.at_s if served else None

    def _events(self) -> list[dict[str, Any]]:
        path = self.run_dir / "engine_events.jsonl"
        return read_rows(path) if path.exists() else []

    def _restarts(self) -> list[float]:
        """Return the times of restarts of the whole run."""
        path = self.run_dir / "restarts.jsonl"
        return [row["time_s"] for row in read_rows(path)] if path.exists() else []

    def _check_rollouts(self) -> None:
        """Check the recorded rollouts: each prompt was trained on once, and no token was too old."""
        prompt_ids: Counter[str] = Counter()
        for path in rollout_files(self.run_dir / "rollouts").values():
            version, rows = read_header(path).policy_version, pq.read_table(path).to_pylist()
            prompt_ids.update({row["prompt_id"] for row in rows})
            assert all(version - old <= MAX_STALENESS for row in rows for old in _versions(row))
        assert len(prompt_ids) == 8 * self.total_steps
        assert set(prompt_ids.values()) == {1}

    def _pace(self) -> None:
        """Slow the rewards down while the run is ahead of its faults, so that it does not end before them."""
        if time.monotonic() < self._paced_s + AHEAD_S:
            return
        self._paced_s = time.monotonic()
        num_steps = len(train_steps(self.run_dir))
        if num_steps >= self.total_steps - NUM_LAST_STEPS:
            self._set_pace(LAST_STEPS_S)
        else:
            self._set_pace(AHEAD_S if num_steps > STEPS_PER_FAULT * len(self.injected) else FAST_S)

    def _set_pace(self, seconds: float) -> None:
        partial = self._folder / "pace.partial"
        partial.write_text(str(seconds))
        partial.rename(self._folder / planted_reward.PACE.name)

    def _ending(self) -> str:
        output, errors = self.process.communicate()
        return output + errors


def _overlaps(fault: Fault) -> bool:
    """Return whether a scripted fault is injected before the run has recovered from the one before."""
    return fault.moment in ("start", "return") or fault.kind not in SIGNALS


def _versions(row: dict[str, Any]) -> list[int]:
    return [span["policy_version"] for span in row["version_spans"]]


def _output(process: psutil.Process) -> str:
    """Return the name of the file that the process's standard output goes to."""
    with suppress(OSError):
        return Path(f"/proc/{process.pid}/fd/1").readlink().name
    return ""


def _engine_name(process: psutil.Process) -> str:
    """Return the engine's name according to its log file."""
    try:
        log = Path(os.readlink(f"/proc/{process.pid}/fd/1"))
    except OSError:
        return ""
    return log.stem.partition("-restart")[0].replace("-", " ")


def main() -> None:
    parser = argparse.ArgumentParser(description="Inject faults into a run and print how each was recovered from.")
    parser.add_argument("--random", type=int, default=0, help="number of random faults instead of the scripted ones")
    parser.add_argument("--seed", type=int, default=0, help="seed of the random faults")
    parser.add_argument("--busy", type=int, default=0, help="number of processes that keep the cores busy meanwhile")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by SIGTERM"))  # the run and the processes end, too
    with tempfile.TemporaryDirectory() as folder, busy_processes(arguments.busy):
        faults = random_faults(arguments.random, arguments.seed) if arguments.random else [*SCRIPT]
        with FaultedRun(Path(folder), len(faults)) as run:
            run.inject(faults, random.Random(arguments.seed) if arguments.random else None)
            run.finish()
    print(run.table())
    print(", ".join(f"{name} {num}" for name, num in run.counts.items()))


if __name__ == "__main__":
    main()
