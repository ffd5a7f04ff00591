"""The trainer's calls of the rollout service over a connection that breaks, and the service's calls of Ray's head."""

import asyncio
import os
import socket
import threading
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import psutil
import pytest

from megatron_bapo.cluster.ray_cluster import (
    ActorDied,
    called_once,
    create_actor,
    get_actor,
    get_result,
    head_address,
    local_cluster,
    own_node_id,
    put,
    put_key,
)
from megatron_bapo.controller.rollout_client import SERVICE, RolloutClient
from megatron_bapo.controller.rollout_service import RolloutService
from megatron_bapo.model.hf_create import byte_tokenizer
from megatron_bapo.records import Group, Trajectory, VersionSpan
from megatron_bapo.rollout.generation import ScoredGroups
from megatron_bapo.rollout.hand_over import PART_BYTES
from megatron_bapo.rollout.tokenization import TokenizedPrompt
from megatron_bapo.weight_sync.ray_store import RayStore
from megatron_bapo.weight_sync.route import RENDEZVOUS_NAMESPACE
from tests.processes import title
from tests.unit.config.examples import ARITHMETIC, config

T = TypeVar("T")
LIMIT_S = 120.0
LATE_S = 10.0
"""Time in which a call that Ray sends again would arrive."""


class CountedService(RolloutService):
    """Counts the batches that it begins and ends, when told to; they are empty, because it has no engines."""

    num_begun = num_taken = 0
    goes_on = False

    async def _take(self) -> Any:
        self.num_begun += 1
        while not self.goes_on:
            await asyncio.sleep(0.1)
        self.num_taken += 1
        return ScoredGroups([], 0), [], {}


def break_connections(service: RolloutService, ports: set[int]) -> None:
    """Break the connections of the service's process to these ports of another one."""
    for connection in psutil.Process().net_connections("tcp"):
        if connection.raddr and connection.raddr.port in ports:
            with socket.socket(fileno=os.dup(connection.fd)) as end:
                end.shutdown(socket.SHUT_RDWR)


def test_a_batch_is_not_taken_twice_when_its_reply_is_lost(tmp_path: Path):
    byte_tokenizer(["0123456789"]).save_pretrained(tmp_path)
    run = config(
        run_dir=str(tmp_path), model__create=None, model__path=str(tmp_path), data__chat_template=False,
        data__max_prompt_length=1000,
    )  # fmt: skip
    (tmp_path / "logs").mkdir()
    with local_cluster(1, 80, "client"), ThreadPoolExecutor(1) as executor:
        _service = create_actor(CountedService, run, [], name=SERVICE, node_id=own_node_id())
        client = RolloutClient(run)
        assert len(client.probe_token_ids) > 0
        taking = executor.submit(client.take)
        call_in_service = called_once(get_actor(SERVICE).__ray_call__)

        def wait_until(is_true: Callable[[CountedService], bool]) -> None:
            deadline = time.monotonic() + LIMIT_S
            while not get_result(call_in_service.remote(is_true), SERVICE, LIMIT_S):
                assert time.monotonic() < deadline, "the service does not get there"
                time.sleep(0.1)

        wait_until(lambda service: service.num_begun == 1)
        ports = {each.laddr.port for each in psutil.Process().net_connections("tcp") if each.raddr}
        call_in_service.remote(break_connections, ports)
        with pytest.raises(ActorDied, match="rollout service cannot be reached"):
            taking.result(LIMIT_S)
        call_in_service.remote(lambda service: setattr(service, "goes_on", True))
        wait_until(lambda service: service.num_taken > 0)
        time.sleep(LATE_S)
        counts = call_in_service.remote(lambda service: (service.num_begun, service.num_taken))
        assert get_result(counts, SERVICE, LIMIT_S) == (1, 1)


class HeldOut(RolloutService):
    """Responds to a held-out prompt with its number, so often that it is a part of its own; the first one ends last."""

    async def _sample_group(self, prompt: TokenizedPrompt, n: int, seed: int, index: int) -> ScoredGroups:
        await asyncio.sleep(0.0 if index else 0.5)
        numbers = np.full(PART_BYTES // 8, index, np.int32)
        span = VersionSpan(0, len(numbers))
        response = Trajectory(numbers[:1], numbers, numbers.astype(np.float32), (span,), "stop", "x" * 100, 0.25)
        return ScoredGroups([Group(prompt.prompt, (response,))], 1)


@pytest.mark.parametrize("dump", [False, True])
def test_held_out_responses_leave_the_service_in_parts_and_only_if_they_are_written(tmp_path: Path, dump: bool):
    byte_tokenizer(["0123456789"]).save_pretrained(tmp_path)
    run = config(
        run_dir=str(tmp_path), model__create=None, model__path=str(tmp_path), data__chat_template=False,
        data__max_prompt_length=1000, data__validation={**ARITHMETIC, "size": 3, "seed": 2},
        logging__dump_validation=dump,
    )  # fmt: skip
    (tmp_path / "logs").mkdir()
    with local_cluster(1, 80, "held-out"):
        _service = create_actor(HeldOut, run, [], name=SERVICE)
        scored, parts = RolloutClient(run).validate(seed=1) or pytest.fail("no engine lacks weights")
        responses = [response for group in scored.groups for response in group.trajectories]
        assert (scored.num_reward_timeouts, [response.reward for response in responses]) == (3, [0.25] * 3)
        assert sum(response.num_bytes + len(response.text) for response in responses) == 0
        found = [
            [(len(each.text), int(each.response_token_ids[-1])) for group in part for each in group.trajectories]
            for part in parts
        ]
        assert found == [[(100, index)] for index in range(3) if dump]


async def result_after_a_pause(name: str, call: Coroutine[Any, Any, T]) -> T:
    """Return the result of a call that waits for a process of Ray, during which the event loop runs."""
    (process,) = [each for each in psutil.Process().children(recursive=True) if title(each) == name]
    process.suspend()
    goes_on = threading.Timer(20.0, process.resume)
    goes_on.start()
    task = asyncio.ensure_future(call)
    await asyncio.sleep(0.5)
    assert not task.done()
    goes_on.cancel()
    process.resume()
    return await task


def test_the_services_event_loop_runs_while_rays_head_or_its_object_store_is_busy():
    async def main() -> None:
        part = np.arange(PART_BYTES, dtype=np.int8)
        reference = await result_after_a_pause("raylet", put(part))
        assert np.array_equal(get_result(reference, "the object store", LIMIT_S), part)
        await result_after_a_pause("gcs_server", put_key(RENDEZVOUS_NAMESPACE, "a", "1"))
        assert RayStore(head_address(), LIMIT_S).get("a") == b"1"

    with local_cluster(1, 80, "busy"):
        asyncio.run(main())
