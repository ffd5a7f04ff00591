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
