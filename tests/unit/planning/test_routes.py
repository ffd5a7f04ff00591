"""Host memory of recorded routes."""

import pytest

from megatron_bapo.planning.plan import Plan
from tests.unit.planning.examples import recipe

REPLAY = ("algorithm.behaviour_policy=recomputed", "algorithm.routing_replay=trainer")


def plan(*overrides: str) -> Plan:
    return recipe("qwen3-30b-a3b_16gpus", *overrides)


def test_a_rank_holds_the_routes_of_its_trajectories_and_of_its_stage() -> None:
    without, replaying = plan(), plan(*REPLAY)
    assert replaying.architecture.route_bytes == 48 * 8  # int8, for 128 experts
    assert without.route_bytes == 0
    parallel = replaying.config.parallel
    ranks = min(parallel.world_size, replaying.assumptions.gpus_per_node)
    assert replaying.host_bytes - without.host_bytes == pytest.approx(ranks * replaying.route_bytes, abs=1)
    assert round(replaying.route_bytes / 2**30, 1) == 0.4  # the figure of docs/algorithms/routing_replay.md
