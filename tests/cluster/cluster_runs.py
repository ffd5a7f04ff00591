"""A run on two hosts by torchrun's variables, as a Slurm job or as a heterogeneous one, and what is left of it."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Literal

import psutil

from megatron_bapo.run_directory import RunDirectory
from tests.cluster.launched import ENVIRONMENT, LAUNCH, START_LIMIT_S, train_steps, write_config, write_token
from tests.cluster.test_two_hosts import HETEROGENEOUS, TWO_NODES, submitted
from tests.cluster.two_hosts import SlurmCluster, TwoHosts, slurm_cluster
from tests.e2e.small_disk import small_disk
from tests.e2e.test_training import weight_stores
from tests.processes import command_line, is_alive, title

Way = Literal["torchrun", "Slurm", "heterogeneous Slurm"]
DISK_MIB = 64
LIMIT_S = 300.0
ENDED = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "PENDING")
"""States of a job that has ended or is queued again."""


def wait_until(is_true: Callable[[], object], what: str, limit_s: float = LIMIT_S) -> None:
    deadline = time.monotonic() + limit_s
    while not is_true():
        assert time.monotonic() < deadline, f"{what}: not within {limit_s:.0f} s"
        time.sleep(0.2)


class ClusterRun(ABC):
    """A run in `disk`/run, a small file system; temporary files of both hosts are in `temporary`."""

    def __init__(self, hosts: TwoHosts, folder: Path, disk: Path, temporary: Path) -> None:
        self.hosts, self.folder, self.disk, self._temporary = hosts, folder, disk, temporary
        self.run_dir = disk / "run"
        self._config = write_config(folder, self.run_dir)
        self._stores: set[Path] = set()

    @abstractmethod
    def start(self) -> None:
        """Start the run, or continue it: the same command each time."""

    @abstractmethod
    def exit_code(self) -> str | None:
        """Return how the run has ended, None before."""

    @abstractmethod
    def terminate(self, host: int) -> None:
        """Send SIGTERM to the script on a host."""

    def own_processes(self, host: int) -> dict[int, psutil.Process]:
        """Return the run's processes on a host."""
        return {pid: process for pid, process in self.hosts.processes(host).items() if is_alive(process)}

    def kill(self, host: int, matches: Callable[[psutil.Process], bool]) -> None:
        """Send SIGKILL to the only process on a host that matches."""
        (process,) = [each for each in self.own_processes(host).values() if matches(each)]
        process.kill()

    def furthest_step(self) -> int:
        return max(train_steps(self.run_dir), default=0)

    def saved_step(self) -> int:
        """Return the step of the newest checkpoint."""
        return RunDirectory(self.run_dir).saved_step

    def wait_for_step(self, step: int) -> None:
        """Wait for a step; fails with the ends of the logs if the run ends or takes too long."""
        deadline = time.monotonic() + START_LIMIT_S
        while step not in train_steps(self.run_dir):
            if time.monotonic() > deadline or self.exit_code() is not None:
                logs = [*self.folder.glob("*.log"), *self.run_dir.rglob("*.log")]
                ends = "\n".join(f"{log}:\n{log.read_text(errors='replace')[-2000:]}" for log in logs)
                raise AssertionError(f"step {step} did not finish (exit code: {self.exit_code()})\n{ends}")
            time.sleep(0.5)
        self._find_stores()

    def wait_for_agents(self) -> None:
        """Wait until the launcher has begun to start the run's parts on both hosts."""
        wait_until(
            lambda: all(any(is_agent(each) for each in self.own_processes(host).values()) for host in (0, 1)),
            "the launcher has agents on both hosts",
        )
        self._find_stores()

    def _find_stores(self) -> None:
        """Remember the weight stores, because other runs on this machine have theirs in the same folder."""
        self._stores |= weight_stores([*self.own_processes(0).values(), *self.own_processes(1).values()])

    def wait_for_end(self) -> str:
        """Wait until the run has ended and none of its processes is left; return how it has ended."""
        wait_until(lambda: self.exit_code() is not None, "the run has ended")
        wait_until(lambda: not (self.own_processes(0) or self.own_processes(1)), "its processes have ended", 60)
        code = self.exit_code()
        assert code is not None
        return code

    def left(self) -> list[str]:
        """Return what a run that has ended has left in temporary folders, shared memory and its run directory."""
        stores = {store for store in self._stores if store.exists()}
        found = {*stores, *self._temporary.iterdir(), *self.run_dir.glob("slurm/.token-*")}
        return sorted(str(path.name) for path in found)

    def end_now(self) -> None:
        """Kill the run as it stands, and remove its temporary files."""
        for host in (0, 1):
            for process in self.own_processes(host).values():
                with suppress(psutil.NoSuchProcess):
                    process.kill()
        self.wait_for_end()
        for path in self._temporary.iterdir():
            shutil.rmtree(path)
        for token in self.run_dir.glob("slurm/.token-*"):
            token.unlink()


