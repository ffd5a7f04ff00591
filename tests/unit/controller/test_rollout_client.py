from unittest.mock import MagicMock

import pytest

from megatron_bapo.controller import rollout_client
from megatron_bapo.controller.rollout_client import RolloutClient
from tests.unit.config.examples import config


def test_an_engine_that_hangs_at_the_start_is_named_by_the_service_before_the_client_gives_the_service_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    limits = []
    monkeypatch.setattr(rollout_client, "get_actor", MagicMock())
    monkeypatch.setattr(rollout_client, "get_result", lambda _call, _name, limit_s: limits.append(limit_s))
    RolloutClient(config(rollout__start_timeout_s=300)).wait_for_engines()
    assert limits == [420.0]
