"""Adapters of experts only: with expert parallelism Megatron then chains a stub for the dense parameters."""

from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

from tests.parallel.launching import launch, launch_with_gpu_megatron
from tests.parallel.tensors import largest_difference, load_folder, save_random_model
from tests.parallel.test_lora import CONFIGS, metrics_of
from tests.parallel.test_optimizer import EP2, PLAIN, PP2, SPREAD
from tests.tolerances import GRADIENT, PARAMETER

TARGETS = {"gate_proj", "up_proj", "down_proj"}
LAYOUTS = {
    "one": {"world_size": 1, **PLAIN["parallel"]},
    "ep2": {"world_size": 2, **PLAIN["parallel"], **EP2},
    "ep2-dp4": {"world_size": 4, **EP2},
    "ep2-pp2-spread": {"world_size": 4, **SPREAD["parallel"], **EP2, **PP2},
}
"""Every layout continues the checkpoint of the first."""


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with `NAME/` for every layout, and `gpu-megatron/NAME/` for one of them."""
    root = tmp_path_factory.mktemp("expert-adapters")
    save_random_model(AutoModelForCausalLM.from_config(CONFIGS["only_experts"]), root / "model")
    lora = {"rank": 3, "alpha": 6.0, "target_modules": sorted(TARGETS)}
    shared = {"model": str(root / "model"), "dtype": "float32", "lora": lora}
    cases = [{"name": name, "parallel": layout, "resume_from": "one", **shared} for name, layout in LAYOUTS.items()]
    launch("lora_ranks.py", cases, root, world_size=4)
    launch_with_gpu_megatron("lora_ranks.py", [{**cases[2], "resume_from": "../one"}], root, 4)
    return root


@pytest.mark.parametrize("name", [*list(LAYOUTS)[1:], "gpu-megatron/ep2-dp4"])
def test_updates_checkpoints_and_exports_match_one_process(results: Path, name: str) -> None:
    ours, reference = results / name, results / "one"
    for folder in ("final", "continued", "merged"):
        assert largest_difference(load_folder(ours / folder), load_folder(reference / folder)) < PARAMETER, folder
    for update in ("update-0", "update-1", "continued"):
        norms = [metrics_of(folder)[update]["actor/grad_norm"] for folder in (ours, reference)]
        assert norms[0] == pytest.approx(norms[1], rel=GRADIENT)
        assert norms[1] > 0
    adapters = load_folder(ours / "final")
    assert {name.split(".")[-3] for name in adapters} == TARGETS
    assert all(".experts." in name and tensor.any() for name, tensor in adapters.items())
