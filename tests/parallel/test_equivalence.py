"""Parallelism equivalence: every layout matches one process, and one process matches Hugging Face."""

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from megatron_bapo.algorithm.loss_tokens import LossTokens
from megatron_bapo.algorithm.policy_loss import policy_loss
from megatron_bapo.config.algorithm import AlgorithmConfig
from tests.parallel.examples import make_examples
from tests.parallel.launching import GPU_MEGATRON_SITE, launch_all, launch_with_gpu_megatron
from tests.parallel.layouts import CASES, DEEP_DENSE, LAYOUTS, MODELS, WHOLE_QUERIES, Layout
from tests.parallel.tensors import largest_difference, load_folder, same_bits, save_random_model, without_flops
from tests.tolerances import (
    BF16_GRADIENT,
    BF16_LOG_PROB,
    BF16_PARAMETER,
    BF16_TO_HUGGING_FACE,
    GRADIENT,
    HUGGING_FACE_LOG_PROB,
    LOG_PROB,
    PARAMETER,
)

ROOT = Path(__file__).parents[2]
GPU_MEGATRON_CASES = [
    *(("qwen3", "tp2-sp"), ("qwen3_moe", "tp2-sp"), ("qwen3_moe", "pp2-uneven"), (DEEP_DENSE, "pp2-vpp2-uneven")),
    ("gpt_oss", "tp2-sp-ep2-etp1"),
    *(("qwen3_next", "tp2-sp"), ("qwen3_5_text", "pp2")),
    *(("qwen2_moe", "tp2-sp"), ("glm4_moe", "tp2-sp"), ("deepseek_v3", "tp2-sp"), (WHOLE_QUERIES, "tp2-sp")),
]
ROUTER_BIAS = "e_score_correction_bias"
FP32_CASES = [(model, name) for model, name in CASES if LAYOUTS[name].dtype == "float32"]
ROUTED_BF16_CASES = [
    *((model, name) for model in ("deepseek_v3", WHOLE_QUERIES) for name in ("one-process-bf16", "tp2-sp-bf16")),
    ("gpt_oss", "one-process-bf16"),
]
"""Models in which rounding to bfloat16 changes which experts a few tokens go to, also in `transformers`."""
FAULTY_CASES = {
    "labels-rolled-after-the-context-split": "cp2",
    "doubled-loss-scale": "tp2-sp",
    "dropped-gradient-reduce": "dp2",
}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with `MODEL-LAYOUT/` for every case and `FAULT/` for every injected fault; two launches."""
    root = tmp_path_factory.mktemp("equivalence")
    for name, config in MODELS.items():
        save_random_model(AutoModelForCausalLM.from_config(config), root / name)
    cases = [(f"{model}-{name}", model, LAYOUTS[name], None) for model, name in (*CASES, *ROUTED_BF16_CASES)]
    cases += [(fault, "qwen3", LAYOUTS[name], fault) for fault, name in FAULTY_CASES.items()]
    launch_all("ranks.py", [case_of(root, *case) for case in cases], root)
    return root


@pytest.fixture(scope="module")
def gpu_megatron(results: Path) -> Path:
    """Return a folder with `MODEL-LAYOUT/` of some cases, run with the Megatron-Core version of the GPU lock."""
    cases = [
        case_of(results, f"{model}-{name}", model, replace(LAYOUTS[name], resume_from=None), None)
        for model, name in GPU_MEGATRON_CASES
    ]
    return launch_with_gpu_megatron("ranks.py", cases, results, 2)


def case_of(root: Path, name: str, model: str, layout: Layout, fault: str | None) -> dict:
    resumed = {} if layout.resume_from is None else {"resume_from": f"{model}-{layout.resume_from}"}
    return {
        "name": name,
        "model": str(root / model),
        "parallel": layout.parallel,
        "dtype": layout.dtype,
        "fault": fault,
        **resumed,
    }


def differences(ours: Path, reference: Path) -> dict[str, float]:
    """Return the differences that the matrix limits: absolute for log-probs and parameters, otherwise relative."""
    gradients = load_folder(reference / "gradients")
    largest = max(gradient.abs().max().item() for gradient in gradients.values())
    assert largest > 1e-3
    losses, norms = (
        [[json.loads((folder / "metrics.json").read_text())[update][key] for folder in (ours, reference)]
         for update in ("padded", "update-0")]
        for key in ("actor/loss", "actor/grad_norm")
    )  # fmt: skip
    return {
        "log-prob": largest_difference(*(load_file(folder / "log_probs.safetensors") for folder in (ours, reference))),
        "loss": max(abs(mine - theirs) / abs(theirs) for mine, theirs in losses),
        "grad norm": max(abs(mine - theirs) / theirs for mine, theirs in norms),
        "gradient": largest_difference(load_folder(ours / "gradients"), gradients) / largest,
        "padded": largest_difference(load_folder(ours / "gradients-padded"), gradients) / largest,
        "parameters": largest_difference(load_folder(ours / "final"), load_folder(reference / "final")),
        "resumed": largest_difference(load_folder(ours / "continued"), load_folder(reference / "continued")),
    }


def limits(dtype: str) -> dict[str, float]:
    log_prob, gradient, parameter = (
        (LOG_PROB, GRADIENT, PARAMETER) if dtype == "float32" else (BF16_LOG_PROB, BF16_GRADIENT, BF16_PARAMETER)
    )
    return {
        "log-prob": log_prob,
        **dict.fromkeys(("loss", "grad norm", "gradient", "padded"), gradient),
        **dict.fromkeys(("parameters", "resumed"), parameter),
    }


def broken_limits(found: dict[str, float], dtype: str) -> list[str]:
    return [name for name, limit in limits(dtype).items() if not found[name] <= limit]


@pytest.mark.parametrize(("model", "layout"), CASES)
def test_layout_matches_one_process(
    results: Path, model: str, layout: str, record_property: Callable[[str, object], None]
) -> None:
    """Compare log-probs, loss, all gradients (packed and padded), and parameters after updates and after a resume."""
    dtype = LAYOUTS[layout].dtype
    found = differences(results / f"{model}-{layout}", results / f"{model}-one-process")
    record_property("matrix", (f"{model} {layout}", found))
    assert broken_limits(found, dtype) == []
    folder = results / f"{model}-{layout}"
    moved = largest_difference(load_folder(folder / "final"), load_folder(folder / "initial"))
    assert moved > 100 * PARAMETER


@pytest.mark.parametrize(("model", "layout"), GPU_MEGATRON_CASES)
def test_megatron_of_the_gpu_lock_matches_one_process_of_the_cpu_lock(
    results: Path, gpu_megatron: Path, model: str, layout: str, record_property: Callable[[str, object], None]
) -> None:
    """Run the same code under both versions."""
    found = differences(gpu_megatron / f"{model}-{layout}", results / f"{model}-one-process")
    record_property("matrix", (f"{model} {layout}, the GPU lock's Megatron-Core", found))
    assert broken_limits(found, "float32") == []


def test_the_second_megatron_version_is_that_of_the_gpu_lock() -> None:
    (pinned,) = re.findall(r"^megatron-core==(\S+)$", (ROOT / "requirements.txt").read_text(), re.MULTILINE)
    (found,) = GPU_MEGATRON_SITE.glob("megatron_core-*.dist-info")
    assert found.name == f"megatron_core-{pinned}.dist-info"


@pytest.mark.parametrize(("model", "layout"), FP32_CASES)
def test_metrics_and_clip_bounds_match_one_process(results: Path, model: str, layout: str) -> None:
    ours, reference = (
        json.loads((results / f"{model}-{name}" / "metrics.json").read_text()) for name in (layout, "one-process")
    )
    assert ours.keys() == reference.keys()
    for update in ours:
        assert without_flops(ours[update]) == pytest.approx(without_flops(reference[update]), rel=1e-4, abs=1e-6)
        for bound in ("actor/bapo_clip_low", "actor/bapo_clip_high"):
            assert ours[update][bound] == reference[update][bound]


@pytest.mark.parametrize("fault", FAULTY_CASES)
def test_an_injected_fault_fails_the_matrix(
    results: Path, fault: str, record_property: Callable[[str, object], None]
) -> None:
    found = differences(results / fault, results / "qwen3-one-process")
    record_property("matrix", (f"qwen3 {FAULTY_CASES[fault]}, {fault}", found))
    assert "gradient" in broken_limits(found, "float32")


@pytest.mark.parametrize(("model", "layout"), CASES)
def test_export_returns_the_imported_bits(results: Path, model: str, layout: str) -> None:
    """Compare the export with the imported values, rounded under bfloat16."""
    original = load_folder(results / model)
    exported = load_folder(results / f"{model}-{layout}" / "initial")
    if LAYOUTS[layout].dtype == "bfloat16":
        original = {name: x if name.endswith(ROUTER_BIAS) else x.bfloat16().float() for name, x in original.items()}
    assert same_bits(exported, original)
    assert same_bits(load_folder(results / f"{model}-{layout}" / "tensors"), original)


@pytest.mark.parametrize("layout", [layout for model, layout in CASES if model == "glm4_moe"])
def test_updates_leave_routers_biases_as_they_are(results: Path, layout: str) -> None:
    original = load_folder(results / "glm4_moe")
    biases = {name: x for name, x in original.items() if name.endswith(ROUTER_BIAS)}
    assert len(biases) == 3
    for when in ("final", "continued"):
        found = load_folder(results / f"glm4_moe-{layout}" / when)
        assert same_bits({name: found[name] for name in biases}, biases)


@pytest.mark.parametrize("model", MODELS)
def test_one_process_matches_hugging_face(results: Path, model: str) -> None:
    """Compare log-probs, and the gradient of the BAPO loss under the bounds that were used."""
    ours = results / f"{model}-one-process"
    expected, gradients = hugging_face(results, model, torch.float32)
    log_probs = load_file(ours / "log_probs.safetensors")
    assert all((expected[name] - found).abs().max() < HUGGING_FACE_LOG_PROB for name, found in log_probs.items())
    largest = max(gradient.abs().max().item() for gradient in gradients.values())
    assert largest_difference(load_folder(ours / "gradients"), gradients) < GRADIENT * largest


@pytest.mark.parametrize(("model", "layout"), ROUTED_BF16_CASES)
def test_bfloat16_is_as_near_to_fp32_as_in_hugging_face(results: Path, model: str, layout: str) -> None:
    ours = results / f"{model}-{layout}"
    exact, rounded = (hugging_face(results, model, dtype) for dtype in (torch.float32, torch.bfloat16))
    found = load_file(ours / "log_probs.safetensors"), load_folder(ours / "gradients")
    for mine, theirs, expected in zip(found, rounded, exact, strict=True):
        theirs, expected = ({name: values[name] for name in mine} for values in (theirs, expected))
        assert relative_error(mine, expected) < BF16_TO_HUGGING_FACE * relative_error(theirs, expected)


def relative_error(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    """Return the norm of the differences of all tensors relative to the norm of the expected values."""
    squares = [((found[n].float() - expected[n]).square().sum(), expected[n].square().sum()) for n in found]
    error, size = torch.tensor(squares).sum(dim=0)
    return float((error / size).sqrt())


def hugging_face(
    results: Path, model: str, dtype: torch.dtype
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Return log-probs of the examples, and a tenth of the gradients under the bounds that one process used."""
    reference = AutoModelForCausalLM.from_pretrained(results / model, dtype=dtype)
    ours, log_probs = results / f"{model}-one-process", dict[str, torch.Tensor]()
    first_update = json.loads((ours / "metrics.json").read_text())["update-0"]
    low, high = (torch.tensor(first_update[f"actor/bapo_clip_{side}"]) for side in ("low", "high"))
    for index, example in enumerate(make_examples(reference.config.vocab_size, replies=True)):
        trajectory = example.trajectory
        tokens = torch.from_numpy(
            np.concatenate([trajectory.prompt_token_ids, trajectory.response_token_ids]).astype(np.int64)
        )
        logits = reference(tokens[None]).logits[0, :-1].float()
        all_log_probs = logits.log_softmax(-1).gather(1, tokens[1:, None]).squeeze(1)
        log_probs[str(index)] = all_log_probs.detach()
        size = trajectory.num_sampled
        sampled = len(trajectory.prompt_token_ids) + trajectory.sampled_positions - 1
        known = LossTokens(
            torch.from_numpy(trajectory.behaviour_log_probs),
            torch.full((size,), example.advantage),
            torch.full((size,), example.weight),
        )
        loss = policy_loss(
            all_log_probs[sampled], torch.zeros(size), known, low.float(), high.float(), AlgorithmConfig()
        )
        loss.backward()
    folder = results / f"{model}-hugging-face-gradients-{dtype}"
    reference.save_pretrained(folder, state_dict=first_moments_of(reference))
    return log_probs, {name: gradient.float() for name, gradient in load_folder(folder).items()}


def first_moments_of(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return a tenth of the gradients, as the ranks write them, under the checkpoint names of `save_pretrained`."""
    return {name: 0.1 * parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}


def test_the_exported_folder_loads_in_transformers(results: Path) -> None:
    folder = results / "qwen3-tp2-pp2" / "final"
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert largest_difference({name: p.detach() for name, p in model.named_parameters()}, load_folder(folder)) == 0.0
