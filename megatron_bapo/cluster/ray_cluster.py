"""Ray: start a cluster on this machine or join a running one, create actors, and call them with timeouts."""

from __future__ import annotations

import asyncio
import gc
import inspect
import logging
import os
import re
import secrets
import signal
import subprocess
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import cache, partial
from typing import Any, TypeVar

import psutil

from megatron_bapo import ray_variables  # noqa: F401

# isort: split

import ray
from ray.exceptions import (
    ActorUnavailableError,
    ActorUnschedulableError,
    GetTimeoutError,
    LocalRayletDiedError,
    NodeDiedError,
    ObjectLostError,
    OutOfMemoryError,
    RayActorError,
    RayError,
    RayTaskError,
    RpcError,
    RuntimeEnvSetupError,
    WorkerCrashedError,
)
from ray.experimental import internal_kv
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from megatron_bapo.cluster.quiet_ray import quiet_ray
from megatron_bapo.cluster.ray_folder import ray_folder
from megatron_bapo.errors import RunError, UserError

Name = TypeVar("Name", bound=Hashable)
SEVERAL_MACHINES = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"
"""Environment variable; if it is 1, Ray's servers accept connections of other machines."""
MAX_RETRIES = 30
"""Retries, one a second, of a call whose actor cannot be reached, or has died and may be restarted. Connections
themselves survive interruptions of about 20 s (RAY_grpc_keepalive_timeout_ms)."""
DIED = (
    *(RayActorError, WorkerCrashedError, OutOfMemoryError, ActorUnschedulableError, RuntimeEnvSetupError),
    *(NodeDiedError, LocalRayletDiedError, RpcError),
)
"""Ray's errors of a call whose actor has ended or cannot be reached."""
START_TRIES = 3
START_TIMEOUT = "timed out during startup"
"""Part of Ray's message when a node's processes have not started in time."""
_END_TIMEOUT_S = 10.0
"""Time for killed processes to end, which frees their ports."""
_MEMORY = re.compile(r"\(IP: (\S+), .*\) was ([\d.]+)GB used / ([\d.]+)GB limit")
_THRESHOLD = re.compile(r"exceeded threshold of \d+B \(([\d.]+)% of")
"""Memory of the node in the message of Ray's OutOfMemoryError, as of Ray 2.60, whose GB are GiB."""
MAX_CALLS = 100_000
"""Concurrent calls of one actor whose methods are coroutines."""


class ActorDied(RunError):
    """The process of an actor has ended or could not be reached after all retries, or its reply was lost."""


@contextmanager
def local_cluster(num_actors: int, object_store_mib: int, namespace: str) -> Iterator[str]:
    """Start a Ray cluster on the loopback interface, with token authentication, for this context; yields its address.

    The token is created here and passed to the trainer in its environment, never in arguments or logs.
    """
    if os.environ[SEVERAL_MACHINES] != "0":
        raise UserError(f"{SEVERAL_MACHINES} makes Ray listen on every interface; unset it, or give --num-nodes")
    os.environ["RAY_AUTH_TOKEN"] = _token()
    os.environ.pop("RAY_ADDRESS", None)
    with ray_folder() as folder:
        start = partial(
            _init,
            address="local",  # starts a new cluster even if another one runs on this machine
            num_cpus=num_actors,
            object_store_memory=object_store_mib << 20,
            include_dashboard=False,
            namespace=namespace,
            log_to_driver=False,
            logging_level=logging.ERROR,
            _node_ip_address="127.0.0.1",
            _temp_dir=str(folder),
        )
        start_repeatedly(start)
        try:
            yield head_address()
        finally:
            ray.shutdown()


def start_repeatedly(start: Callable[[], None]) -> None:
    """Start Ray's processes. Ray gives them 30 s, which they may exceed on a busy machine, so this is tried again."""
    own, others = psutil.Process(), psutil.Process().children(recursive=True)
    for _ in range(START_TRIES):
        try:
            start()
        except Exception as error:  # Ray raises this very class
            started = [process for process in own.children(recursive=True) if process not in others]
            for process in started:
                process.kill()
            psutil.wait_procs(started, _END_TIMEOUT_S)
            _note_ends({process.pid for process in started})
            if START_TIMEOUT not in str(error):
                raise
        else:
            return
    raise RunError(
        f"Ray did not start on this machine within 30 s, {START_TRIES} times in a row. The machine may be too busy: "
        "end other processes, and run the same command again"
    )


