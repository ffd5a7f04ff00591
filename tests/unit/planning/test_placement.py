import pytest

from megatron_bapo.cluster.planes import Hosts
from megatron_bapo.config.schema import Config
from megatron_bapo.errors import UserError
from megatron_bapo.planning.placement import Node, RunPlacement, place_run
from tests.unit.config.examples import config


def gpu_nodes(num: int, role="any", gpus: int = 8) -> list[Node]:
    return [Node(f"{role}{index}", f"10.0.0.{index}", gpus, role) for index in range(num)]


def on(placement: RunPlacement) -> tuple[list[str], list[str]]:
    """Return the nodes of the trainer and those of each engine, joined by +."""
    engines = ["+".join(node.node_id for node in nodes) for nodes in placement.engine_nodes]
    return [node.node_id for node in placement.trainer_nodes], engines


def test_engines_get_the_gpus_that_the_trainer_leaves_free_and_nodes_without_gpus_are_not_used() -> None:
    settings = config(parallel__world_size=12, rollout__num_engines=5, rollout__tensor_parallel_size=2)
    with pytest.raises(UserError, match="spread evenly"):
        place_run(settings, gpu_nodes(1))
    placement = place_run(settings, [Node("head", "10.0.1.0"), *gpu_nodes(3)])
    assert on(placement) == (["any0", "any1"], ["any0", "any1", "any2", "any2", "any2"])
    assert placement.ranks_per_node == 6
    assert [placement.engines_on(node) for node in placement.nodes] == [[0], [1], [2, 3, 4]]


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


def test_an_engine_on_two_nodes_has_the_same_number_of_gpus_on_each() -> None:
    engine = {"rollout__tensor_parallel_size": 16, "rollout__nodes_per_engine": 2}
    settings = config(parallel__world_size=8, rollout__num_engines=2, **engine)
    assert on(place_run(settings, gpu_nodes(5))) == (["any0"], ["any1+any2", "any3+any4"])
    with pytest.raises(UserError, match=r"only 1 fit .* needs 8 GPUs on each of its nodes"):
        place_run(settings, gpu_nodes(4))


def test_engines_on_two_nodes_use_few_nodes_and_all_fit_if_possible() -> None:
    engine = {"rollout__tensor_parallel_size": 8, "rollout__nodes_per_engine": 2, "rollout__num_engines": 2}
    settings = config(parallel__world_size=8, **engine)
    assert on(place_run(settings, gpu_nodes(9))) == (["any0"], ["any1+any2", "any1+any2"])
    uneven = [Node("trainer", "10.0.0.9", 8, "trainer"), *gpu_nodes(2, "rollout", 4)]
    uneven.append(Node("large", "10.0.0.10", 8, "rollout"))
    placement = place_run(settings, uneven)
    assert on(placement)[1] == ["rollout0+large", "rollout1+large"]
    assert placement.engines_on(uneven[-1]) == [0, 1]


def test_without_gpus_engines_on_two_nodes_go_to_the_nodes_in_turn() -> None:
    settings = config(parallel__world_size=3, rollout__tensor_parallel_size=2, rollout__nodes_per_engine=2)
    assert on(place_run(settings, gpu_nodes(3, gpus=0)))[1] == ["any2+any1"]
    with pytest.raises(UserError, match="only 0 fit"):
        place_run(settings, gpu_nodes(1, gpus=0))


def test_each_node_of_an_engine_has_its_own_host_in_the_weight_plan_unless_it_shares_the_trainers() -> None:
    engine = {"rollout__tensor_parallel_size": 2, "rollout__nodes_per_engine": 2, "rollout__num_engines": 2}
    placement = place_run(config(**engine), [*gpu_nodes(1, "trainer"), *gpu_nodes(2, "rollout", gpus=2)])
    assert on(placement)[1] == ["rollout0+rollout1", "rollout0+rollout1"]
    assert Hosts(placement, "shared").of_readers == ((1,), (2,))
    first = Node("first", "10.0.0.8")
    beside = RunPlacement((first,), 1, ((Node("last", "10.0.0.9"), first),))
    assert Hosts(beside, "shared").of_readers == ((1,), (0,))
    assert Hosts(beside, "own").of_readers == ((1,), (2,))


def taught(num_engines: int, size: int = 1, **values) -> Config:
    engines = {"num_engines": num_engines, "tensor_parallel_size": size}
    return config(algorithm__distillation={"teacher": "teacher", "engines": engines}, **values)


@pytest.mark.parametrize(
    ("values", "nodes", "expected"),
    [
        ({"parallel__world_size": 5}, gpu_nodes(2), [("any0", 6), ("any1", 0), ("any1", 0)]),
        ({"parallel__world_size": 7}, gpu_nodes(2), [("any1", 0), ("any1", 0), ("any1", 0)]),
        (
            {"parallel__world_size": 4, "rollout__num_engines": 6, "rollout__colocate": True},
            gpu_nodes(2),
            [("any0", 6), ("any1", 0), ("any1", 0)],
        ),
        ({}, [*gpu_nodes(1, "trainer"), *gpu_nodes(1, "rollout")], [("rollout0", 1)] * 3),
        ({}, gpu_nodes(2, gpus=0), [("any1", 1), ("any0", 1), ("any1", 1)]),
    ],
    ids=str,
)
def test_the_teachers_engines_get_what_trainer_and_engines_leave_free(values, nodes, expected) -> None:
    settings = taught(3, 2, **values)
    placement = place_run(settings, nodes)
    found = [(node.node_id, placement.num_policy_gpus_on(node, settings.rollout)) for node in placement.teacher_nodes]
    assert found == expected
    assert {*placement.teacher_nodes} <= {*placement.nodes}
    assert [placement.teachers_on(node) for node in dict.fromkeys(placement.teacher_nodes)] == [
        [index for index, (name, _) in enumerate(expected) if name == each]
        for each in dict.fromkeys(name for name, _ in expected)
    ]


def test_a_teacher_that_does_not_fit_beside_trainer_and_engines_is_refused_with_the_numbers() -> None:
    reason = r"distillation\.engines\.num_engines=2 of 4 ranks each, but only 1 fit on the GPUs that .* \(8 GPUs\)"
    with pytest.raises(UserError, match=reason):
        place_run(taught(2, 4, parallel__world_size=2), gpu_nodes(1))


@pytest.mark.parametrize(
    ("values", "nodes", "reason"),
    [
        ({"rollout__num_engines": 8}, gpu_nodes(1), "num_engines=8 of 1 ranks each, but only 7 fit"),
        ({"rollout__tensor_parallel_size": 8}, gpu_nodes(1), "nodes_per_engine=1 an engine needs 8 GPUs on each"),
        ({"parallel__world_size": 9}, gpu_nodes(3), "world_size=9 trainer ranks must spread evenly over nodes"),
        ({}, gpu_nodes(2, "rollout"), "no node of the cluster may have trainer ranks"),
    ],
    ids=str,
)
def test_a_run_that_does_not_fit_is_refused_with_the_numbers(values, nodes, reason) -> None:
    with pytest.raises(UserError, match=reason):
        place_run(config(**values), nodes)


def test_a_message_about_many_nodes_names_the_first_ones() -> None:
    with pytest.raises(UserError, match=r"the nodes are 10\.0\.0\.0 .*, 10\.0\.0\.7 \(8 GPUs\) and 504 more\. Add"):
        place_run(config(parallel__world_size=9001), gpu_nodes(512))
