"""The Ray actors of the rollout plane: the policy's engines, the teacher's engines and the rollout service."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

from megatron_bapo.cluster.engine_actor import EngineActor, EnginePlacement
from megatron_bapo.cluster.host_store import StorePlacement, create_host_stores
from megatron_bapo.cluster.ray_cluster import create_actor, local_cluster
from megatron_bapo.config.schema import Config
from megatron_bapo.controller.rollout_client import SERVICE
from megatron_bapo.controller.rollout_service import RolloutService
from megatron_bapo.freed_memory import HEAP_VARIABLES
from megatron_bapo.model.weight_layouts import ENGINE_HOST, TRAINER_HOST
from megatron_bapo.parallel.platform import visible_devices
from megatron_bapo.rollout.engine import engine_devices
from megatron_bapo.run_directory import RunDirectory
from megatron_bapo.weight_sync.transport import WeightStore


@contextmanager
def rollout_plane(config: Config, directory: RunDirectory, store: WeightStore) -> Iterator[tuple[str, dict[str, Any]]]:
    """Start Ray on this machine with the engines and the rollout service, until the context ends.

    Yields the cluster's address, and by actor name the references that are ready when the actor has started.
    """
    stores, devices = {TRAINER_HOST: StorePlacement(store.folder)}, visible_devices()
    teachers = _teachers_here(config, store.folder, devices)
    num_actors = config.rollout.num_engines + len(teachers) + 1
    with ExitStack() as stack:
        if config.weight_sync.engine_store == "own":
            stores[ENGINE_HOST] = StorePlacement(stack.enter_context(closing(WeightStore.create())).folder)
            num_actors += 2
        namespace = str(config.run_dir)
        address = stack.enter_context(local_cluster(num_actors, config.rollout.object_store_mib, namespace))
        world_size = config.parallel.world_size
        placements = [
            (EnginePlacement(stores[max(stores)].folder, tuple(engine_devices(config, index, world_size, devices))),)
            for index in range(config.rollout.num_engines)
        ]
        # The handles are kept, because an actor lives as long as its handle.
        _actors, starting = create_actors(config, placements, teachers)
        _actors += create_host_stores(config, directory, stores, num_senders=1)
        yield address, starting


def _teachers_here(config: Config, folder: Path, devices: Sequence[str]) -> list[EnginePlacement]:
    """Return the placements of the teacher's engines on this machine; `folder` takes vLLM's temporary files."""
    if (teacher := config.serving_teacher) is None:
        return []
    num_others = config.rollout.num_gpus(config.parallel.world_size, config.num_engine_ranks)
    return [
        EnginePlacement(folder, tuple(engine_devices(teacher, index, num_others, devices)))
        for index in range(teacher.rollout.num_engines)
    ]


def create_actors(
    config: Config,
    placements: Sequence[Sequence[EnginePlacement]],
    teachers: Sequence[EnginePlacement],
    node_id: str | None = None,
) -> tuple[list[Any], dict[str, Any]]:
    """Create the actors of the policy's engines, of the teacher's and of the rollout service.

    Returns their handles, and by actor name the references that are ready when the actor has started. The service runs
    on the main rank's node, `node_id`, so that the trainer reaches it without the network.
    """
    policy = [EngineActor(config, index, each) for index, each in enumerate(placements)]
    teacher: list[EngineActor] = []
    if (served := config.serving_teacher) is not None:
        teacher = [EngineActor(served, index, [each], is_teacher=True) for index, each in enumerate(teachers)]
    parts = RolloutService, config, policy, teacher
    service = create_actor(*parts, name=SERVICE, environment=HEAP_VARIABLES, node_id=node_id)
    engines = [*policy, *teacher]
    starting = {name: call for engine in engines for name, call in engine.starting.items()}
    starting[SERVICE] = service.probe_token_ids.remote()
    return [*(handle for engine in engines for handle in engine.handles), service], starting
