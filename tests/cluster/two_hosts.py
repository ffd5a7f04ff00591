"""Two "hosts" on this machine: network namespaces joined by a cable (veth), and Slurm nodes in them."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

PACKAGES = "slurmctld slurmd slurm-client munge iproute2"
NEEDED = ("slurmctld", "slurmd", "sbatch", "munged", "ip")
CABLE = "bapo0"
SLURM_CONF = """
ClusterName=bapo
SlurmctldHost={hostname}({first})
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={munge}/socket
ProctrackType=proctrack/linuxproc
TaskPlugin=task/affinity
SelectType=select/cons_tres
SwitchType=switch/none
SchedulerParameters=bf_interval=1
MpiDefault=none
ReturnToService=2
SlurmctldPort=17910
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmdSpoolDir={folder}/spool-%n
StateSaveLocation={folder}/state
SlurmdTimeout=300
KillWait={kill_wait_s}
MessageTimeout=10
FirstJobId={first_job}
NodeName=n1 NodeHostname={hostname} NodeAddr={first} Port=17911 Gres=gpu:1 CPUs=1 RealMemory=1000
NodeName=n2 NodeHostname={hostname} NodeAddr={second} Port=17912 Gres=gpu:1 CPUs=1 RealMemory=1000
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
PartitionName=all Nodes=n[1-2] Default=YES MaxTime=INFINITE State=UP GraceTime=60 PriorityTier=1
PartitionName=urgent Nodes=n[1-2] MaxTime=INFINITE State=UP PriorityTier=2
GresTypes=gpu
NodeName=g[1-8] NodeHostname={hostname} NodeAddr={first} Port=[17921-17928] Gres=gpu:8 CPUs=1 RealMemory=1000 State=DOWN
PartitionName=gpu Nodes=g[1-8] MaxTime=INFINITE State=UP
"""
GPUS = "NodeName=n[1-2] Name=gpu File=/dev/null\n"
"""A GPU of each node, which only Slurm takes for one."""


class TwoHosts:
    """Names and addresses of the hosts; the prefix `on` runs a command on a host."""

    def __init__(self) -> None:
        self.names = tuple(f"bapo-{side}-{os.getpid()}" for side in "ab")
        self.addresses = ("10.77.0.1", "10.77.0.2")

    def on(self, host: int) -> list[str]:
        # `ip netns exec` would hide the control groups, which slurmd needs.
        return ["nsenter", f"--net=/run/netns/{self.names[host]}"]

    def processes(self, host: int) -> dict[int, psutil.Process]:
        listed = subprocess.run(["ip", "netns", "pids", self.names[host]], capture_output=True, text=True, check=True)
        found = {}
        for pid in map(int, listed.stdout.split()):
            with suppress(psutil.NoSuchProcess):
                found[pid] = psutil.Process(pid)
        return found

    def cut_cable(self) -> None:
        _ip("-n", self.names[0], "link", "set", CABLE, "down")

    def mend_cable(self) -> None:
        _ip("-n", self.names[0], "link", "set", CABLE, "up")


def named_as_on_debian(folder: Path) -> list[str]:
    """Return the prefix of a command that finds this machine's own name at 127.0.1.1, which is Debian's default."""
    names = folder / "hosts"
    names.write_text(f"127.0.0.1 localhost\n127.0.1.1 {socket.gethostname()}\n")
    script = f'mount --bind {names} /etc/hosts && exec "$@"'
    return ["unshare", "--mount", "bash", "-c", script, "named_as_on_debian"]


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, timeout=30)


@contextmanager
def two_hosts() -> Iterator[TwoHosts]:
    hosts = TwoHosts()
    try:
        for name in hosts.names:
            _ip("netns", "add", name)
            _ip("-n", name, "link", "set", "lo", "up")
        first, second = hosts.names
        _ip("link", "add", CABLE, "netns", first, "type", "veth", "peer", "name", CABLE, "netns", second)
        for name, address in zip(hosts.names, hosts.addresses, strict=True):
            _ip("-n", name, "address", "add", f"{address}/24", "dev", CABLE)
            _ip("-n", name, "link", "set", CABLE, "up")
        yield hosts
    finally:
        for host, name in enumerate(hosts.names):
            for process in hosts.processes(host).values():
                with suppress(psutil.NoSuchProcess):
                    process.kill()
            _ip("netns", "delete", name)


class SlurmCluster:
    """A cluster of Debian's Slurm with a node on each host."""

    def __init__(self, hosts: TwoHosts, folder: Path) -> None:
        self.hosts, self.folder = hosts, folder
        self.environment = {"SLURM_CONF": str(folder / "slurm.conf")}
        self.daemons: dict[str, subprocess.Popen] = {}

    def start(self, name: str, *command: str) -> None:
        if name in self.daemons:
            self.daemons[name].wait(timeout=10)
        with (self.folder / f"{name}.log").open("ab") as log:
            self.daemons[name] = subprocess.Popen(
                command, stdout=log, stderr=log, env={**os.environ, **self.environment}, start_new_session=True
            )

    def start_node(self, host: int) -> None:
        name = f"n{host + 1}"
        self.start(name, *self.hosts.on(host), *named_as_on_debian(self.folder), "slurmd", "-D", "-N", name)

    def call(self, *command: str) -> str:
        """Run a Slurm command; return its output."""
        done = subprocess.run(
            [*self.hosts.on(0), *command],
            capture_output=True,
            text=True,
            timeout=60,
            env={**os.environ, **self.environment},
        )
        assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
        return done.stdout

    def wait_for(self, expected: str, *command: str, limit_s: float = 30.0) -> None:
        """Wait until a command's output contains `expected`."""
        deadline, output = time.monotonic() + limit_s, ""
        while expected not in output:
            assert time.monotonic() < deadline, f"{' '.join(command)} prints {output!r}, not {expected!r}"
            time.sleep(0.3)
            with suppress(AssertionError):
                output = self.call(*command)


