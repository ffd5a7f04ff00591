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
    assert without.routes.rank == 0
    parallel = replaying.config.parallel
    ranks = min(parallel.world_size, replaying.assumptions.gpus_per_node)
    assert replaying.host_bytes - without.host_bytes == pytest.approx(ranks * replaying.routes.rank, abs=1)
    assert round(replaying.routes.rank / 2**30, 1) == 0.8  # the figure of docs/algorithms/routing_replay.md


def test_with_the_engines_routes_the_main_node_holds_those_of_whole_batches() -> None:
    trainers, engines = plan(*REPLAY), plan("algorithm.routing_replay=rollout")
    stale = plan("algorithm.routing_replay=rollout", "rollout.mode=async", "rollout.max_staleness=3")
    assert trainers.routes.service == 0
    assert engines.routes.rank == trainers.routes.rank
    ranks = engines.config.parallel.data_parallel_size * engines.config.parallel.pipeline_model_parallel_size
    assert engines.routes.service == pytest.approx(2 * ranks * engines.routes.rank, rel=1e-6)
    assert stale.routes.service == pytest.approx(5 * ranks * engines.routes.rank, rel=1e-6)
    num_engines = 8 // engines.config.rollout.ranks_per_engine  # on a node
    assert engines.routes.engine == engines.engine.kv_tokens * 48 * 8
    added = engines.routes.service + num_engines * engines.routes.engine
    assert engines.host_bytes - trainers.host_bytes == pytest.approx(added, abs=1)
