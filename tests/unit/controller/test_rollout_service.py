"""The rollout service without Ray: what its process imports, and how its calls end."""

import asyncio
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron_bapo.cluster.engine_fleet import EngineFleet
from megatron_bapo.controller.rollout_service import RolloutService
from megatron_bapo.errors import RunError
from megatron_bapo.model.hf_create import byte_tokenizer
from megatron_bapo.rollout.tokenization import load_tokenizer
from megatron_bapo.rollout.weight_probe import WeightProbe
from megatron_bapo.simulation.virtual_time import run_in_virtual_time
from tests.unit.config.examples import config
from tests.unit.rollout.world import World, settings
from tests.unit.simulation.modelled_engines import decode, prompts

TEMPLATE = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
LOADED = """
import sys
from pathlib import Path
import megatron_bapo.controller.rollout_service
from megatron_bapo.rollout.tokenization import load_tokenizer, text_of, transformers_without_torch

with transformers_without_torch():
    tokenizer = load_tokenizer(Path(sys.argv[1]))
text = tokenizer.apply_chat_template([{"role": "user", "content": "6 x 7"}], tokenize=False)
print(type(tokenizer), tokenizer.encode(text), text_of(tokenizer.encode(text), tokenizer))
print("torch" in sys.modules)
import torch
print(torch.ones(2).sum().item())
"""


@pytest.mark.slow
def test_the_rollout_service_loads_the_same_tokenizer_without_torch(tmp_path: Path) -> None:
    written = byte_tokenizer(["abc", "xyz"])
    written.chat_template = TEMPLATE
    written.save_pretrained(tmp_path)
    done = subprocess.run(
        [sys.executable, "-c", LOADED, str(tmp_path)], capture_output=True, text=True, timeout=300, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    tokenizer = load_tokenizer(tmp_path)
    text = "[user]6 x 7"
    used = f"{type(tokenizer)} {tokenizer.encode(text)} {text}"
    assert done.stdout.splitlines() == [used, "False", "2.0"]


class ModelledService(RolloutService):
    """A service with the scheduler, the router and the engines of a `World`, and with one held-out prompt."""

    def __init__(self, world: World) -> None:
        self._config = config(data__validation={"reasoning_gym": {"chain_sum": {}}, "size": 1})
        self._scheduler, self._router, self._validation = world.scheduler, world.router, prompts(1)
        self._fleet = EngineFleet({}, world.router, world.settings, lambda *_: None, world.scheduler.fail)
        self._decoder: Any = type("Decoder", (), {"decode": staticmethod(decode)})
        self._environment, self._waiting = None, {}


def test_an_engine_that_does_not_come_back_ends_an_evaluation():
    async def main() -> None:
        world = World(settings(), num_engines=0)
        validating = asyncio.create_task(ModelledService(world).validate(seed=1))
        await asyncio.sleep(1.0)
        world.scheduler.fail(RunError("engine 0 did not come back"))
        with pytest.raises(RunError, match="engine 0 did not come back"):
            await asyncio.wait_for(validating, 1.0)

    run_in_virtual_time(main())


@pytest.mark.parametrize("mode", ["sync", "async"])
@pytest.mark.parametrize("on_weight_update", ["drain", "abort_and_resume", "keep"])
def test_engines_with_new_weights_get_no_request_before_they_have_passed_the_probe(mode: str, on_weight_update: str):
    """Partial rollouts leave requests that continue after the update, also with `mode=sync`."""
    partial = {"token_budget": 5, "over_sampling": 3.0}

    async def main() -> None:
        world = World(settings(mode=mode, on_weight_update=on_weight_update, max_staleness=2, partial_rollout=partial))
        service = ModelledService(world)
        for version in 1, 2:
            await world.scheduler.take()
            await service.load_weights(version)
            num_sent = [len(engine.log) for engine in world.engines]
            await asyncio.sleep(100.0)
            probe = WeightProbe(version, np.ones(2, np.int32), np.zeros(1, np.float32), tolerance=1.0)
            assert len(await service.probe(probe)) == len(world.engines)
            assert [len(engine.log) for engine in world.engines] == num_sent
        await world.scheduler.take()
        assert [engine.in_flight_when_scored for engine in world.engines] == [[0, 0], [0, 0]]
        await world.scheduler.close()

    run_in_virtual_time(main())
