import asyncio
from pathlib import Path
from typing import Any

import pytest

from megatron_bapo.controller.engine_fleet import EngineFleet, EngineHome
from megatron_bapo.errors import RunError
from tests.unit.config.examples import config


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
