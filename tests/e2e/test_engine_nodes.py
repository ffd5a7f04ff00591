"""An engine whose two tensor-parallel ranks are on two nodes; here both nodes are this machine."""

import asyncio
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from megatron_bapo.cluster.engine_actor import EngineActor, EnginePlacement
from megatron_bapo.cluster.ray_cluster import local_cluster
from megatron_bapo.errors import RunError
from megatron_bapo.rollout.messages import EngineLost
from megatron_bapo.weight_sync.transport import WeightStore
from tests.e2e.test_engine import DENSE, LONG_PROMPT, create_checkpoint, exported, request
from tests.processes import named_shared_memory, sockets, title
from tests.tolerances import ENGINE_LOG_PROB
from tests.unit.config.examples import config
from tests.unit.weight_sync.examples import publish

ADDRESS = "127.0.0.2"
"""All of 127.0.0.0/8 is the loopback interface."""
NOTICED_S = 20.0


def log_probs(model: PreTrainedModel) -> np.ndarray:
    tokens = torch.from_numpy(LONG_PROMPT).long()
    with torch.no_grad():
        logits = model(tokens[None]).logits[0, :-1].float()
    return logits.log_softmax(-1).gather(1, tokens[1:, None])[:, 0].numpy()


def perturb(model: PreTrainedModel) -> None:
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_((0.1 * torch.randn(parameter.shape, generator=generator)).to(parameter.dtype))


async def processes_of(engine: EngineActor) -> list[list[psutil.Process]]:
    """Return the processes of an engine by node."""
    started = [await call for call in engine.starting.values()]
    return [[psutil.Process(pid) for pid in ranks.processes] for ranks in started]


def rank_of(processes: list[psutil.Process]) -> psutil.Process:
    (rank,) = [process for process in processes if "Worker" in title(process)]
    return rank


def check_listening(processes: list[psutil.Process]) -> None:
    """Everything of vLLM listens on the loopback interface; only Ray's workers listen on every interface."""
    listening = {
        (title(process), connection.laddr.ip)
        for process in processes
        for connection in sockets(process, "tcp")
        if connection.status == psutil.CONN_LISTEN
    }
    assert ADDRESS in {address for _, address in listening}
    assert [each for each in listening if not each[0].startswith("ray::") and not each[1].startswith("127.")] == []


async def until_lost(engine: EngineActor) -> None:
    deadline = time.monotonic() + NOTICED_S
    while time.monotonic() < deadline:
        await engine.progress()
        await asyncio.sleep(0.1)


async def use(engine: EngineActor, model: PreTrainedModel, stores: list[WeightStore], tolerance: float) -> None:
    """Update the engine's weights, kill an idle rank of its second node, and check what is generated throughout."""

    async def check_weights(engine: EngineActor, version: int) -> None:
        score = await engine.score(LONG_PROMPT, num_decoded=4)
        assert score.policy_version == version
        np.testing.assert_allclose(score.log_probs, log_probs(model), atol=tolerance, rtol=0)
        np.testing.assert_allclose(score.decoded_log_probs, score.rescored_log_probs, atol=tolerance, rtol=0)

    await engine.started()
    await check_weights(engine, 0)
    perturb(model)
    publish(stores[0], 1, exported(model))
    with pytest.raises(RunError, match="the engine keeps version 0: policy version 1 is not committed") as caught:
        await engine.load_weights(1)
    assert str(stores[1].folder) in str(caught.value)
    publish(stores[1], 1, exported(model))
    await engine.load_weights(1)
    await check_weights(engine, 1)
    assert (await engine.generate(request(LONG_PROMPT))).policy_version == 1
    first, second = await processes_of(engine)
    check_listening([*first, *second])
    assert [path for process in (*first, *second) for path in named_shared_memory(process)] == []
    rank_of(second).kill()
    with pytest.raises(EngineLost, match="a rank of the engine has ended on node 2 of 2"):
        await until_lost(engine)
    replacement = engine.replacement()
    await replacement.started()
    _, alive = psutil.wait_procs([*first, *second], timeout=10)
    assert alive == []
    await replacement.load_weights(1)
    await check_weights(replacement, 1)


def use_two_nodes(folder: Path, devices: Sequence[Sequence[str]], dtype: str, tolerance: float) -> None:
    """Start an engine with a rank on each of two nodes, which have the given GPUs, and call `use`."""
    create_checkpoint(folder / "model", DENSE)
    model = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=getattr(torch, dtype))
    values = {"rollout__tensor_parallel_size": 2, "rollout__nodes_per_engine": 2, "rollout__kv_cache_gib": 0.02}
    values |= {"model__create": None, "model__path": str(folder / "model"), "model__dtype": dtype}
    settings = config(run_dir=str(folder), **values)
    (folder / "logs").mkdir()
    stores = [WeightStore.create(), WeightStore.create()]
    placements = [
        EnginePlacement(store.folder, tuple(visible), ADDRESS, {"NCCL_SOCKET_IFNAME": "lo"})
        for store, visible in zip(stores, devices, strict=True)
    ]
    with local_cluster(2, 80, "engine"):
        try:
            asyncio.run(use(EngineActor(settings, 0, placements), model, stores, tolerance))
        finally:
            for store in stores:
                store.close()


def test_an_engine_on_two_nodes_loads_each_nodes_weights_and_is_replaced_when_an_idle_rank_dies(tmp_path: Path):
    use_two_nodes(tmp_path, [(), ()], "float32", ENGINE_LOG_PROB)
