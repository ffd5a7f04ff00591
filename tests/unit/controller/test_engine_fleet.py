import asyncio
from pathlib import Path

import pytest

from megatron_bapo.controller.engine_fleet import EngineFleet, EngineHome
from megatron_bapo.errors import RunError
from tests.unit.config.examples import config


@pytest.mark.parametrize("transport", ["nccl", "cuda_ipc"])
def test_an_engine_that_could_not_join_in_is_not_started(transport: str, tmp_path: Path):
    settings = config(weight_sync__transport=transport)
    fleet = EngineFleet(settings, {"engine 0": object()}, [EngineHome(tmp_path, ())])
    with pytest.raises(RunError, match=f"transport={transport} keeps no weights for a new engine; transport=store"):
        asyncio.run(fleet.restart("engine 0"))
