"""Plans of pipelines whose stages have different numbers of layers."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from megatron_bapo.cli.main import app
from megatron_bapo.config.pipeline_layers import AUTO_LENGTH, layer_flops, output_flops
from megatron_bapo.planning.flops import forward_flops
from megatron_bapo.planning.known_models import FOLDER
from megatron_bapo.planning.parameters import Split, chunk_parameters, stage_chunks, whole_model
from megatron_bapo.planning.plan import Plan
from megatron_bapo.planning.rendering import layout_name
from megatron_bapo.planning.search import search
from megatron_bapo.planning.settings import changes
from tests.unit.planning.examples import RECIPES, recipe

NAME = "qwen3-235b-a22b_128gpus"
LAYOUT = "parallel.pipeline_model_parallel_layout"


def plan(layout: str, *overrides: str) -> Plan:
    return recipe(NAME, f"{LAYOUT}={layout}", *overrides)


def run(*arguments: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, ["plan", str(RECIPES / f"{NAME}.yaml"), *arguments])
    return result.exit_code, result.stdout, result.output


@pytest.mark.parametrize("name", ["Qwen3-8B", "Qwen3-235B-A22B"])
def test_the_flops_that_auto_balances_are_those_of_the_plan(name: str) -> None:
    architecture = recipe("qwen3-30b-a3b_16gpus", f"model.path={name}", "parallel.expert_model_parallel_size=1")
    architecture = architecture.architecture
    ours = sum(layer_flops(architecture, layer) for layer in range(architecture.num_hidden_layers))
    ours += output_flops(architecture)
    linear, attention = forward_flops(architecture, AUTO_LENGTH, AUTO_LENGTH**2)
    assert ours * AUTO_LENGTH == pytest.approx(linear + attention, rel=1e-4)  # the plan counts norms, too


@pytest.mark.parametrize("virtual_size", [1, 2])
def test_qwen3_235b_is_planned_on_8_stages(virtual_size: int) -> None:
    planned = plan("auto", f"parallel.virtual_pipeline_model_parallel_size={virtual_size}")
    parallel, architecture = planned.config.parallel, planned.architecture
    assert [stage.num_layers for stage in planned.stages] == [12] * 7 + [10]
    assert planned.fits
    chunks = [chunk for stage in range(8) for chunk in stage_chunks(architecture, parallel, stage)]
    split = replace(Split.of(parallel), pipeline=1)
    numel = sum(p.numel for chunk in chunks for p in chunk_parameters(architecture, split, chunk))
    assert numel == sum(p.numel for p in chunk_parameters(architecture, split, whole_model(architecture)))
    state = [stage.state.parameters for stage in planned.stages]
    assert state[1:7] == [state[1]] * 6
    assert state[7] < state[1] < state[0]  # the first stage has the embedding beside its 12 layers


def test_the_command_plans_qwen3_235b_and_names_the_division_that_works() -> None:
    code, _, output = run(f"{LAYOUT}=null")
    assert code == 2
    assert f"set {LAYOUT}=auto, which gives [12, 12, 12, 12, 12, 12, 12, 10]" in " ".join(output.split())
    code, printed, _ = run()
    assert code == 0
    assert "  layers                      12     12     12     10" in printed


@pytest.mark.parametrize("sizes", [(4, 1), (4, 2)])
def test_a_model_of_61_layers_is_planned_on_4_stages(tmp_path: Path, sizes: tuple[int, int]) -> None:
    fields = json.loads((FOLDER / "Qwen3-235B-A22B" / "config.json").read_text()) | {"num_hidden_layers": 61}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    pipeline = [f"parallel.pipeline_model_parallel_size={sizes[0]}", "parallel.expert_model_parallel_size=8"]
    pipeline += [f"parallel.virtual_pipeline_model_parallel_size={sizes[1]}", f"model.path={tmp_path}"]
    code, printed, _ = run(*pipeline, "--json")
    assert code == 0
    stages = json.loads(printed)["stages"]
    assert [stage["num_layers"] for stage in stages] == [16, 16, 16, 13]


def test_the_slowest_stage_sets_the_time_of_the_pipeline() -> None:
    balanced, first, last = plan("auto").time, plan("[20, 8]").time, plan("[11, 11]").time
    assert balanced.training < last.training < first.training
    for time in (first, last):
        assert time.trainer.compute == pytest.approx(balanced.trainer.compute)
        assert time.trainer.bubble > balanced.trainer.bubble


def test_the_stage_with_the_most_layers_decides_memory() -> None:
    balanced, uneven = plan("auto"), plan("[6, 16]")
    assert [stage.num_layers for stage in uneven.stages] == [6, *[12] * 6, 16]
    assert uneven.stages[7].state.on_device > balanced.stages[7].state.on_device
    assert uneven.stages[0].state.on_device < balanced.stages[0].state.on_device
    assert uneven.fullest_resident_stage.stage == 7


def test_the_fullest_rank_holds_the_routes_of_the_most_layers() -> None:
    replay = "algorithm.behaviour_policy=recomputed", "algorithm.routing_replay=trainer"
    balanced, uneven = plan("auto", *replay), plan("[20, 8]", *replay)
    assert uneven.routes.rank == pytest.approx(balanced.routes.rank * 20 / 12, rel=1e-6)


def test_a_search_divides_unevenly_only_where_stages_do_not_divide_the_layers() -> None:
    base = recipe("qwen2.5-7b_8gpus")
    base = replace(base, architecture=replace(base.architecture, num_hidden_layers=26))
    found = search(base, 8)
    uneven = [each for each in found if each.config.parallel.pipeline_model_parallel_layout is not None]
    sizes = {
        (parallel.pipeline_model_parallel_size, parallel.virtual_pipeline_model_parallel_size)
        for parallel in (each.config.parallel for each in uneven)
    }
    assert {(4, 1), (4, 2), (8, 1)} <= sizes
    assert all(26 % pp for pp, _ in sizes)
    for each in uneven:
        assert f"{LAYOUT}=auto" in changes(base.config, each.config)
        assert "uneven stages" in layout_name(each.config)
