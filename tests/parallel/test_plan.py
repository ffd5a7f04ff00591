"""The planner's estimates for every rank match what the rank allocates."""

import json
from dataclasses import asdict
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

from megatron_bapo.config.architecture import Architecture, read_architecture
from megatron_bapo.config.schema import Config
from megatron_bapo.planning.activations import MicroBatch, chunk_activations, output_layer_bytes
from megatron_bapo.planning.model_state import model_state
from megatron_bapo.planning.parameters import Split, chunk_parameters, stage_chunks
from tests.parallel.examples import make_config, with_adapters, with_offload_and_frozen_models
from tests.parallel.launching import launch
from tests.parallel.layouts import DELTA_NETS, LATENT, MODELS, PLAIN, SHARED, SMALL, WHOLE_QUERIES, WINDOWS, Layout
from tests.parallel.tensors import save_random_model
from tests.tolerances import PLANNED_ACTIVATIONS

BF16 = {"dtype": "bfloat16"}
SPREAD = {"distributed_optimizer": True}
EXPERTS = ("qwen3_moe",)
LAYOUTS = {
    "one": Layout(1, models=(*SMALL, *PLAIN, *LATENT, *WINDOWS, *DELTA_NETS, WHOLE_QUERIES)),
    "one-full": Layout(1, recompute="full", models=EXPERTS),
    "one-core-attn": Layout(
        1, recompute="selective", models=("llama", "qwen3_moe", *LATENT, *WINDOWS, *DELTA_NETS[:2])
    ),
    "one-mlp-moe": Layout(
        1, recompute="selective", recompute_modules=("mlp", "moe"), **BF16, models=(*EXPERTS, *SHARED)
    ),
    "one-bf16": Layout(1, **BF16, models=("qwen3", "qwen3_next")),
    "one-spread-bf16": Layout(1, **SPREAD, **BF16, models=(*EXPERTS, *SHARED)),
    "tp2": Layout(2, tp=2, **BF16, models=("qwen3",)),
    "tp2-sp": Layout(2, tp=2, sp=True, **SPREAD, **BF16, models=("qwen2", "mistral")),
    "pp2": Layout(2, pp=2, **SPREAD, **BF16, models=("llama",)),
    "pp2-uneven": Layout(2, pp=2, layers=(1, 3), **SPREAD, **BF16, models=("qwen2", "qwen3_moe")),
    "pp2-vpp2": Layout(2, pp=2, vpp=2, **SPREAD, overlap=True, models=("qwen3",)),
    "cp2": Layout(2, cp=2, **SPREAD, **BF16, models=("llama", "qwen3_moe", *LATENT, *WINDOWS, *DELTA_NETS[:2])),
    "dp2": Layout(2, **BF16, models=("qwen2",)),
    "dp2-overlap": Layout(2, **SPREAD, overlap=True, **BF16, models=("qwen3",)),
    "tp4-sp": Layout(4, tp=4, sp=True, **SPREAD, **BF16, models=("qwen2", "qwen3_5_text")),
    "tp2-sp-pp2-core-attn": Layout(4, tp=2, sp=True, pp=2, recompute="selective", **BF16, models=("qwen2",)),
    "pp2-cp2": Layout(4, pp=2, cp=2, **SPREAD, overlap=True, recompute="full", **BF16, models=("qwen3",)),
    "tp2-sp-ep2-etp1": Layout(
        4,
        tp=2,
        sp=True,
        ep=2,
        etp=1,
        **SPREAD,
        **BF16,
        models=(*EXPERTS, *SHARED, *LATENT, *WINDOWS, *DELTA_NETS[:1]),
    ),
    "ep2-dp4": Layout(4, ep=2, **SPREAD, overlap=True, **BF16, models=EXPERTS),
}
CASES = [(model, name) for name, layout in LAYOUTS.items() for model in layout.models]
LENGTHS = (24, 24, 8)
"""Lengths as in plan_ranks.py; no layout pads them."""
OFFLOADED = ("qwen3", "dp2-overlap")


ADAPTED = [
    ("qwen3-dp2-overlap", {"rank": 3, "target_modules": ("k_proj", "o_proj", "up_proj")}),
    *((f"{EXPERTS[0]}-{name}", {"rank": 4}) for name in ("one-spread-bf16", "tp2-sp-ep2-etp1", "ep2-dp4")),
    ("qwen3-pp2-vpp2", {"rank": 5}),
    ("deepseek_v3-tp2-sp-ep2-etp1", {"rank": 3, "target_modules": ("q_a_proj", "q_b_proj", "kv_b_proj", "o_proj")}),
]
"""Cases that are repeated with adapters, a reference model and an offloaded optimizer where it is sharded."""


def parallel(name: str) -> dict:
    return {**LAYOUTS[name].parallel, "ddp_bucket_size": 2000}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("plan")
    for model in (*SMALL, *PLAIN, *LATENT, *WINDOWS, *DELTA_NETS, WHOLE_QUERIES):
        save_random_model(AutoModelForCausalLM.from_config(MODELS[model]), root / model)
    cases = [
        {
            "name": f"{model}-{name}",
            "model": str(root / model),
            "parallel": parallel(name),
            "dtype": LAYOUTS[name].dtype,
            "offload_and_frozen_models": False,
            "lora": None,
        }
        for model, name in CASES
    ]
    offloaded = next(case for case in cases if case["name"] == "-".join(OFFLOADED))
    cases.append({**offloaded, "name": "offloaded", "offload_and_frozen_models": True})
    named = {case["name"]: case for case in cases}
    for name, lora in ADAPTED:
        cases.append({**named[name], "name": f"{name}-{lora['rank']}", "lora": lora, "offload_and_frozen_models": True})
    cases.sort(key=lambda case: case["parallel"]["world_size"])
    launch("plan_ranks.py", cases, root, world_size=4)
    return root


