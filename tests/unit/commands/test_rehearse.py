"""Rehearsals of the recipes: memory and communication of the trainer's own code beside the plan's.

Layers are alike, so ranks are played with few layers per stage and with one more; what a layer adds gives the full
size. Where a model begins with dense layers, few means one layer with experts behind them.
"""

import json
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
from typer.testing import CliRunner

from megatron_bapo.cli.main import app
from megatron_bapo.commands.rehearse import (
    BYTES_TOLERANCE,
    MEMORY_TOLERANCE,
    _micro_batch,
    rehearse_rank,
    rehearsed_config,
    stage_ranks,
)
from megatron_bapo.config.architecture import Architecture
from megatron_bapo.config.loading import load_config
from megatron_bapo.config.schema import Config
from megatron_bapo.errors import UserError
from megatron_bapo.planning.activations import chunk_activations
from megatron_bapo.planning.hardware import Assumptions
from megatron_bapo.planning.known_models import architecture_of
from megatron_bapo.planning.parameters import stage_chunks
from megatron_bapo.planning.trainer_memory import largest_micro_batch, stage_memory
from tests.unit.planning.examples import RECIPES, recipe

SHORT = ("qwen2.5-7b_8gpus", "qwen2.5-32b_64gpus", "paper_32b_64k_partial_16k", "paper_7b_64k")
"""Recipes of different layouts that take a few seconds each."""


def played(config: Config) -> tuple[object, ...]:
    """What a rehearsal depends on."""
    trainer = config.trainer
    sizes = config.max_micro_batch_tokens, config.max_sequence_length, trainer.logprob_chunk_size
    return config.model, config.parallel, config.optimizer.cpu_offload, config.algorithm.objective, *sizes


def others() -> Iterator[str]:
    """The other recipes, one of those that a rehearsal cannot tell apart."""
    seen = []
    for name in (*SHORT, *sorted(file.stem for file in RECIPES.glob("*.yaml"))):
        plan = recipe(name)
        config, _ = rehearsed_config(plan.config)
        if played(config) not in seen:
            seen.append(played(config))
            if name not in SHORT:
                yield name


