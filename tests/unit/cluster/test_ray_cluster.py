import asyncio

import pytest
from ray import exceptions as ray_errors

from megatron_bapo.cluster.engine_actor import engine_result
from megatron_bapo.errors import RunError
from megatron_bapo.rollout.messages import EngineLost

LOST_OBJECT = ("ff" * 28, "127.0.0.1", "here")
LOST = (
    ray_errors.ActorDiedError(),
    ray_errors.ActorUnavailableError("connection refused", None),
    ray_errors.ActorUnschedulableError("its node is gone"),
    ray_errors.WorkerCrashedError(),
    ray_errors.NodeDiedError("heartbeat missed"),
    ray_errors.LocalRayletDiedError(),
    ray_errors.OutOfMemoryError("killed by the memory monitor"),
    ray_errors.RpcError("connection reset"),
    ray_errors.ObjectLostError(*LOST_OBJECT),
    ray_errors.OwnerDiedError(*LOST_OBJECT),
    ray_errors.ObjectFetchTimedOutError(*LOST_OBJECT),
    ray_errors.ReferenceCountingAssertionError(*LOST_OBJECT),
)
OTHERS = (
    ray_errors.RaySystemError(ValueError("unexpected")),
    ray_errors.TaskCancelledError(),
    ray_errors.ObjectStoreFullError("the object store is full"),
    ray_errors.PendingCallsLimitExceeded("too many calls"),
)
OUT_OF_MEMORY = """\
1 worker(s) were killed due to the node running low on memory. Memory on the node (IP: 192.0.2.2, ID: b97588616256) \
was 22.81GB used / 23.54GB limit (0.968989)
OOM kill reason: Memory usage 24492032000B exceeded threshold of 24012684697B (95.0% of 25276510208B limit)
Object store memory usage: [- objects spillable: 0
]
Ray killed 1 worker(s) based on the killing policy
Considered workers: [
Selected to kill: (Actor(7dfae037f15ce731f4b232c301000000): job ID=01000000, task name=A.__init__, pid=8121)
]
Refer to the documentation on how to address the out of memory issue: https://docs.ray.io/. Consider provisioning more \
memory on this node or reducing task parallelism by requesting more CPUs per task."""
"""Text of Ray 2.60, shortened."""


def error_of(error: BaseException) -> RunError:
    async def call() -> None:
        raise error

    with pytest.raises(RunError) as raised:
        asyncio.run(engine_result(call(), "engine 3", 60.0))
    return raised.value


@pytest.mark.parametrize("error", LOST, ids=lambda error: type(error).__name__)
def test_an_engine_is_lost_if_its_process_ended_or_its_reply_was_lost(error: ray_errors.RayError):
    lost = error_of(error)
    assert isinstance(lost, EngineLost)
    assert "engine 3" in str(lost)
    assert "\n" not in str(lost)


@pytest.mark.parametrize("error", OTHERS, ids=lambda error: type(error).__name__)
def test_other_errors_of_ray_name_the_engine_and_the_error(error: ray_errors.RayError):
    other = error_of(error)
    assert not isinstance(other, EngineLost)
    assert f"Ray failed to call engine 3 ({type(error).__name__})" in str(other)


def test_an_error_that_the_engine_raises_keeps_its_type_and_message():
    refused = RunError("policy version 3 lacks tensor a")
    assert error_of(ray_errors.RayTaskError("load_weights", "traceback", refused)) is refused
    unexpected = error_of(ray_errors.RayTaskError("load_weights", "traceback", KeyError("a")))
    assert "engine 3 failed with KeyError: 'a'" in str(unexpected)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            OUT_OF_MEMORY,
            "engine 3 died: Ray killed it, because 22.81 of 23.54 GiB of memory were in use on node 192.0.2.2, more "
            "than Ray's threshold of 95.0 %. End other processes on the node, give it more memory, or raise "
            "RAY_memory_usage_threshold in the environment in which Ray starts; see the run's logs folder",
        ),
        ("Killed for memory.\nRefer to …", "engine 3 died: Killed for memory.; see the run's logs folder"),
    ],
    ids=["Ray 2.60", "another version"],
)
def test_the_message_of_a_process_killed_for_memory_has_the_figures_of_its_node(text: str, expected: str):
    assert str(error_of(ray_errors.OutOfMemoryError(text))) == expected