def _note_ends(pids: Collection[int]) -> None:
    """Tell Ray's Popen objects that their processes have ended: they warn if they are deleted before they know."""
    for found in gc.get_objects():
        if issubclass(type(found), subprocess.Popen) and getattr(found, "pid", None) in pids:
            found.poll()


def _init(**options: Any) -> None:
    """Call ray.init, and keep this process's handler of SIGTERM, which Ray replaces with one that ends the process.

    A terminal that is closed sends SIGHUP to the launcher and all that it has started outside of other sessions. Ray's
    processes and theirs inherit that it is blocked, as Ray does with SIGINT, because the run still saves its state.
    """
    own = signal.getsignal(signal.SIGTERM)
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGHUP})
    try:
        ray.init(**options)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        if callable(own):
            signal.signal(signal.SIGTERM, own)


@cache
def _token() -> str:
    """Return one token for all clusters of this process, because Ray reads it only once."""
    return secrets.token_hex(32)


def nodes() -> list[dict[str, Any]]:
    """Return the cluster's nodes that are alive, as Ray describes them."""
    return [node for node in ray.nodes() if node["Alive"]]


def disconnect() -> None:
    """Leave the cluster; actors that this process has created end."""
    ray.shutdown()


def connect(address: str, namespace: str, node_address: str | None = None) -> None:
    """Join the cluster at `address`.

    `node_address` selects the Ray node of this process if this machine has several. Actors find each other by name
    within a namespace; a run's namespace is its directory. Raises UserError if the cluster belongs to another run,
    RunError if it cannot be joined.
    """
    options: dict[str, Any] = {} if node_address is None else {"_node_ip_address": node_address}
    try:
        with quiet_ray():
            _init(address=address, namespace=namespace, log_to_driver=False, logging_level=logging.ERROR, **options)
    except (ConnectionError, PermissionError) as error:  # of a file of another user, which Ray reads after a failure
        cause = error.__cause__ or error.__context__ or error
        if "AuthenticationError" in str(cause):
            raise UserError(
                f"the Ray cluster at {address} refuses this run's token: it belongs to another run. Choose another "
                "port for the head (MASTER_PORT for launch/torchrun_node.sh, else RAY_ADDRESS)"
            ) from None
        last = [line for line in str(cause).splitlines() if line.strip()][-1:]
        raise RunError(f"cannot join the Ray cluster at {address}: {''.join(last)}") from None


def create_actor(
    actor_class: type,
    *args: Any,
    name: str,
    environment: dict[str, str] | None = None,
    node_id: str | None = None,
    stateless: bool = False,
    **kwargs: Any,
) -> Any:
    """Create an actor of a plain class, without waiting for it; with `node_id` only on that node.

    Ray retries calls to an actor with a `node_id` while it cannot be reached, so its methods must tolerate being called
    twice, one after the other, or be called by `called_once`. A `stateless` actor is restarted when it dies, and its
    calls are retried, too.
    """
    options: dict[str, Any] = {"num_cpus": 1, "name": name, "runtime_env": {"env_vars": environment or {}}}
    if node_id is not None or stateless:
        options["max_task_retries"] = MAX_RETRIES
    if node_id is not None:
        # placement.py assigns actors to nodes by their GPUs; Ray's count of cores must not matter.
        options |= {"num_cpus": 0, "scheduling_strategy": NodeAffinitySchedulingStrategy(node_id, soft=False)}
    if stateless:
        options["max_restarts"] = -1
    if any(map(inspect.iscoroutinefunction, vars(actor_class).values())):
        # Waiting calls cost nothing, and Ray's default limit of 1000 would queue health checks behind requests. For an
        # actor without coroutines this would be the number of its threads.
        options["max_concurrency"] = MAX_CALLS
    return ray.remote(actor_class).options(**options).remote(*args, **kwargs)


def called_once(method: Any) -> Any:
    """Return an actor's method whose calls Ray does not retry: they fail if the actor cannot be reached."""
    return method.options(max_task_retries=0)


