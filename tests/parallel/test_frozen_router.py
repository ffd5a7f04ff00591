"""Training with frozen routers (`model.freeze_router`)."""

import json
import math
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from megatron_bapo.config.architecture import read_architecture
from megatron_bapo.model.hf_mapping import router_tensors
from megatron_bapo.trainer.checkpoint import WEIGHTS, checkpoints
from megatron_bapo.trainer.conversion import hugging_face_from_checkpoint
from tests.parallel.launching import launch, launch_with_gpu_megatron
from tests.parallel.layouts import LAYOUTS, MODELS
from tests.parallel.tensors import largest, largest_difference, load_folder, same_bits, save_random_model
from tests.tolerances import GRADIENT, PARAMETER

NUM_RANKS = 4
RESUMED = {"tp2-sp-ep2": "ep2-pp2"}
CASES = [
    *(("qwen3_moe", name) for name in ("one-process", "ep2-pp2", "tp2-sp-ep2")),
    *(("gpt_oss", "one-process"), ("gpt_oss", "pp2"), ("glm4_moe", "one-process")),
]
"""(model, layout): with and without the distributed optimizer, a router with a bias, and one with a frozen bias."""


def case_of(root: Path, model: str, layout: str, *, freeze_router: bool) -> dict:
    """Return the case, in which a layout of `RESUMED` continues from another one's checkpoint."""
    case = {
        "name": f"{model}-{layout}-{'frozen' if freeze_router else 'trained'}",
        "model": str(root / model),
        "parallel": LAYOUTS[layout].parallel,
        "dtype": "float32",
        "freeze_router": freeze_router,
    }
    return case | ({"resume_from": f"{model}-{RESUMED[layout]}-frozen"} if freeze_router and layout in RESUMED else {})


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with `MODEL-LAYOUT-frozen/` and `MODEL-one-process-trained/`."""
    root = tmp_path_factory.mktemp("frozen-router")
    for model in dict(CASES):
        save_random_model(AutoModelForCausalLM.from_config(MODELS[model]), root / model)
    cases = [case_of(root, *case, freeze_router=True) for case in CASES]
    cases += [case_of(root, model, "one-process", freeze_router=False) for model in dict(CASES)]
    launch("ranks.py", sorted(cases, key=lambda case: case["parallel"]["world_size"]), root, NUM_RANKS)
    return root


def routers_of(results: Path, model: str) -> frozenset[str]:
    found = router_tensors(read_architecture(results / model))
    assert found
    return found


def check_gradients(results: Path, frozen: Path, model: str) -> None:
    """Compare the first update with that of one process that trains the routers too."""
    trained, routers = results / f"{model}-one-process-trained", routers_of(results, model)
    expected = load_folder(trained / "gradients")
    own = {name: expected.pop(name) for name in routers}
    assert largest(own) > 0.01 * largest(expected)
    assert largest_difference(load_folder(frozen / "gradients"), expected) < GRADIENT * largest(expected)
    norm, norm_of_all = (
        json.loads((folder / "metrics.json").read_text())["update-0"]["actor/grad_norm"] for folder in (frozen, trained)
    )
    norm_of_routers = 10 * math.sqrt(sum(float(x.square().sum()) for x in own.values()))  # the files have a tenth
    assert norm_of_all**2 - norm**2 == pytest.approx(norm_of_routers**2, rel=0.01)


@pytest.mark.parametrize(("model", "layout"), CASES)
def test_all_other_gradients_are_those_of_training_with_routers(results: Path, model: str, layout: str) -> None:
    check_gradients(results, results / f"{model}-{layout}-frozen", model)


def test_megatron_of_the_gpu_lock_has_the_same_gradients(results: Path) -> None:
    case = case_of(results, "qwen3_moe", "tp2-sp-ep2", freeze_router=True)
    root = launch_with_gpu_megatron("ranks.py", [case | {"resume_from": case["name"]}], results, NUM_RANKS)
    check_gradients(results, root / case["name"], "qwen3_moe")


@pytest.mark.parametrize(("model", "layout"), CASES)
def test_updates_leave_the_routers_and_change_what_one_process_changes(results: Path, model: str, layout: str) -> None:
    """Compare the parameters after two updates, and after a third one, which may follow a resume in another layout."""
    original, routers = load_folder(results / model), routers_of(results, model)
    for when in ("final", "continued"):
        found, expected = (load_folder(results / f"{model}-{name}-frozen" / when) for name in (layout, "one-process"))
        assert largest_difference(found, expected) < PARAMETER
        assert same_bits({name: found[name] for name in routers}, {name: original[name] for name in routers})
        unchanged = {name for name, value in found.items() if torch.equal(value, original[name])}
        assert {name for name in unchanged if "e_score_correction_bias" not in name} == routers


@pytest.mark.parametrize(("model", "layout"), CASES)
def test_a_checkpoint_is_converted_with_the_routers_of_its_model(
    results: Path, tmp_path: Path, model: str, layout: str
) -> None:
    folder = results / f"{model}-{layout}-frozen"
    (checkpoint,) = checkpoints(folder / "checkpoints")
    assert routers_of(results, model).isdisjoint(load_folder(checkpoint / WEIGHTS))
    options = {"max_file_bytes": 2**30, "advance": lambda _: None}
    hugging_face_from_checkpoint(checkpoint, results / model, tmp_path / "hf", torch.float32, **options)
    assert same_bits(load_folder(tmp_path / "hf"), load_folder(folder / "final"))
