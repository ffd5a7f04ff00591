from types import SimpleNamespace
from typing import Any

import pytest

from megatron_bapo.controller import weight_update
from megatron_bapo.parallel.groups import ParallelGroups


def test_the_trainer_scores_the_probe_while_engines_on_other_gpus_still_generate(
    groups: ParallelGroups, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Engines get no requests from the weight transfer to the end of the probe, which should therefore follow soon."""
    events: list[str] = []
    monkeypatch.setattr(weight_update, "score_sequence", lambda worker, tokens: events.append("scored"))
    transport: Any = SimpleNamespace(deliver=lambda version, rollouts: events.append(f"delivered {version}"))
    colocation: Any = SimpleNamespace(
        to_weight_sync=lambda: events.append("to weight sync"), to_engines=lambda: events.append("to engines")
    )
    worker: Any = SimpleNamespace(groups=groups)

    assert weight_update.update_weights(worker, None, transport, colocation, 3) == {}
    assert events == ["scored", "to weight sync", "delivered 3", "to engines"]
