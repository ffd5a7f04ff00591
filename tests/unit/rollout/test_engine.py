from megatron_bapo.model.weight_layouts import engine_route, one_host_per_gpu
from megatron_bapo.rollout.engine import engine_devices, engine_environment
from tests.unit.config.examples import config

GPUS = [str(gpu) for gpu in range(8)]
TWO_BY_TWO = {"rollout__num_engines": 2, "rollout__tensor_parallel_size": 2, "parallel__world_size": 4}


def test_engines_get_the_gpus_after_the_trainers_and_colocated_engines_see_all_gpus() -> None:
    apart, together = config(**TWO_BY_TWO), config(**TWO_BY_TWO, rollout__colocate=True)
    assert [engine_devices(apart, slot, 4, GPUS) for slot in (0, 1)] == [["4", "5"], ["6", "7"]]
    assert engine_devices(together, 1, 4, GPUS[:4]) == ["2", "3", "0", "1"]
    assert engine_devices(apart, 0, 0, GPUS)[0] == "0"
    assert engine_devices(apart, 0, 4, []) == []


def test_ray_does_not_hide_the_gpus_of_an_engine() -> None:
    environment = engine_environment(["2", "3"])
    assert environment["CUDA_VISIBLE_DEVICES"] == "2,3"
    assert environment["RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"] == "1"
    assert "CUDA_VISIBLE_DEVICES" not in engine_environment()


def test_an_engine_on_gpus_uses_batch_invariant_kernels_only_if_told_to() -> None:
    for wanted in False, True:
        environment = engine_environment(["0"], batch_invariant=wanted)
        assert environment["VLLM_BATCH_INVARIANT"] == str(int(wanted))


def test_places_in_the_plan_are_ranks_of_the_transfer_group(tmp_path) -> None:
    """Trainer ranks come first, then the ranks of each engine in turn; both start from 0 if they share GPUs."""
    for colocate, first in ((False, 4), (True, 0)):
        checked = config(**TWO_BY_TWO, rollout__colocate=colocate)
        routes = [engine_route(checked, tmp_path, index) for index in (0, 1)]
        assert [route.first_place for route in routes] == [first, first + 2]
        assert {route.num_places for route in routes} == {first + 4}
        placement = one_host_per_gpu(checked)
        assert placement.sender_hosts == (0, 1, 2, 3)
        assert placement.reader_hosts == ((first, first + 2), (first + 1, first + 3))
