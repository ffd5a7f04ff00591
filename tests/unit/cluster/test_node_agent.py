import asyncio
from pathlib import Path

import pytest

from megatron_bapo.cluster.node_agent import NodeAgent
from megatron_bapo.cluster.run_end import FILE
from megatron_bapo.config.loading import dump_config
from megatron_bapo.errors import UserError
from megatron_bapo.parallel.platform import has_gpu
from tests.unit.config.examples import config


@pytest.mark.skipif(has_gpu(), reason="a GPU has the kernels")
def test_the_layers_kernels_are_checked_on_the_trainers_nodes(tmp_path: Path) -> None:
    run_config = tmp_path / "config.yaml"
    run_config.write_text(dump_config(config(model__transformer_impl="transformer_engine", model__dtype="bfloat16")))
    agent = NodeAgent("127.0.0.1", tmp_path / "node.log")
    with pytest.raises(UserError, match="transformer_engine on a machine without a GPU"):
        asyncio.run(agent.check(run_config, Path.cwd(), num_trainer_ranks=2))


def test_a_node_that_is_asked_to_end_asks_the_run_to_stop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(FILE, str(tmp_path / "run-end"))
    request, asked = tmp_path / "request", tmp_path / "stop"
    agent = NodeAgent("127.0.0.1", tmp_path / "node.log")

    async def watched() -> None:
        watching = asyncio.create_task(agent.until_trainer_ends(request))
        while not (tmp_path / "watched").exists():
            await asyncio.sleep(0.01)
        assert not request.exists()
        asked.touch()
        while not request.exists():
            await asyncio.sleep(0.01)
        watching.cancel()

    asyncio.run(asyncio.wait_for(watched(), timeout=60))
