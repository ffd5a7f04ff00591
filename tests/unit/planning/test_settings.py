import pytest

from megatron_bapo.config.checks import planned_problems
from megatron_bapo.planning.settings import Placement, changes, with_placement, with_settings
from tests.unit.planning.examples import recipe

COLOCATED, SEPARATE = "qwen2.5-7b_8gpus", "r1-distill-qwen-7b_16gpus_async"
APART = ["rollout.colocate=false", "rollout.sleep_level=0", "trainer.offload=false"]


@pytest.mark.parametrize(
    ("name", "transport", "placement", "expected"),
    [
        (COLOCATED, "store", "separate", APART),
        (COLOCATED, "cuda_ipc", "separate", [*APART, "weight_sync.transport=store"]),
        (COLOCATED, "nccl", "separate", APART),
        (COLOCATED, "cuda_ipc", "colocated", []),
        (SEPARATE, "store", "colocated", ["rollout.colocate=true"]),
        (SEPARATE, "nccl", "colocated", ["rollout.colocate=true", "weight_sync.transport=store"]),
        (SEPARATE, "nccl", "separate", []),
    ],
)
def test_a_placement_is_the_overrides_that_select_it(
    name: str, transport: str, placement: Placement, expected: list[str]
) -> None:
    given = recipe(name, f"weight_sync.transport={transport}").config
    placed = with_placement(given, placement)
    assert sorted(changes(given, placed)) == sorted(expected)
    assert not [line for line in planned_problems(placed, recipe(name).architecture, "") if "colocate" in line]


def test_keys_that_are_not_set_remain_so_under_new_settings() -> None:
    config = recipe(COLOCATED).config
    changed = with_settings(config, {"trainer": {"offload": False}}).trainer
    assert changed.model_fields_set == config.trainer.model_fields_set | {"offload"}
