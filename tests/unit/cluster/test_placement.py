import pytest

from megatron_bapo.cluster.placement import Node, RunPlacement, place_run
from megatron_bapo.errors import UserError
from tests.unit.config.examples import config


def gpu_nodes(num: int, role="any", gpus: int = 8) -> list[Node]:
    return [Node(f"{role}{index}", f"10.0.0.{index}", gpus, role) for index in range(num)]


def on(placement: RunPlacement) -> tuple[list[str], list[str]]:
    return [node.node_id for node in placement.trainer_nodes], [node.node_id for node in placement.engine_nodes]


def test_engines_get_the_gpus_that_the_trainer_leaves_free_and_nodes_without_gpus_are_not_used() -> None:
    settings = config(parallel__world_size=12, rollout__num_engines=5, rollout__tensor_parallel_size=2)
    with pytest.raises(UserError, match="spread evenly"):
        place_run(settings, gpu_nodes(1))
    placement = place_run(settings, [Node("head", "10.0.1.0"), *gpu_nodes(3)])
    assert on(placement) == (["any0", "any1"], ["any0", "any1", "any2", "any2", "any2"])
    assert placement.ranks_per_node == 6
    assert [placement.slot(engine) for engine in range(5)] == [0, 0, 0, 1, 2]


def test_colocated_engines_are_on_the_trainers_nodes() -> None:
    settings = config(
        parallel__world_size=16, rollout__num_engines=4, rollout__tensor_parallel_size=4, rollout__colocate=True
    )
    assert on(place_run(settings, gpu_nodes(3))) == (["any0", "any1"], ["any0", "any0", "any1", "any1"])


def test_roles_keep_trainer_and_engines_apart() -> None:
    settings = config(parallel__world_size=8, rollout__num_engines=3)
    nodes = [*gpu_nodes(1, "rollout", 4), *gpu_nodes(2, "trainer")]
    assert on(place_run(settings, nodes)) == (["trainer0"], ["rollout0"] * 3)


def test_without_gpus_ranks_spread_over_all_nodes_and_engines_start_at_the_last_node() -> None:
    settings = config(parallel__world_size=4, rollout__num_engines=3)
    assert on(place_run(settings, gpu_nodes(2, gpus=0))) == (["any0", "any1"], ["any1", "any0", "any1"])


@pytest.mark.parametrize(
    ("values", "nodes", "reason"),
    [
        ({"rollout__num_engines": 8}, gpu_nodes(1), "num_engines=8 of 1 ranks each, but only 7 fit"),
        ({"rollout__tensor_parallel_size": 8}, gpu_nodes(1), "an engine stays on one node"),
        ({"parallel__world_size": 9}, gpu_nodes(3), "world_size=9 trainer ranks must spread evenly over nodes"),
        ({}, gpu_nodes(2, "rollout"), "no node of the cluster may have trainer ranks"),
    ],
    ids=str,
)
def test_a_run_that_does_not_fit_is_refused_with_the_numbers(values, nodes, reason) -> None:
    with pytest.raises(UserError, match=reason):
        place_run(config(**values), nodes)