@contextmanager
def slurm_cluster(hosts: TwoHosts, folder: Path, *, kill_wait_s: int = 1, first_job: int = 1) -> Iterator[SlurmCluster]:
    """Start a Slurm cluster with its own munged, slurmctld and two slurmd; its files are in `folder`.

    `kill_wait_s` is the time from SIGTERM to SIGKILL for a job that Slurm ends; Slurm's default is 30. `first_job` is
    the number of the first job.
    """
    cluster = SlurmCluster(hosts, folder)
    for name in ("state", "spool-n1", "spool-n2"):
        (folder / name).mkdir(parents=True)
    munge = Path(tempfile.mkdtemp(prefix="bapo-munge-"))  # a folder that the user munge can access
    munge.chmod(0o755)
    shutil.chown(munge, "munge", "munge")
    first, second = hosts.addresses
    settings = SLURM_CONF.format(
        hostname=socket.gethostname(),
        first=first,
        second=second,
        folder=folder,
        munge=munge,
        kill_wait_s=kill_wait_s,
        first_job=first_job,
    )
    (folder / "slurm.conf").write_text(settings)
    (folder / "gres.conf").write_text(GPUS)
    try:
        cluster.start(
            "munged",
            *(
                "setpriv",
                "--reuid=munge",
                "--regid=munge",
                "--clear-groups",
                "munged",
                "--foreground",
                "--force",
                f"--socket={munge}/socket",
            ),
            *(f"--pid-file={munge}/pid", f"--log-file={munge}/log", f"--seed-file={munge}/seed"),
        )
        cluster.start("slurmctld", *hosts.on(0), "slurmctld", "-D")
        cluster.start_node(0)
        cluster.start_node(1)
        cluster.wait_for("2 idle", "sinfo", "--noheader", "--partition=all", "--format=%D %t")
        yield cluster
    finally:
        for daemon in reversed(cluster.daemons.values()):
            if daemon.poll() is None:
                os.killpg(daemon.pid, signal.SIGTERM)
        for daemon in cluster.daemons.values():
            try:
                daemon.wait(timeout=10)
            except subprocess.TimeoutExpired:
                os.killpg(daemon.pid, signal.SIGKILL)
                daemon.wait()
        shutil.rmtree(munge)
