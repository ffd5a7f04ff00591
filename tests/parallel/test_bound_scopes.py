"""Clip bounds found before the training pass, during it, or per micro-batch, under several layouts."""

import json
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
from transformers import AutoModelForCausalLM

from tests.parallel.launching import launch
from tests.parallel.layouts import LAYOUTS, MODELS
from tests.parallel.tensors import largest_difference, load_folder, same_bits, save_random_model
from tests.tolerances import PARAMETER

CASES = {
    "one": ("one-process", "qwen3", 32),
    "pp2": ("pp2", "qwen3", 32),
    "pp2-vpp2": ("pp2-vpp2", "qwen3", 32),
    "dp2": ("dp2-distopt-overlap", "qwen3", 32),
    "cp2": ("cp2", "qwen3", 32),
    "tp2": ("tp2", "qwen3", 32),
    "experts-ep2": ("ep2", "qwen3_moe", 32),
    "dp2-one-micro-batch": ("dp2", "qwen3", 4096),
    "pp2-dp2": ("pp2-vpp2-dp2", "qwen3", 32),
}
"""Layout, model, and token budget of a micro-batch."""
START, END = (0.6, 1.2), (0.9, 3.0)


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with `NAME/` for every case."""
    root = tmp_path_factory.mktemp("bound_scopes")
    for model in ("qwen3", "qwen3_moe"):
        save_random_model(AutoModelForCausalLM.from_config(MODELS[model]), root / model)
    cases = [
        {
            "name": name,
            "model": str(root / model),
            "parallel": LAYOUTS[layout].parallel,
            "max_tokens": max_tokens,
        }
        for name, (layout, model, max_tokens) in CASES.items()
    ]
    launch("bound_scopes_ranks.py", cases, root, world_size=4)
    return root


def updates(results: Path, name: str, way: str) -> list[dict[str, float]]:
    return json.loads((results / name / "metrics.json").read_text())[way]["updates"]


def series(results: Path, name: str, way: str, metric: str) -> list[float]:
    return [update[f"actor/{metric}"] for update in updates(results, name, way)]


def bounds(results: Path, name: str, way: str) -> list[tuple[float, float]]:
    low, high = (series(results, name, way, f"bapo_clip_{side}") for side in ("low", "high"))
    return list(zip(low, high, strict=True))


@pytest.mark.parametrize("way", ["speculate", "speculate-scored", "fresh"])
@pytest.mark.parametrize("name", CASES)
def test_checked_predictions_give_the_same_bits_as_scoring(results: Path, name: str, way: str) -> None:
    assert same_bits(load_folder(results / name / way), load_folder(results / name / "score"))
    common = set(updates(results, name, "score")[0]) & set(updates(results, name, way)[0]) - {"perf/model_flops"}
    assert {"actor/bapo_positive_share", "actor/grad_norm", "actor/loss", "actor/pg_clipfrac"} < common
    for ours, theirs in zip(updates(results, name, way), updates(results, name, "score"), strict=True):
        assert {key: ours[key] for key in common} == {key: theirs[key] for key in common}


@pytest.mark.parametrize("name", CASES)
def test_a_scoring_pass_and_a_wrong_prediction_cost_a_forward_pass(results: Path, name: str) -> None:
    once = [update["perf/model_flops"] / 3 for update in updates(results, name, "microbatch")]
    hits = series(results, name, "speculate", "bapo_speculation_hit")
    passes = {"speculate": [4 - hit for hit in hits], "speculate-scored": [4.0] * len(hits)}
    scoring = 0.0 if name == "dp2-one-micro-batch" else 1.0
    passes["score"] = [4.0 + scoring] * len(hits)  # including one for the entropy after the update
    for way, expected in passes.items():
        flops = [update["perf/model_flops"] for update in updates(results, name, way)]
        assert [own / one for own, one in zip(flops, once, strict=True)] == pytest.approx(expected)


@pytest.mark.parametrize("name", [name for name, (_, model, _) in CASES.items() if model == "qwen3"])
def test_model_flops_are_the_same_under_every_layout(results: Path, name: str) -> None:
    ours, theirs = (
        [update["perf/model_flops"] for update in updates(results, which, "speculate-scored")]
        for which in (name, "one")
    )
    assert ours == pytest.approx(theirs, rel=1e-12)


@pytest.mark.parametrize("name", CASES)
def test_bounds_vary_and_some_predictions_are_right_and_some_wrong(results: Path, name: str) -> None:
    hits = series(results, name, "speculate", "bapo_speculation_hit")
    assert 2 <= sum(hits) <= len(hits) - 2
    for way in ("speculate-scored", "fresh"):
        assert series(results, name, way, "bapo_speculation_hit") == hits
    found = bounds(results, name, "score")
    assert found[1] == START
    assert found[2] == END
    assert set(found) - {START, END}


@pytest.mark.parametrize(("way", "speculated"), [("speculate", 1.0), ("speculate-scored", 0.0), ("fresh", 1.0)])
@pytest.mark.parametrize("name", CASES)
def test_an_update_is_speculative_if_that_pays_or_if_its_samples_are_fresh(
    results: Path, name: str, way: str, speculated: float
) -> None:
    assert set(series(results, name, way, "bapo_speculated")) == {speculated}


@pytest.mark.parametrize("name", [name for name in CASES if name not in ("one", "experts-ep2")])
def test_the_bounds_of_a_minibatch_do_not_depend_on_the_layout(results: Path, name: str) -> None:
    assert bounds(results, name, "score")[:3] == bounds(results, "one", "score")[:3]


def test_the_bounds_of_a_micro_batch_depend_only_on_its_tokens(results: Path) -> None:
    facts: dict[str, Any] = json.loads((results / "one" / "metrics.json").read_text())["microbatch"]
    separate = facts["bounds_of_micro_batches"]
    assert len({tuple(pair) for pair in separate}) > 1
    mean = tuple(fmean(values) for values in zip(*separate, strict=True))
    assert bounds(results, "one", "microbatch")[0] == pytest.approx(mean, rel=1e-12)
    assert not same_bits(load_folder(results / "one" / "microbatch"), load_folder(results / "one" / "score"))


@pytest.mark.parametrize("name", ["pp2", "tp2"])
def test_pipeline_and_tensor_ranks_use_the_same_micro_batch_bounds_as_one_process(results: Path, name: str) -> None:
    assert bounds(results, name, "microbatch") == bounds(results, "one", "microbatch")
    ours, theirs = (load_folder(results / case / "microbatch") for case in (name, "one"))
    assert largest_difference(ours, theirs) < PARAMETER


def test_micro_batches_of_data_parallel_ranks_share_their_bounds(results: Path) -> None:
    """Check that a minibatch of one micro-batch per rank has the same pair of bounds in both scopes."""
    ways = [load_folder(results / "dp2-one-micro-batch" / way) for way in ("microbatch", "speculate-scored")]
    assert same_bits(*ways)


@pytest.mark.parametrize("name", CASES)
def test_the_measured_entropy_change_equals_the_difference_to_the_next_update(results: Path, name: str) -> None:
    """Use two minibatches that differ only in their advantages, so the same tokens are measured twice in a row."""
    measured = series(results, name, "score", "entropy_clip_rule/measured")
    entropies = series(results, name, "score", "entropy")
    differences = [after - before for before, after in pairwise(entropies)]
    assert measured[:-1] == pytest.approx(differences, abs=1e-6)
    assert max(map(abs, measured)) > 1e-4
    for form in ("predicted", "predicted_as_printed"):
        assert len(set(series(results, name, "score", f"entropy_clip_rule/{form}"))) == len(entropies)
