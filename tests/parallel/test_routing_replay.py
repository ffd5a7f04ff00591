"""Routing replay of a mixture-of-experts model in every kind of layout."""

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file
from transformers import AutoModelForCausalLM

from tests.parallel.examples import NUM_EXAMPLES, make_examples
from tests.parallel.launching import launch
from tests.parallel.layouts import LAYOUTS, MODELS
from tests.parallel.tensors import save_random_model
from tests.tolerances import LOG_PROB

LAYOUT_NAMES = (
    *("one-process", "dp2", "pp2-vpp2", "cp2-ep2", "tp2-sp-ep2", "pp2-dp2", "ep2-pp2-vpp2"),
    "tp2-sp-ep2-etp1-cp2-pp2-vpp2",
)
"""Between them: recomputation of whole layers and of experts only, and several micro-batches in flight."""


def case(layout: str, replay: str, mini_batch: int = NUM_EXAMPLES, *, noise: bool) -> dict:
    return {"parallel": LAYOUTS[layout].parallel, "replay": replay, "noise": noise, "mini_batch": mini_batch}


CASES = {
    **{f"trainer-{layout}": case(layout, "trainer", noise=True) for layout in LAYOUT_NAMES},
    **{f"trainer-{layout}-minibatch": case(layout, "trainer", 8, noise=True) for layout in ("dp2", "tp2-sp-ep2")},
    "none-one-process": case("one-process", "none", noise=True),
}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with `NAME/` for every case."""
    root = tmp_path_factory.mktemp("routing")
    save_random_model(AutoModelForCausalLM.from_config(MODELS["qwen3_moe"]), root / "model")
    cases = [{**settings, "name": name, "model": str(root / "model")} for name, settings in CASES.items()]
    cases.sort(key=lambda case: (case["parallel"]["world_size"], str(case["parallel"])))
    for sizes in ((1, 2, 4), (8,)):
        own = [case for case in cases if case["parallel"]["world_size"] in sizes]
        launch("routing_ranks.py", own, root, max(sizes))
    return root


def largest_log_ratio(results: Path, name: str) -> float:
    """Return the largest difference between recomputed log-probs and those of the first update."""
    recomputed, updated = (load_file(results / name / f"{which}.safetensors") for which in ("recomputed", "updated"))
    assert len(updated) == CASES[name]["mini_batch"]
    return max(np.abs(recomputed[i] - updated[i]).max() for i in updated)


@pytest.mark.parametrize("layout", LAYOUT_NAMES)
def test_ratios_of_the_first_update_are_exactly_1_if_it_replays_the_recomputation(results: Path, layout: str) -> None:
    assert largest_log_ratio(results, f"trainer-{layout}") == 0.0


@pytest.mark.parametrize("layout", ["dp2", "tp2-sp-ep2"])
def test_minibatches_replay_routes_that_other_ranks_recorded_in_other_micro_batches(results: Path, layout: str) -> None:
    name = f"trainer-{layout}-minibatch"
    assert largest_log_ratio(results, name) < LOG_PROB


def test_without_replay_the_same_noise_moves_the_ratios(results: Path) -> None:
    assert largest_log_ratio(results, "none-one-process") > 0.1


@pytest.mark.parametrize("layout", ["dp2", "tp2-sp-ep2-etp1-cp2-pp2-vpp2"])
def test_a_rank_keeps_the_routes_of_its_own_trajectories(results: Path, layout: str) -> None:
    held = np.array(json.loads((results / f"trainer-{layout}" / "metrics.json").read_text())["held"])
    lengths = [len(e.trajectory.prompt_token_ids) + len(e.trajectory.response_token_ids) - 1 for e in make_examples(9)]
    assert held.max(axis=0).tolist() == lengths
    assert ((held > 0).sum(axis=0) == 1).all()
