import asyncio
from pathlib import Path
from typing import Any

import pytest

from megatron_bapo.controller.engine_fleet import EngineFleet, EngineHome, load_everywhere
from megatron_bapo.errors import RunError
from megatron_bapo.rollout.messages import EngineLost
from tests.unit.config.examples import config
from tests.unit.rollout.modelled_engines import ModelledEngine


class Failing(ModelledEngine):
    def __init__(self, error: Exception) -> None:
        super().__init__()
        self._error = error

    async def load_weights(self, version: int) -> None:
        raise self._error


def test_engines_that_are_lost_over_a_load_are_named_and_the_others_have_the_weights():
    good, lost = ModelledEngine(), Failing(EngineLost("engine 1 died"))

    outcome = asyncio.run(load_everywhere({"engine 0": good, "engine 1": lost}, 3))

    assert good.version == 3
    assert {name: str(error) for name, error in outcome.items()} == {"engine 1": "engine 1 died"}


def test_weights_that_an_engine_refuses_end_the_run():
    engines = {"engine 0": ModelledEngine(), "engine 1": Failing(RunError("policy version 3 lacks tensor a"))}

    with pytest.raises(RunError, match="lacks tensor a"):
        asyncio.run(load_everywhere(engines, 3))


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"weight_sync__transport": "nccl"}, "transport=nccl keeps no weights for a new engine; transport=store does"),
        ({"rollout__colocate": True, "rollout__sleep_level": 1}, "sleep_level=1 the GPUs may be the trainer's now"),
    ],
    ids=str,
)
def test_an_engine_that_could_not_join_in_is_not_started(values: dict[str, Any], reason: str, tmp_path: Path):
    fleet = EngineFleet(config(**values), {"engine 0": object()}, [EngineHome(tmp_path, ())])
    with pytest.raises(RunError, match=reason):
        asyncio.run(fleet.restart("engine 0"))
