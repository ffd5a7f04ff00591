from typing import Any

import pytest

from megatron_bapo.config.checks import check_config, refuse
from megatron_bapo.config.colocation_checks import allocator_problems, device_problems, host_problems, layer_problems
from megatron_bapo.errors import UserError
from tests.unit.config.examples import config, problems

COLOCATED = {"rollout__colocate": True}
ENGINES_OF_TEACHER = {"teacher": "teacher", "engines": {"num_engines": 2, "tensor_parallel_size": 2}}


@pytest.mark.parametrize(
    ("values", "value", "rule", "way_out"),
    [
        ({"rollout__sleep_level": 1}, "rollout.sleep_level=1", "engines have GPUs of their own", "colocate=true"),
        ({"trainer__offload": True}, "trainer.offload=true", "frees GPUs for the engines", "set offload=false"),
        (
            {"weight_sync__transport": "cuda_ipc"},
            "weight_sync.transport=cuda_ipc",
            "see only their own GPUs",
            "set transport=nccl or store",
        ),
        (
            {"weight_sync__transport": "nccl", **COLOCATED},
            "weight_sync.transport=nccl",
            "two ranks on one GPU",
            "set transport=cuda_ipc or store",
        ),
        (
            {"weight_sync__transport": "nccl", "weight_sync__engine_store": "own"},
            "weight_sync.engine_store=own",
            "only transport=store",
            "set engine_store=shared",
        ),
        (
            {
                "weight_sync__transport": "cuda_ipc",
                "rollout__nodes_per_engine": 2,
                "rollout__tensor_parallel_size": 2,
                **COLOCATED,
            },
            "rollout.nodes_per_engine=2",
            "works only on one machine",
            "set transport=store",
        ),
    ],
)
def test_placements_that_cannot_work_on_any_machine_are_refused(
    values: dict[str, Any], value: str, rule: str, way_out: str
) -> None:
    (problem,) = problems(config(**values))
    assert problem.strip().startswith(value)
    assert rule in problem
    assert way_out in problem


@pytest.mark.parametrize(
    ("values", "num_gpus", "expected"),
    [
        ({**COLOCATED, "rollout__sleep_level": 1}, 0, "vLLM's CPU build frees no memory when it sleeps"),
        ({**COLOCATED, "weight_sync__transport": "cuda_ipc"}, 0, "it shares GPU memory; set transport=store"),
        ({"rollout__quantization": "fp8_per_block", "model__dtype": "bfloat16"}, 0, "vLLM supports it only on GPUs"),
        ({"rollout__kv_cache_dtype": "fp8_e4m3"}, 0, "vLLM supports an FP8 KV cache only on GPUs"),
        ({"rollout__batch_invariant": True}, 0, "rollout.batch_invariant=true on a machine without a GPU"),
        ({"rollout__enforce_eager": False}, 0, "rollout.enforce_eager=false on a machine without a GPU"),
        (
            {"algorithm__distillation": ENGINES_OF_TEACHER | {"engines": {"enable_expert_parallel": True}}},
            0,
            "algorithm.distillation.engines.enable_expert_parallel=true on a machine without a GPU",
        ),
        ({"logging__memory_snapshot_step": 2}, 0, "logging.memory_snapshot_step=2 on a machine without a GPU"),
        (
            {"parallel__world_size": 4, "rollout__num_engines": 2, "rollout__tensor_parallel_size": 2},
            7,
            "4 trainer ranks (parallel.world_size) and 4 engine ranks (rollout.num_engines x tensor_parallel_size x "
            "pipeline_parallel_size) need 8 GPUs with rollout.colocate=false, but this machine has 7",
        ),
        ({"parallel__world_size": 4, **COLOCATED}, 3, "need 4 GPUs with rollout.colocate=true"),
        (
            {"parallel__world_size": 4, **COLOCATED, "algorithm__distillation": ENGINES_OF_TEACHER},
            7,
            "need 8 GPUs with rollout.colocate=true, with 4 for the teacher (algorithm.distillation.engines), but this "
            "machine has 7",
        ),
    ],
)
def test_settings_that_this_machine_does_not_support_are_refused(
    values: dict[str, Any], num_gpus: int, expected: str
) -> None:
    checked = config(**values)
    if checked.algorithm.distillation is None:  # whose teacher is on another machine
        check_config(checked)
    with pytest.raises(UserError) as caught:
        refuse(device_problems(checked, num_gpus))
    (problem,) = str(caught.value).splitlines()[1:]
    assert expected in problem


@pytest.mark.parametrize(
    ("values", "num_gpus"),
    [
        ({"weight_sync__transport": "nccl"}, 0),
        ({"trainer__offload": True, **COLOCATED}, 0),
        ({"weight_sync__transport": "nccl"}, 2),
        ({"rollout__enforce_eager": False, "logging__memory_snapshot_step": 2}, 2),
        (
            {"trainer__offload": True, "rollout__sleep_level": 2, "weight_sync__transport": "cuda_ipc", **COLOCATED},
            1,
        ),
    ],
    ids=str,
)
def test_valid_placements_are_allowed(values: dict[str, Any], num_gpus: int) -> None:
    checked = config(**values)
    assert check_config(checked) == []
    refuse(device_problems(checked, num_gpus))


def test_engines_on_cpus_have_all_experts_on_each_rank() -> None:
    checked = config(rollout__enable_expert_parallel=True)
    (problem,) = device_problems(checked, 0)
    assert problem.startswith("rollout.enable_expert_parallel=true on a machine without a GPU")
    assert [*device_problems(checked, 8), *device_problems(checked, 0, engines=False)] == []


def test_without_engines_only_the_trainer_must_fit() -> None:
    checked = config(parallel__world_size=4, rollout__num_engines=8)
    refuse(device_problems(checked, 4, engines=False))
    with pytest.raises(UserError, match=r"4 trainer ranks .* 0 engine ranks .* need 4 GPUs"):
        refuse(device_problems(checked, 3, engines=False))


def test_an_engine_on_several_nodes_needs_as_many() -> None:
    settings = config(rollout__tensor_parallel_size=4, rollout__nodes_per_engine=2)
    assert not [*host_problems(settings, 2)]
    (problem,) = host_problems(settings, 1)
    assert problem.startswith("rollout.nodes_per_engine=2 places each engine on as many nodes, but the run has 1")


def test_expandable_segments_are_refused_where_other_processes_open_parameters() -> None:
    shared = config(**COLOCATED, weight_sync__transport="cuda_ipc")
    for name in "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF":
        set_to = {name: "max_split_size_mb:128, expandable_segments: True"}
        (problem,) = allocator_problems(shared, set_to)
        assert problem.startswith(f"{name}=max_split_size_mb")
        assert "set transport=store" in problem
        assert not [*allocator_problems(config(**COLOCATED), set_to)]
    assert not [*allocator_problems(shared, {"PYTORCH_ALLOC_CONF": "expandable_segments:False"})]


def test_batch_invariant_kernels_need_hopper() -> None:
    settings = config(rollout__batch_invariant=True)
    (problem,) = layer_problems(settings, (8, 0), True)
    assert "capability 9.0 or higher, these have 8.0" in problem
    assert not [*layer_problems(settings, (9, 0), True)]