def check(name: str) -> None:
    plan = recipe(name)
    config, _ = rehearsed_config(plan.config)
    architecture, _ = architecture_of(config.model)
    parallel = config.parallel
    num_stages, chunks_of_a_stage = parallel.pipeline_model_parallel_size, parallel.virtual_pipeline_model_parallel_size
    num_chunks = num_stages * chunks_of_a_stage
    fewest = 1 + min(architecture.moe_layers, default=0)  # the last layer is like the others of the stage
    even = config.model_copy(update={"parallel": parallel.model_copy(update={"pipeline_model_parallel_layout": None})})
    for rank in stage_ranks(config):
        num_held = None
        if chunks_of_a_stage == 1:  # a stage holds one for each stage from it to the last
            num_held = max(min(2, num_stages), num_stages - rank * num_stages // parallel.world_size)
        few, more = (
            rehearse_rank(even, replace(architecture, num_hidden_layers=num * num_chunks), rank, num_held)
            for num in (fewest, fewest + 1)
        )
        for found in few, more:
            assert found.sent_bytes.keys() - {"other"} == found.planned_traffic.keys()
            for axis, planned in found.planned_traffic.items():
                assert found.sent_bytes[axis] == pytest.approx(planned, rel=BYTES_TOLERANCE), axis
        num_layers = plan.stages[few.stage].num_layers // chunks_of_a_stage
        peak = few.peak_bytes + (num_layers - fewest) * (more.peak_bytes - few.peak_bytes)
        stage = stage_memory(config, architecture, Assumptions(expert_imbalance=1.0))[few.stage]
        planned = stage.peak - stage.reserved - stage.state.frozen
        assert peak == pytest.approx(planned, rel=MEMORY_TOLERANCE), f"rank {rank}: {peak / planned - 1:+.1%}"


@pytest.mark.slow
@pytest.mark.parametrize("name", SHORT)
def test_a_recipe_allocates_and_sends_what_is_planned(name: str) -> None:
    check(name)


@pytest.mark.parametrize(
    ("num_layers", "virtual_size", "layout"), [(5, 1, "[3,2]"), pytest.param(7, 2, "auto", marks=pytest.mark.slow)]
)
def test_stages_of_unequal_size_allocate_and_send_what_is_planned(
    num_layers: int, virtual_size: int, layout: str
) -> None:
    plan = recipe(
        "qwen2.5-7b_8gpus",
        "parallel.pipeline_model_parallel_size=2",
        f"parallel.virtual_pipeline_model_parallel_size={virtual_size}",
        f"parallel.pipeline_model_parallel_layout={layout}",
    )
    architecture = replace(plan.architecture, num_hidden_layers=num_layers)
    for rank in stage_ranks(plan.config):
        assert rehearse_rank(plan.config, architecture, rank).differences == []


TIED = "model.path=models/Qwen2.5-1.5B"
ADAPTERS = "model.lora.rank=64"


@pytest.mark.parametrize(
    "overrides",
    [
        pytest.param(("context_parallel_size=4",), id="context-without-data"),
        pytest.param((TIED, "pipeline_model_parallel_size=2", "context_parallel_size=2"), id="tied-stages"),
        pytest.param((TIED, "tensor_model_parallel_size=4", "sequence_parallel=true"), id="more-ranks-than-key-heads"),
        pytest.param((ADAPTERS, "tensor_model_parallel_size=2", "sequence_parallel=true"), id="adapters-sequence"),
        pytest.param((ADAPTERS, "tensor_model_parallel_size=2", "recompute_granularity=full"), id="adapters-recompute"),
        pytest.param(
            (ADAPTERS, "model.lora.target_modules=[q_proj,v_proj]", "model.lora.dropout=0.1"), id="few-adapters"
        ),
    ],
)
def test_a_layout_allocates_and_sends_what_is_planned(overrides: tuple[str, ...]) -> None:
    plan = recipe(
        "qwen2.5-7b_8gpus",
        "parallel.world_size=4",
        "parallel.tensor_model_parallel_size=1",
        "parallel.sequence_parallel=false",
        "rollout.max_response_length=3072",
        "trainer.max_tokens_per_gpu=4096",
        *(value if value.startswith("model.") else f"parallel.{value}" for value in overrides),
    )
    architecture = replace(plan.architecture, num_hidden_layers=4)
    for rank in stage_ranks(plan.config):
        found = rehearse_rank(plan.config, architecture, rank)
        assert found.differences == []
        assert found.peak_bytes == pytest.approx(found.planned_peak_bytes, rel=0.01)


def test_a_stage_does_not_hold_what_it_has_sent() -> None:
    plan = recipe("qwen2.5-7b_8gpus", "parallel.pipeline_model_parallel_size=4", "parallel.recompute_granularity=full")
    architecture = replace(plan.architecture, num_hidden_layers=4)
    three, four = (rehearse_rank(plan.config, architecture, 0, num) for num in (3, 4))
    batch = largest_micro_batch(plan.config, Assumptions())
    (chunk,) = stage_chunks(architecture, plan.config.parallel, 0)
    kept = sum(chunk_activations(architecture, plan.config.parallel, chunk, batch).values())
    assert four.peak_bytes - three.peak_bytes == pytest.approx(kept, rel=0.01)


def test_a_model_whose_gradients_are_as_small_as_the_sums_of_the_clip_bounds_agrees() -> None:
    config = load_config(RECIPES.parent / "quickstart.yaml", [])
    assert rehearse_rank(config, architecture_of(config.model)[0], 0).differences == []


@pytest.mark.slow
@pytest.mark.parametrize("modules", [(), ("moe",)])
@pytest.mark.parametrize("name", ["qwen3-30b-a3b_16gpus", "glm-4.5-air_64gpus"])
def test_tensor_parallelism_sends_for_attention_dense_layers_and_shared_experts(
    name: str, modules: tuple[str, ...]
) -> None:
    recompute = (f"parallel.recompute_granularity={'selective' if modules else 'null'}",)
    plan = recipe(
        name,
        "parallel.tensor_model_parallel_size=2",
        "parallel.sequence_parallel=true",
        "parallel.context_parallel_size=1",
        "trainer.max_tokens_per_gpu=10240",
        "parallel.expert_tensor_parallel_size=1",
        *recompute,
        *(f"parallel.recompute_modules=[{','.join(modules)}]" for _ in modules),
    )
    config, _ = rehearsed_config(plan.config)
    stages = config.parallel.pipeline_model_parallel_size
    found = rehearse_rank(config, replace(plan.architecture, num_hidden_layers=2 * stages), 0)
    assert found.sent_bytes["tensor"] == pytest.approx(found.planned_traffic["tensor"], rel=BYTES_TOLERANCE)


@pytest.mark.slow
def test_a_mixture_of_experts_holds_what_it_sends_and_receives_until_the_results_are_back() -> None:
    """With one layer on the first stage, these tensors are half of the peak that is not the model's state."""
    plan = recipe("qwen3-30b-a3b_16gpus", "parallel.pipeline_model_parallel_size=2")
    config, _ = rehearsed_config(plan.config)
    found = rehearse_rank(config, replace(plan.architecture, num_hidden_layers=2), 0)
    assert found.peak_bytes == pytest.approx(found.planned_peak_bytes, rel=0.02)


def experts(num_layers: int, *overrides: str) -> tuple[Config, Architecture]:
    """Qwen3-30B-A3B's layers on 8 ranks with the defaults of the distributed optimizer, without overlap."""
    without = ("overlap_grad_reduce=false", "overlap_param_gather=false", "pipeline_model_parallel_size=1")
    layout = [f"parallel.{value}" for value in (*without, "context_parallel_size=1", "expert_model_parallel_size=2")]
    plan = recipe("qwen3-30b-a3b_8gpus", *layout, "optimizer.cpu_offload=false", *overrides)
    return rehearsed_config(plan.config)[0], replace(plan.architecture, num_hidden_layers=num_layers)


def test_parameters_are_gathered_once_per_update_although_experts_have_an_optimizer_of_their_own() -> None:
    found = rehearse_rank(*experts(1), 0)
    gathers = {part.axis: part.num_calls for part in found.traffic if part.kind == "all-gather"}
    assert (gathers["data"], gathers["expert data"]) == (1, 1)
    assert found.differences == []


@pytest.mark.parametrize(
    "overrides",
    [
        pytest.param((), id="distributed"),
        pytest.param(("parallel.use_distributed_optimizer=false",), id="plain"),
        pytest.param(("optimizer.moments_dtype=bfloat16", "optimizer.adam_beta2=0.95"), id="bfloat16-moments"),
        pytest.param(("optimizer.cpu_offload=true",), id="offloaded"),
    ],
)
def test_adapters_of_experts_only_are_updated(overrides: tuple[str, ...]) -> None:
    adapters = ("model.lora.rank=64", "model.lora.target_modules=[gate_proj,up_proj,down_proj]")
    found = rehearse_rank(*experts(1, *adapters, *overrides), 0)
    assert found.sent_bytes["expert data"] == pytest.approx(found.planned_traffic["expert data"], rel=BYTES_TOLERANCE)
    assert "data" not in found.planned_traffic


@pytest.mark.parametrize(
    ("max_length", "budget", "overrides", "expected"),
    [
        (5120, 16384, (), (4, 4096)),  # 3 x 5461 tokens leave some of 128 experts with fewer
        (3072, 10000, (), (4, 2500)),
        (512, 10000, (), (20, 500)),
        (9216, 9216, ("parallel.context_parallel_size=2",), (2, 9216)),
        (9216, 9999, ("parallel.tensor_model_parallel_size=2", "parallel.sequence_parallel=true"), (1, 9984)),
    ],
)
def test_all_experts_get_equally_many_tokens_of_as_much_of_the_budget_as_possible(
    max_length: int, budget: int, overrides: tuple[str, ...], expected: tuple[int, int]
) -> None:
    lengths = (f"rollout.max_response_length={max_length - 256}", "data.max_prompt_length=256")
    config, architecture = experts(1, *lengths, f"trainer.max_tokens_per_gpu={budget}", *overrides)
    batch = _micro_batch(config, architecture)
    assert (len(batch.lengths), *set(batch.lengths)) == expected
    assert sum(batch.lengths) <= config.max_micro_batch_tokens
    assert batch.split_tokens(config.parallel) * architecture.num_experts_per_tok % architecture.num_experts == 0


def test_a_mixture_of_experts_whose_budget_is_no_multiple_of_its_experts_agrees() -> None:
    lengths = ("data.max_prompt_length=1024", "rollout.max_response_length=4096", "trainer.max_tokens_per_gpu=16384")
    found = rehearse_rank(*experts(4, *lengths, "parallel.expert_model_parallel_size=8"), 0)
    assert found.micro_batch_tokens == 16384
    assert found.differences == []


def test_a_budget_with_which_an_expert_gets_no_token_is_refused() -> None:
    config, architecture = experts(1)
    small = config.model_copy(update={"trainer": config.trainer.model_copy(update={"max_tokens_per_gpu": 15})})
    few = small.model_copy(
        update={
            "data": small.data.model_copy(update={"max_prompt_length": 4}),
            "rollout": small.rollout.model_copy(update={"max_response_length": 8}),
        }
    )
    with pytest.raises(UserError, match=r"max_tokens_per_gpu=15 .* set it to 16 or more"):
        _micro_batch(few, architecture)


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        ("parallel.tensor_model_parallel_size=4", "parallel.context_parallel_size=1"),
        ("parallel.tensor_model_parallel_size=2", "parallel.context_parallel_size=2"),
    ],
)
def test_a_model_of_gated_delta_nets_allocates_and_sends_what_is_planned(changes: tuple[str, ...]) -> None:
    plan = recipe("qwen2.5-32b_16gpus", "model.path=Qwen3.5-27B", "parallel.pipeline_model_parallel_size=1", *changes)
    config, _ = rehearsed_config(plan.config)
    arch = replace(plan.architecture, num_hidden_layers=4, linear_layers=frozenset(range(3)))
    found = rehearse_rank(config, arch, 0)
    assert found.peak_bytes == pytest.approx(found.planned_peak_bytes, rel=0.01)
    for axis, planned in found.planned_traffic.items():
        assert found.sent_bytes[axis] == pytest.approx(planned, rel=BYTES_TOLERANCE), axis