def is_launcher(process: psutil.Process) -> bool:
    return command_line(process)[1:4] == ["-m", "megatron_bapo", "train"]


def is_raylet(process: psutil.Process) -> bool:
    return title(process) == "raylet"


def is_agent(process: psutil.Process) -> bool:
    return title(process).startswith("ray::NodeAgent")


class TorchrunRun(ClusterRun):
    """launch/torchrun_node.sh on both hosts."""

    def __init__(self, hosts: TwoHosts, folder: Path, disk: Path, temporary: Path) -> None:
        super().__init__(hosts, folder, disk, temporary)
        self._token = write_token(folder)
        self._nodes: list[subprocess.Popen] = []

    def start(self) -> None:
        master = {"NNODES": "2", "MASTER_ADDR": self.hosts.addresses[0], "RAY_AUTH_TOKEN_PATH": str(self._token)}
        self._nodes = []
        for rank in (0, 1):
            with (self.folder / f"node-{rank}.log").open("ab") as log:
                command = [*self.hosts.on(rank), str(LAUNCH / "torchrun_node.sh"), str(self._config)]
                environment = ENVIRONMENT | master | {"NODE_RANK": str(rank), "TMPDIR": str(self._temporary)}
                self._nodes.append(subprocess.Popen(command, stdout=log, stderr=log, env=environment, cwd=self.folder))

    def exit_code(self) -> str | None:
        codes = [node.poll() for node in self._nodes]
        return None if None in codes else ", ".join(map(str, codes))

    def terminate(self, host: int) -> None:
        self._nodes[host].terminate()


class SlurmRun(ClusterRun):
    """The `submit` command, with a plain or a heterogeneous job."""

    def __init__(self, cluster: SlurmCluster, nodes: str, folder: Path, disk: Path, temporary: Path) -> None:
        super().__init__(cluster.hosts, folder, disk, temporary)
        self.cluster, self._nodes = cluster, folder / "nodes.yaml"
        self._nodes.write_text(nodes)
        self._daemons = {pid for host in (0, 1) for pid in cluster.hosts.processes(host)}
        cluster.environment["TMPDIR"] = str(temporary)
        self.job = ""

    def start(self) -> None:
        if self.job and self._state() == "PENDING":  # a requeued job starts by itself, but only after two minutes
            self.cluster.call("scontrol", "update", f"JobId={self.job}", "StartTime=now+4")
        else:
            self.job = submitted(self.cluster, self._config, "--cluster", self._nodes)
        wait_until(lambda: self._state() != "PENDING", "Slurm has started the job")

    def own_processes(self, host: int) -> dict[int, psutil.Process]:
        return {pid: each for pid, each in super().own_processes(host).items() if pid not in self._daemons}

    def exit_code(self) -> str | None:
        state = self._state()
        return None if state not in ENDED else f"{self._field('ExitCode').split(':')[0]}, {state}"

    def terminate(self, host: int) -> None:
        assert host == 0, "the batch script runs on the first host"
        self.cluster.call("scancel", "--batch", "--signal=TERM", self.job)

    def requeue(self) -> None:
        self.cluster.call("scontrol", "requeue", self.job)

    def end_now(self) -> None:
        if self.exit_code() is None:
            self.cluster.call("scancel", self.job)
        super().end_now()

    def _state(self) -> str:
        return self._field("JobState")

    def _field(self, name: str) -> str:
        """Return a field of the job; of a heterogeneous one's first component, which runs the launcher."""
        component = self.cluster.call("scontrol", "show", "job", self.job, "--oneliner").splitlines()[0]
        return component.split(f"{name}=")[1].split()[0]


@contextmanager
def cluster_run(way: Way, hosts: TwoHosts, folder: Path) -> Iterator[ClusterRun]:
    """Prepare a run on the hosts; it is killed at the end of the context."""
    folder.chmod(0o755)
    temporary = Path(tempfile.mkdtemp(prefix="bapo-"))  # a short path, because Ray creates its sockets there
    with ExitStack() as stack:
        stack.callback(shutil.rmtree, temporary)
        disk = stack.enter_context(small_disk(folder / "disk", mib=DISK_MIB))
        if way == "torchrun":
            run = TorchrunRun(hosts, folder, disk, temporary)
        else:
            cluster = stack.enter_context(slurm_cluster(hosts, folder / "slurm", kill_wait_s=30))
            run = SlurmRun(cluster, TWO_NODES if way == "Slurm" else HETEROGENEOUS, folder, disk, temporary)
        run.start()
        stack.callback(run.end_now)
        yield run
