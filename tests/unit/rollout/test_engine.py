import asyncio
import os
import socket
import subprocess
import time
from collections.abc import Sequence
from contextlib import ExitStack
from datetime import timedelta
from multiprocessing import resource_tracker
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path
from typing import Any, cast

import psutil
import pytest
from torch.distributed import TCPStore

from megatron_bapo.model.weight_layouts import engine_places, engine_route, one_host_per_gpu, reader_hosts
from megatron_bapo.rollout.engine import Engine, engine_devices, engine_environment
from megatron_bapo.rollout.engine_nodes import ENGINE_MARK, Meeting, kill_marked, own_processes, unlink_shared_memory
from megatron_bapo.simulation.virtual_time import run_in_virtual_time
from megatron_bapo.weight_sync.route import WeightRoute
from tests.processes import is_alive
from tests.unit.config.examples import config

GPUS = [str(gpu) for gpu in range(8)]
TWO_BY_TWO = {"rollout__num_engines": 2, "rollout__tensor_parallel_size": 2, "parallel__world_size": 4}


def test_engines_get_the_gpus_after_the_trainers_and_colocated_engines_see_all_gpus() -> None:
    apart, together = config(**TWO_BY_TWO), config(**TWO_BY_TWO, rollout__colocate=True)
    assert [engine_devices(apart, slot, 4, GPUS) for slot in (0, 1)] == [["4", "5"], ["6", "7"]]
    assert engine_devices(together, 1, 4, GPUS[:4]) == ["2", "3", "0", "1"]
    assert engine_devices(apart, 0, 0, GPUS)[0] == "0"
    assert engine_devices(apart, 0, 4, []) == []
    teacher = config(algorithm__distillation={"teacher": "t", "engines": {"tensor_parallel_size": 3}}).serving_teacher
    assert teacher is not None
    assert engine_devices(teacher, 0, 4, GPUS) == ["4", "5", "6"]
    on_two_nodes = config(**TWO_BY_TWO, rollout__nodes_per_engine=2)
    assert [engine_devices(on_two_nodes, slot, 4, GPUS) for slot in (0, 1)] == [["4"], ["5"]]


def test_ray_does_not_hide_the_gpus_of_an_engine() -> None:
    environment = engine_environment(["2", "3"])
    assert environment["CUDA_VISIBLE_DEVICES"] == "2,3"
    assert environment["RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"] == "1"
    assert "CUDA_VISIBLE_DEVICES" not in engine_environment()


def test_an_engine_on_gpus_uses_batch_invariant_kernels_only_if_told_to() -> None:
    for wanted in False, True:
        environment = engine_environment(["0"], batch_invariant=wanted)
        assert environment["VLLM_BATCH_INVARIANT"] == str(int(wanted))


class SlowServer:
    """vLLM's core replies to one call at a time, and takes minutes to fall asleep and to wake up."""

    def __init__(self) -> None:
        self._core = asyncio.Lock()
        self.num_checks = 0

    async def sleep(self, level: int) -> None:
        async with self._core:
            await asyncio.sleep(300.0)

    async def wake(self, tags: Sequence[str]) -> None:
        await self.sleep(0)

    async def check_health(self) -> None:
        async with self._core:
            self.num_checks += 1

    def progress(self) -> dict[str, Any]:
        return {}


def test_an_engine_that_falls_asleep_or_wakes_up_replies_to_probes() -> None:
    async def main() -> None:
        engine, server = Engine(), SlowServer()
        engine._server, engine._policy_version, engine._timeout_s = cast(Any, server), 0, 1000.0
        for num, change in enumerate((lambda: engine.sleep(1), engine.wake), start=1):
            changing = asyncio.create_task(change())
            await asyncio.sleep(60.0)
            async with asyncio.timeout(1.0):
                assert await engine.progress() == {}
            await changing
            await engine.progress()
            assert server.num_checks == num

    run_in_virtual_time(main())


def test_places_in_the_plan_are_ranks_of_the_transfer_group(tmp_path) -> None:
    """Trainer ranks come first, then the ranks of each engine in turn; both start from 0 if they share GPUs."""
    for colocate, first in ((False, 4), (True, 0)):
        checked = config(**TWO_BY_TWO, rollout__colocate=colocate)
        routes = [engine_route(checked, index, [(tmp_path, "127.0.0.1")]) for index in (0, 1)]
        assert [route.first_place for route in routes] == [first, first + 2]
        assert [engine_places(checked, index) for index in (0, 1)] == [
            range(first, first + 2),
            range(first + 2, first + 4),
        ]
        placement = one_host_per_gpu(checked)
        assert placement.sender_hosts == (0, 1, 2, 3)
        assert placement.reader_hosts == ((first, first + 2), (first + 1, first + 3))


def test_ranks_on_each_node_of_an_engine_read_that_nodes_store(tmp_path: Path) -> None:
    rollout = config(rollout__tensor_parallel_size=4, rollout__nodes_per_engine=2).rollout
    assert reader_hosts(rollout, [(1, 3), (2,)]) == ((1, 3), (1, 3), (2,), (2,))
    nodes = [(tmp_path / "0", "10.0.0.1"), (tmp_path / "1", "10.0.0.2")]
    route = WeightRoute.from_json(engine_route(config(), 0, nodes).to_json())
    assert [(route.on_node(node).folder, route.on_node(node).address) for node in (0, 1)] == nodes


def test_ranks_meet_in_a_store_that_listens_on_one_address_only() -> None:
    meeting = Meeting("127.0.0.3", timeout_s=10)
    host, port = meeting.endpoint.split(":")
    listening = [each.laddr for each in psutil.Process().net_connections("tcp") if each.status == psutil.CONN_LISTEN]
    assert {address.ip for address in listening if address.port == int(port)} == {host} == {"127.0.0.3"}
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", int(port)))
    joined = TCPStore(host, int(port), is_master=False, wait_for_workers=False, timeout=timedelta(seconds=10))
    joined.set("key", "value")
    assert joined.get("key") == b"value"


def test_shared_memory_without_a_name_remains_usable_and_leaves_no_file() -> None:
    memory = SharedMemory(create=True, size=4096)
    file = Path("/dev/shm") / memory.name
    assert file.exists()
    unlink_shared_memory((*own_processes(), 2**22 + 1))
    assert not file.exists()
    memory.buf[:3] = b"abc"
    assert bytes(memory.buf[:3]) == b"abc"
    memory.close()
    resource_tracker.unregister(f"/{memory.name}", "shared_memory")


def test_an_engines_processes_are_killed_by_their_mark_though_the_one_that_started_them_is_dead() -> None:
    """The first process starts a second one, which is stopped. Those with another mark or without any stay."""
    marks = {"marked": "mark 1", "other": "mark 2", "none": ""}
    with ExitStack() as stack:
        started = dict[str, psutil.Process]()
        for name, mark in marks.items():
            environment = os.environ | ({ENGINE_MARK: mark} if mark else {})
            process = subprocess.Popen(["sh", "-c", "sleep 300 & exec sleep 300"], env=environment)
            stack.enter_context(process)
            started[name] = psutil.Process(process.pid)
            while not (children := started[name].children()):
                time.sleep(0.05)
            for each in (process, *children):
                stack.callback(each.kill)
            started[f"{name}'s child"] = children[0]
        started["marked's child"].suspend()
        started["marked"].kill()
        kill_marked("mark 1")
        while is_alive(started["marked's child"]):
            time.sleep(0.05)
        assert [name for name, each in started.items() if is_alive(each)] == [
            *("other", "other's child"),
            *("none", "none's child"),
        ]
