"""Hosts on this machine: network namespaces joined by a bridge, each with a cable of limited speed. Needs root."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

CABLE = "cable0"


@dataclass(frozen=True)
class NetworkHost:
    """A network namespace and its IP address."""

    name: str
    address: str

    def command(self, *arguments: str) -> list[str]:
        """Return the command that runs a command on this host."""
        return ["nsenter", f"--net=/run/netns/{self.name}", *arguments]


def host_address(index: int) -> str:
    """Return the IP address of the host with this index."""
    return f"10.78.0.{index + 1}"


@contextmanager
def network_hosts(num: int, gbit_s: float | None = None) -> Iterator[list[NetworkHost]]:
    """Create hosts for this context; `gbit_s` limits each host's sending speed, and None does not.

    Processes that still run on the hosts are killed at the end.
    """
    bridge, hosts, ends = f"bapo-br{os.getpid() % 100000}", list[NetworkHost](), list[str]()
    try:
        _ip("link", "add", bridge, "type", "bridge")
        _ip("link", "set", bridge, "up")
        for index in range(num):
            host = NetworkHost(f"bapo-bench-{os.getpid()}-{index}", host_address(index))
            end = f"bapo{os.getpid() % 100000}-{index}"
            _ip("netns", "add", host.name)
            hosts.append(host)
            _ip("link", "add", end, "type", "veth", "peer", "name", CABLE, "netns", host.name)
            ends.append(end)
            _ip("link", "set", end, "master", bridge, "up")
            _ip("-n", host.name, "address", "add", f"{host.address}/24", "dev", CABLE)
            for device in ("lo", CABLE):
                _ip("-n", host.name, "link", "set", device, "up")
            if gbit_s is not None:
                limit = ("rate", f"{gbit_s * 1000:.0f}mbit", "burst", "1mb", "latency", "50ms")
                _run("tc", "-n", host.name, "qdisc", "add", "dev", CABLE, "root", "tbf", *limit)
        yield hosts
    finally:
        for host in hosts:
            found = subprocess.run(["ip", "netns", "pids", host.name], capture_output=True, text=True)
            for pid in map(int, found.stdout.split()):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        for end in ends:  # a namespace, with its cable, outlives its name as long as its connections have unsent data
            _ip("link", "delete", end)
        for host in hosts:
            _ip("netns", "delete", host.name)
        _ip("link", "delete", bridge)


def _ip(*arguments: str) -> None:
    _run("ip", *arguments)


def _run(*command: str) -> None:
    subprocess.run(command, check=True, timeout=30)