def ranks(results: Path, name: str) -> list[dict]:
    return [json.loads(file.read_text()) for file in sorted((results / name).glob("?.json"))]


def planned(results: Path, model: str, name: str) -> tuple[Config, Architecture]:
    folder = results / model
    return make_config(folder, results, parallel(name), LAYOUTS[name].dtype, packing=True), read_architecture(folder)


@pytest.mark.parametrize(("model", "name"), CASES)
def test_parameters_are_in_megatrons_order_with_their_sizes(results: Path, model: str, name: str) -> None:
    config, architecture = planned(results, model, name)
    for rank in ranks(results, f"{model}-{name}"):
        chunks = stage_chunks(architecture, config.parallel, rank["stage"])
        ours = [chunk_parameters(architecture, Split.of(config.parallel), chunk) for chunk in chunks]
        assert [[p.numel for p in chunk] for chunk in ours] == rank["numel"]
        assert [[p.name.split(".")[-2:] for p in chunk] for chunk in ours] == [
            [name.split(".")[-2:] for name in chunk] for chunk in rank["names"]
        ]


@pytest.mark.parametrize(("model", "name"), CASES)
def test_parameters_gradients_and_optimizer_have_exactly_the_planned_bytes(
    results: Path, model: str, name: str
) -> None:
    config, architecture = planned(results, model, name)
    found = ranks(results, f"{model}-{name}")
    assert len(found) == LAYOUTS[name].world_size
    for rank in found:
        ours = model_state(config, architecture, rank["stage"], rank["data_rank"], rank["expert_data_rank"])
        assert asdict(ours) == rank["state"]


def test_an_offloaded_optimizer_a_reference_model_and_a_teacher_have_exactly_the_planned_bytes(results: Path) -> None:
    config, architecture = planned(results, *OFFLOADED)
    config = with_offload_and_frozen_models(config)
    for rank in ranks(results, "offloaded"):
        ours = model_state(config, architecture, rank["stage"], rank["data_rank"], rank["expert_data_rank"])
        assert asdict(ours) == rank["state"]
        assert ours.offloaded > ours.reference == ours.teacher > 0 == ours.optimizer


@pytest.mark.parametrize(("case", "lora"), ADAPTED)
def test_adapters_have_exactly_the_planned_bytes_and_need_no_reference_copy(
    results: Path, case: str, lora: dict
) -> None:
    model, name = case.split("-", 1)
    config, architecture = planned(results, model, name)
    config = with_adapters(with_offload_and_frozen_models(config), lora)
    for rank in ranks(results, f"{case}-{lora['rank']}"):
        chunks = stage_chunks(architecture, config.parallel, rank["stage"])
        split, settings = Split.of(config.parallel), config.model.lora
        ours = [chunk_parameters(architecture, split, chunk, settings) for chunk in chunks]
        assert [[p.numel for p in chunk] for chunk in ours] == rank["numel"]
        state = model_state(config, architecture, rank["stage"], rank["data_rank"], rank["expert_data_rank"])
        assert asdict(state) == rank["state"]
        assert state.reference == 0


@pytest.mark.parametrize(("model", "name"), CASES)
def test_activations_are_the_tensors_that_autograd_saves(results: Path, model: str, name: str) -> None:
    """Compare all ranks of a stage together, because the planner cannot know to which expert a token is routed."""
    config, architecture = planned(results, model, name)
    found = ranks(results, f"{model}-{name}")
    bytes_of = {"float32": 4, "bfloat16": 2}[LAYOUTS[name].dtype]
    for stage in range(config.parallel.pipeline_model_parallel_size):
        of_stage = [rank for rank in found if rank["stage"] == stage]
        batch = MicroBatch(LENGTHS, bytes_of, fused_norms=False)
        ours = [
            sum(chunk_activations(architecture, config.parallel, chunk, batch).values())
            for chunk in stage_chunks(architecture, config.parallel, stage)
        ]
        theirs = [sum(chunk) / len(of_stage) for chunk in zip(*(rank["activations"] for rank in of_stage), strict=True)]
        assert ours == pytest.approx(theirs, rel=PLANNED_ACTIVATIONS)
        for rank in of_stage:
            if rank["output"]:
                chunk_size = config.trainer.logprob_chunk_size
                kept, _ = output_layer_bytes(architecture, config.parallel, batch, chunk_size, is_trained=True)
                assert kept == pytest.approx(rank["output"], rel=PLANNED_ACTIVATIONS)


# Gated DeltaNets save whole chunks of 64 tokens, of which these sequences have less.
@pytest.mark.parametrize(
    ("model", "name"),
    [(model, name) for model, name in CASES if LAYOUTS[name].world_size == 1 and model not in DELTA_NETS],
)
def test_responses_that_share_a_prompt_take_no_more_than_a_full_micro_batch(
    results: Path, model: str, name: str
) -> None:
    config, architecture = planned(results, model, name)
    (rank,) = ranks(results, f"{model}-{name}")
    bytes_of = {"float32": 4, "bfloat16": 2}[LAYOUTS[name].dtype]
    batch = MicroBatch((config.max_micro_batch_tokens,), bytes_of, fused_norms=False)
    (chunk,) = stage_chunks(architecture, config.parallel, 0)
    full = sum(chunk_activations(architecture, config.parallel, chunk, batch).values())
    assert 0 < rank["shared_prompt"] <= full * (1 + PLANNED_ACTIVATIONS)