def kill(actor: Any) -> None:
    """End an actor's process, without waiting for it."""
    ray.kill(actor)


def get_actor(name: str) -> Any:
    """Return the actor with this name."""
    return ray.get_actor(name)


def head_address() -> str:
    """Return HOST:PORT of the cluster's head, which has its key-value store."""
    return ray.get_runtime_context().gcs_address


async def put_key(namespace: bytes, key: str, value: str) -> None:
    """Set a key of the cluster's key-value store, as soon as the head can be reached."""
    await asyncio.to_thread(internal_kv._internal_kv_put, key, value, namespace=namespace)


def own_address() -> str:
    """Return the IP address under which other nodes reach this process's node."""
    return ray.util.get_node_ip_address()


def own_node_id() -> str:
    """Return Ray's number of this process's node, as in `nodes`."""
    return ray.get_runtime_context().get_node_id()


async def put(value: Any) -> Any:
    """Copy a value to the object store; return its reference. It is freed with the last reference in any process.

    A full object store makes room on disk first, which may take seconds.
    """
    return await asyncio.to_thread(ray.put, value)


def finished(references: Mapping[Name, Any], timeout_s: float = 0.0) -> list[Name]:
    """Return the names of the calls that have returned or failed, when all have or after `timeout_s`."""
    if not references:
        return []
    ready = set(ray.wait(list(references.values()), num_returns=len(references), timeout=timeout_s)[0])
    return [name for name, reference in references.items() if reference in ready]


def get_result(reference: Any, who: str, timeout_s: float) -> Any:
    """Return the result of a remote call to the actor `who`.

    Raises ActorDied or RunError, which name `who`, if the actor died or did not answer within `timeout_s`, and for
    every other error of Ray. The callee's own UserError and RunError are raised unchanged.
    """
    try:
        return ray.get(reference, timeout=timeout_s)
    except GetTimeoutError:
        raise unanswered(who, timeout_s) from None
    except RayError as error:
        raise _cause(error, who) from error


def unanswered(who: str, timeout_s: float) -> RunError:
    """Return the error of a call that the actor `who` did not answer in time."""
    return RunError(f"{who} did not answer within {timeout_s:.0f} s; see the run's logs folder")


async def await_result(reference: Any, who: str) -> Any:
    """Await a remote call, with the errors of `get_result`; the caller must bound the wait."""
    try:
        return await reference
    except RayError as error:
        raise _cause(error, who) from error


async def cancel_call(reference: Any) -> None:
    """Cancel a call of a coroutine; return when it has ended."""
    ray.cancel(reference)
    with suppress(RayError):
        await reference


def _cause(error: RayError, who: str) -> Exception:
    if isinstance(error, RayTaskError):  # the callee raised
        if isinstance(error.cause, UserError | RunError):
            return error.cause
        return RunError(f"{who} failed with {type(error.cause).__name__}: {error.cause}; see the run's logs folder")
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or ["no reason given"]
    reason = _out_of_memory(lines) if isinstance(error, OutOfMemoryError) else lines[-1]
    reason += "; see the run's logs folder"
    if isinstance(error, ObjectLostError):
        return ActorDied(f"the reply of {who} was lost: {reason}")
    if isinstance(error, DIED):
        state = "cannot be reached" if isinstance(error, ActorUnavailableError | RpcError) else "died"
        return ActorDied(f"{who} {state}: {reason}")
    return RunError(f"Ray failed to call {who} ({type(error).__name__}): {reason}")


def _out_of_memory(lines: list[str]) -> str:
    """Return which node ran out of memory and the way out; the first line if Ray's message has no figures."""
    memory, threshold = (pattern.search(" ".join(lines)) for pattern in (_MEMORY, _THRESHOLD))
    if memory is None:
        return lines[0]
    address, used, limit = memory.groups()
    above = f", more than Ray's threshold of {threshold[1]} %" if threshold else ""
    return (
        f"Ray killed it, because {used} of {limit} GiB of memory were in use on node {address}{above}. End other "
        "processes on the node, give it more memory, or raise RAY_memory_usage_threshold in the environment in which "
        "Ray starts"
    )
