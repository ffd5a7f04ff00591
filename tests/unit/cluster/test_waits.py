"""Messages of the launcher while it waits for the head and the nodes of a cluster."""

from io import StringIO
from pathlib import Path
from unittest.mock import MagicMock

import pytest
from rich.console import Console

from megatron_bapo.cluster import planes
from megatron_bapo.errors import RunError, UserError
from megatron_bapo.planning.placement import Node, place_run
from megatron_bapo.run_directory import RunDirectory
from tests.ports import free_port
from tests.unit.config.examples import config


class Clock:
    """A clock that only `sleep` advances."""

    def __init__(self) -> None:
        self._now_s = 0.0

    def monotonic(self) -> float:
        return self._now_s

    def sleep(self, seconds: float) -> None:
        self._now_s += seconds


@pytest.fixture
def console(monkeypatch: pytest.MonkeyPatch) -> Console:
    monkeypatch.setattr(planes, "time", Clock())
    return Console(file=StringIO(), width=200)


def printed(console: Console) -> str:
    assert isinstance(console.file, StringIO)
    return console.file.getvalue()


def test_the_launcher_says_that_it_waits_for_the_head(console: Console) -> None:
    address = f"127.0.0.1:{free_port()}"
    with pytest.raises(RunError, match=f"Ray's head at {address} did not answer within 600 s"):
        planes._wait_for_head(address, console)
    assert f"waiting for Ray's head at {address}" in printed(console)


def test_an_ipv6_address_of_the_head_is_refused_at_once(console: Console) -> None:
    with pytest.raises(UserError, match=r"RAY_ADDRESS=\[fd00::1\]:6379 has an IPv6 address; nodes need IPv4 addresses"):
        planes._wait_for_head("[fd00::1]:6379", console)


def test_the_launcher_names_the_nodes_that_it_waits_for(console: Console, monkeypatch: pytest.MonkeyPatch) -> None:
    joined = {"NodeID": "a", "NodeManagerAddress": "10.0.0.1", "Alive": True, "Resources": {}}
    monkeypatch.setattr(planes, "nodes", lambda: [joined])
    monkeypatch.setenv("BAPO_NODE_ADDRESSES", "n1 10.0.0.1\nn2 10.0.0.2\nn3 10.0.0.3")
    with pytest.raises(
        RunError, match=r"2 of 3 nodes did not join .*: n2 10\.0\.0\.2, n3 10\.0\.0\.3; it has 10\.0\.0\.1"
    ):
        planes._wait_for_nodes(3, "10.0.0.1:6379", console)
    assert "waiting for 2 of 3 nodes: n2 10.0.0.2, n3 10.0.0.3, 10 s so far" in printed(console)


@pytest.mark.parametrize(
    ("job", "expected"),
    [
        ("", ["10.0.0.2", "10.0.0.9", "10.0.0.10", "10.0.1.1"]),
        ("n1 10.0.1.1\nn2 10.0.0.10\nn3 10.0.0.2", ["10.0.1.1", "10.0.0.10", "10.0.0.2", "10.0.0.9"]),
    ],
)
def test_nodes_have_the_order_of_their_job_else_that_of_their_addresses(
    job: str, expected: list[str], console: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    addresses = ("10.0.0.10", "10.0.0.9", "10.0.1.1", "10.0.0.2")
    joined = [{"NodeID": address, "NodeManagerAddress": address, "Resources": {}} for address in addresses]
    monkeypatch.setattr(planes, "nodes", lambda: joined)
    monkeypatch.setenv("BAPO_NODE_ADDRESSES", job)
    assert [node.address for node in planes._wait_for_nodes(4, "10.0.0.2:6379", console)] == expected


def test_node_agents_have_as_long_to_start_as_engines(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """All nodes import the same files at once."""
    limits = []
    monkeypatch.setattr(planes, "create_actor", MagicMock())
    monkeypatch.setattr(planes, "get_result", lambda _call, _name, limit_s: limits.append(limit_s))
    settings = config(rollout__start_timeout_s=700)
    placement = place_run(settings, [Node("a", "10.0.0.1", 8)])
    with planes.node_agents(settings, placement, RunDirectory(tmp_path)):
        assert limits == [700.0]