@pytest.mark.slow
@pytest.mark.parametrize("name", [*others()])
def test_every_recipe_allocates_and_sends_what_is_planned(name: str) -> None:
    check(name)


@pytest.mark.slow
def test_the_command_plays_a_rank_at_full_size() -> None:
    arguments = ["rehearse", str(RECIPES / "paper_octothinker_3b_async.yaml"), "--rank", "1", "--json"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    (found,) = json.loads(result.stdout)
    assert (found["rank"], found["stage"], found["micro_batch_tokens"]) == (1, 0, 9216)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["qwen2.5-7b_8gpus.yaml", "--rank", "8"], "--rank 8 must be one of 0 to 7, because parallel.world_size=8"),
        (
            [
                "qwen3-30b-a3b_16gpus.yaml",
                "parallel.tensor_model_parallel_size=2",
                "parallel.sequence_parallel=true",
                "parallel.expert_model_parallel_size=4",
                "parallel.expert_tensor_parallel_size=null",
            ],
            "set parallel.expert_tensor_parallel_size=1",
        ),
        (["qwen2.5-7b_8gpus.yaml", "parallel.tensor_model_parallel_size=3"], "parallel"),
    ],
)
def test_what_cannot_be_played_is_refused(arguments: list[str], expected: str) -> None:
    result = CliRunner().invoke(app, ["rehearse", str(RECIPES / arguments[0]), *arguments[1:]])
    assert result.exit_code == 2
    assert expected in result.output


def test_collectives_that_do_not_fit_their_group_fail() -> None:
    import torch
    import torch.distributed as dist

    from megatron_bapo.parallel.fake_ranks import fake_rank, process_group

    with process_group(rank=1, world_size=4), fake_rank((8, 1, 16)) as counted:
        dist.all_gather_single(torch.empty(8, 4), torch.empty(2, 4))
        (kind,) = counted.calls
        assert (kind[0].ranks, kind[1]) == ((0, 1, 2, 3), "all-gather")
        assert counted.sent_bytes[kind] == 3 * 2 * 4 * 4
        with pytest.raises(ValueError, match="are not 4 parts"):
            dist.all_gather_single(torch.empty(9, 4), torch.empty(2, 4))
        before = counted.live_bytes
        large = torch.empty(1024, 1024)
        assert counted.live_bytes - before == 4 << 20
        peak = counted.peak_bytes
        large.mul_(torch.from_numpy(np.float32([2.0])))  # its value is known, so it is not on the meta device
        assert counted.peak_bytes == peak
        del large
        assert counted.live_bytes == before
