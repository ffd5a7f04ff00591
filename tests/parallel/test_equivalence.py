"""Every layout gives what one process gives, and one process gives what Hugging Face gives."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from megatron_bapo.algorithm.policy_loss import policy_loss
from tests.parallel.examples import make_examples
from tests.tolerances import GRADIENT, LOG_PROB, PARAMETER

HERE = Path(__file__).parent
SHAPE = {
    "vocab_size": 128,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
MODELS = {
    "qwen3": (Qwen3ForCausalLM, Qwen3Config(**SHAPE, head_dim=16, tie_word_embeddings=True)),
    "qwen2": (Qwen2ForCausalLM, Qwen2Config(**SHAPE, tie_word_embeddings=False)),
    "llama": (LlamaForCausalLM, LlamaConfig(**SHAPE, tie_word_embeddings=True)),
}
LAYOUTS = {
    "one-process": {},
    "tp2": {"tensor_model_parallel_size": 2},
    "tp2-sp": {"tensor_model_parallel_size": 2, "sequence_parallel": True},
    "pp2": {"pipeline_model_parallel_size": 2},
    "dp2-recompute": {"recompute_granularity": "full"},
    "tp2-pp2": {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2},
    "pp2-dp2": {"pipeline_model_parallel_size": 2},
}
WORLD_SIZES = {
    "one-process": 1, "tp2": 2, "tp2-sp": 2, "pp2": 2, "dp2-recompute": 2, "tp2-pp2": 4, "pp2-dp2": 4,
}  # fmt: skip
RESUMED_FROM = {"tp2-sp": "tp2", "pp2": "tp2", "pp2-dp2": "tp2-pp2"}
CASES = [(model, layout) for model in MODELS for layout in LAYOUTS if layout != "one-process"]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `MODEL-LAYOUT/` for every case; one launch for each world size."""
    root = tmp_path_factory.mktemp("equivalence")
    for name, (model_class, config) in MODELS.items():
        save_random_model(model_class(config), root / name)
    for world_size in (1, 2, 4):
        cases = [
            {
                "name": f"{model}-{layout}",
                "model": str(root / model),
                "parallel": {**settings, "world_size": world_size},
                **({"resume_from": f"{model}-{RESUMED_FROM[layout]}"} if layout in RESUMED_FROM else {}),
            }
            for model in MODELS
            for layout, settings in LAYOUTS.items()
            if WORLD_SIZES[layout] == world_size
        ]
        launch(cases, root, world_size)
    return root


def save_random_model(model: torch.nn.Module, folder: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1 + (parameter.dim() == 1))
    model.save_pretrained(folder)


def launch(cases: list[dict], root: Path, world_size: int) -> None:
    """Run the cases on `world_size` ranks; a failure shows the ranks' own output."""
    case_file = root / f"cases-{world_size}.json"
    case_file.write_text(json.dumps(cases))
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(world_size), "--standalone"),
        *(str(HERE / "ranks.py"), str(case_file), str(root)),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def load_folder(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


def largest_difference(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> float:
    assert ours.keys() == theirs.keys()
    return max((ours[name] - theirs[name]).abs().max().item() for name in ours)


@pytest.mark.parametrize(("model", "layout"), CASES)
def test_gradients_and_log_probs_match_one_process(results: Path, model: str, layout: str) -> None:
    ours, reference = results / f"{model}-{layout}", results / f"{model}-one-process"
    log_probs = (load_file(folder / "log_probs.safetensors") for folder in (ours, reference))
    assert largest_difference(*log_probs) < LOG_PROB
    gradients = load_folder(reference / "gradients")
    largest = max(gradient.abs().max().item() for gradient in gradients.values())
    assert largest > 1e-3
    assert largest_difference(load_folder(ours / "gradients"), gradients) < GRADIENT * largest


@pytest.mark.parametrize(("model", "layout"), CASES)
def test_parameters_after_updates_and_resume_match_one_process(results: Path, model: str, layout: str) -> None:
    """After three updates, and after a fourth from a checkpoint that another layout wrote."""
    ours, reference = results / f"{model}-{layout}", results / f"{model}-one-process"
    for stage in ("final", "continued"):
        assert largest_difference(load_folder(ours / stage), load_folder(reference / stage)) < PARAMETER
    moved = largest_difference(load_folder(ours / "final"), load_folder(ours / "initial"))
    assert moved > 100 * PARAMETER


@pytest.mark.parametrize(("model", "layout"), CASES)
def test_metrics_and_clip_bounds_match_one_process(results: Path, model: str, layout: str) -> None:
    ours, reference = (
        json.loads((results / f"{model}-{name}" / "metrics.json").read_text()) for name in (layout, "one-process")
    )
    for our_update, their_update in zip(ours, reference, strict=True):
        assert our_update == pytest.approx(their_update, rel=1e-4, abs=1e-6)
        for bound in ("actor/bapo_clip_low", "actor/bapo_clip_high"):
            assert our_update[bound] == their_update[bound]


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_export_returns_the_imported_bits(results: Path, model: str, layout: str) -> None:
    original = load_folder(results / model)
    exported = load_folder(results / f"{model}-{layout}" / "initial")
    assert exported.keys() == original.keys()
    assert all(torch.equal(exported[name], original[name]) for name in original)


@pytest.mark.parametrize("model", MODELS)
def test_one_process_matches_hugging_face(results: Path, model: str) -> None:
    """Log-probs of every example, and the gradient of the BAPO loss with the bounds that were used."""
    reference = AutoModelForCausalLM.from_pretrained(results / model)
    ours = results / f"{model}-one-process"
    log_probs = load_file(ours / "log_probs.safetensors")
    first_update = json.loads((ours / "metrics.json").read_text())[0]
    low, high = (torch.tensor(first_update[f"actor/bapo_clip_{side}"]) for side in ("low", "high"))
    for index, example in enumerate(make_examples(SHAPE["vocab_size"])):
        trajectory = example.trajectory
        tokens = torch.from_numpy(
            np.concatenate([trajectory.prompt_token_ids, trajectory.response_token_ids]).astype(np.int64)
        )
        logits = reference(tokens[None]).logits[0, :-1]
        all_log_probs = logits.log_softmax(-1).gather(1, tokens[1:, None]).squeeze(1)
        assert (all_log_probs - log_probs[str(index)]).abs().max() < LOG_PROB
        size = len(trajectory.response_token_ids)
        loss, _ = policy_loss(
            all_log_probs[-size:],
            torch.from_numpy(trajectory.behaviour_log_probs),
            torch.full((size,), example.advantage),
            torch.full((size,), example.weight),
            low.float(),
            high.float(),
        )
        loss.backward()
    gradients = {name: parameter.grad for name, parameter in reference.named_parameters() if parameter.grad is not None}
    largest = max(gradient.abs().max().item() for gradient in gradients.values())
    assert largest_difference(load_folder(ours / "gradients"), gradients) < GRADIENT * largest


def test_the_exported_folder_loads_in_transformers(results: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(results / "qwen3-tp2-pp2" / "final")
    assert (
        largest_difference(
            {name: p.detach() for name, p in model.named_parameters()}, load_folder(results / "qwen3-tp2-pp2" / "final")
        )
        == 0.0
    )
