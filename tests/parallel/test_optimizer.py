"""Sharded, overlapped and offloaded optimizers match plain data parallelism and one process.

The cases include clipping, several buckets and skipped updates, which the layout matrix does not.
"""

import json
from math import sqrt
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from tests.parallel.examples import make_examples
from tests.parallel.launching import launch
from tests.parallel.layouts import MODELS
from tests.parallel.tensors import largest, largest_difference, load_folder, same_bits, save_random_model, without_flops
from tests.tolerances import (
    BF16_GRADIENT,
    BF16_GRADIENT_NORM,
    BF16_MEAN_PARAMETER,
    BF16_ROUNDED_APART,
    GRADIENT,
    LOG_PROB,
    PARAMETER,
)

CLIP_GRAD = 0.05
NUM_TOKENS = 20
PLAIN = {"parallel": {"use_distributed_optimizer": False}}
SHARDED = {"parallel": {"use_distributed_optimizer": True}}
SPREAD = {
    "parallel": {
        "use_distributed_optimizer": True,
        "overlap_grad_reduce": True,
        "overlap_param_gather": True,
        "ddp_bucket_size": 2000,
    }
}
OFFLOAD = {**SPREAD, "optimizer": {"cpu_offload": True}}
BF16_GRADS = {"optimizer": {"grads_dtype": "bfloat16"}}
# With the default of adam_beta2 bfloat16 is refused.
BF16_MOMENTS = {"optimizer": {"moments_dtype": "bfloat16", "adam_beta2": 0.95}}
PLAIN_BF16_MOMENTS, SPREAD_BF16_MOMENTS = {**PLAIN, **BF16_MOMENTS}, {**SPREAD, **BF16_MOMENTS}
PLAIN_BF16_GRADS, SPREAD_BF16_GRADS = {**PLAIN, **BF16_GRADS}, {**SPREAD, **BF16_GRADS}
BF16: dict[str, Any] = {"dtype": "bfloat16"}
TP2, PP2, EP2 = ({f"{name}_model_parallel_size": 2} for name in ("tensor", "pipeline", "expert"))


def case(world_size: int, way: dict, layout: dict | None = None, *, model: str = "qwen3", **values: Any) -> dict:
    return {
        "model": model,
        "parallel": {"world_size": world_size, **way["parallel"], **(layout or {})},
        "optimizer": {"clip_grad": CLIP_GRAD, **way.get("optimizer", {})},
        "dtype": "float32",
        **values,
    }


def experts(world_size: int, way: dict, layout: dict | None = None, **values: Any) -> dict:
    return case(world_size, way, layout, model="qwen3_moe", **values)


CASES = {
    "one": case(1, PLAIN, resume_from="one"),
    "dp2-spread": case(2, SPREAD, resume_from="one"),
    "dp2-offload": case(2, OFFLOAD, resume_from="one"),
    "dp2-bf16": case(2, PLAIN, **BF16, resume_from="one"),
    "dp2-spread-bf16": case(2, SPREAD, **BF16, resume_from="dp2-bf16"),
    "dp2-offload-bf16": case(2, OFFLOAD, **BF16, resume_from="dp2-offload-bf16"),
    "dp2-bf16-grads": case(2, PLAIN_BF16_GRADS, **BF16, resume_from="dp2-bf16"),
    "dp2-spread-bf16-grads": case(2, SPREAD_BF16_GRADS, **BF16, resume_from="dp2-bf16-grads"),
    "dp2-bf16-moments": case(2, PLAIN_BF16_MOMENTS, resume_from="dp2-bf16-moments"),
    "dp2-spread-bf16-moments": case(2, SPREAD_BF16_MOMENTS, resume_from="dp2-bf16-moments"),
    "dp2-from-bf16-moments": case(2, PLAIN, resume_from="dp2-bf16-moments"),
    "experts-one": experts(1, PLAIN),
    "experts-ep2": experts(2, PLAIN, EP2, resume_from="experts-one"),
    "experts-ep2-spread": experts(2, SPREAD, EP2, resume_from="experts-one"),
    "experts-ep2-offload": experts(2, OFFLOAD, EP2, resume_from="experts-ep2-offload"),
    "experts-one-spread": experts(1, SPREAD, resume_from="experts-ep2-spread"),
    "pp2-dp2": case(4, SPREAD, PP2, resume_from="dp2-spread"),
    "pp2-dp2-bf16-moments": case(4, SPREAD_BF16_MOMENTS, PP2, resume_from="dp2-bf16-moments"),
    "experts-ep2-dp4-bf16-moments": experts(4, SPREAD_BF16_MOMENTS, EP2, resume_from="experts-ep2-dp4-bf16-moments"),
    "pp2-dp2-bf16-grads": case(4, SPREAD_BF16_GRADS, PP2, **BF16, resume_from="dp2-bf16-grads"),
    "tp2-dp2": case(4, SPREAD, TP2, resume_from="dp2-offload"),
    "experts-ep2-dp4": experts(4, PLAIN, EP2, resume_from="experts-ep2"),
    "experts-ep2-dp4-sharded": experts(4, SHARDED, EP2, resume_from="experts-one"),
    "experts-ep2-dp4-spread": experts(4, SPREAD, EP2, resume_from="experts-one"),
}
"""A case follows the one whose checkpoint it resumes."""
EXACT = [name for name, settings in CASES.items() if settings["dtype"] == "float32" and "moments" not in name]
ROUNDED_MOMENTS = [name for name in CASES if name.endswith("-bf16-moments") and "from" not in name]
SEVERAL_RANKS = [name for name in EXACT if CASES[name]["parallel"]["world_size"] > 1]
RESUMED = {name: settings["resume_from"] for name, settings in CASES.items() if "resume_from" in settings}
OFFLOADED = [name for name in CASES if "offload" in name]
STATES = ("weights", "exp_avg", "exp_avg_sq")


def reference(name: str) -> str:
    return "experts-one" if name.startswith("experts") else "one"


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with `NAME/` for every case."""
    root = tmp_path_factory.mktemp("optimizer")
    for model in ("qwen3", "qwen3_moe"):
        save_random_model(AutoModelForCausalLM.from_config(MODELS[model]), root / model)
    cases = [{**settings, "name": name, "model": str(root / settings["model"])} for name, settings in CASES.items()]
    launch("optimizer_ranks.py", cases, root, world_size=4)
    return root


def checkpoint(results: Path, name: str, state: str, kind: str = "checkpoints") -> dict[str, torch.Tensor]:
    return load_folder(results / name / kind / "step-00000002" / state)


def facts(results: Path, name: str) -> dict:
    return json.loads((results / name / "facts.json").read_text())


def grad_norms(results: Path, name: str) -> list[float]:
    return [update["actor/grad_norm"] for update in facts(results, name)["updates"]]


@pytest.mark.parametrize("name", SEVERAL_RANKS)
def test_three_updates_match_one_process(results: Path, name: str) -> None:
    ours, theirs = (checkpoint(results, n, "weights") for n in (name, reference(name)))
    assert largest_difference(ours, theirs) < PARAMETER
    ours, theirs = (load_folder(results / n / "continued") for n in (name, reference(name)))
    assert largest_difference(ours, theirs) < PARAMETER


@pytest.mark.parametrize("name", SEVERAL_RANKS)
def test_moments_and_gradient_norms_match_one_process(results: Path, name: str) -> None:
    """Compare moments, because Adam's parameters do not depend on the size of the gradient and hide clipping."""
    for state in ("exp_avg", "exp_avg_sq"):
        ours, theirs = (checkpoint(results, n, state) for n in (name, reference(name)))
        assert largest_difference(ours, theirs) < 2 * GRADIENT * largest(theirs)
    ours, theirs = (grad_norms(results, n) for n in (name, reference(name)))
    assert ours == pytest.approx(theirs, rel=1e-5)


@pytest.mark.parametrize("name", SEVERAL_RANKS)
def test_every_metric_of_an_update_matches_one_process(results: Path, name: str) -> None:
    ours, theirs = (facts(results, n)["updates"] for n in (name, reference(name)))
    assert [sorted(update) for update in ours] == [sorted(update) for update in theirs]
    for mine, other in zip(ours, theirs, strict=True):
        assert without_flops(mine) == pytest.approx(without_flops(other), rel=1e-4, abs=2 * LOG_PROB)
    assert theirs[0]["actor/ratio_max"] > theirs[0]["actor/bapo_clip_high"]
    counts = [theirs[0][f"actor/num_{kind}_tokens"] for kind in ("positive", "negative", "dropped")]
    assert sum(counts) == sum(len(e.trajectory.response_token_ids) for e in make_examples(64, in_groups=False))


@pytest.mark.parametrize("name", SEVERAL_RANKS)
def test_the_token_reservoir_matches_one_process(results: Path, name: str) -> None:
    ours, theirs = (facts(results, n)["tokens"] for n in (name, reference(name)))
    assert theirs["update"] == [1.0] * NUM_TOKENS + [2.0] * NUM_TOKENS
    for column, values in theirs.items():
        assert ours[column] == pytest.approx(values, abs=10 * LOG_PROB), column


@pytest.mark.parametrize("name", CASES)
def test_moments_are_those_of_clipped_gradients(results: Path, name: str) -> None:
    """Check the bound: two gradients of norm c give a first moment of norm at most (1 - 0.9^2) c."""
    assert min(grad_norms(results, name)) > 2 * CLIP_GRAD
    norm = sqrt(sum(moment.double().square().sum().item() for moment in checkpoint(results, name, "exp_avg").values()))
    assert 0.5 < norm / ((1 - 0.9**2) * CLIP_GRAD) < 1 + GRADIENT


@pytest.mark.parametrize("name", CASES)
def test_overlap_uses_several_buckets_and_experts_have_a_separate_optimizer(results: Path, name: str) -> None:
    found = facts(results, name)
    assert (found["num_buckets"] > 5) == ("ddp_bucket_size" in CASES[name]["parallel"])
    assert found["num_optimizers"] == (2 if "ep2" in name else 1)


@pytest.mark.parametrize("name", ["dp2-spread-bf16", "dp2-offload-bf16"])
def test_in_bfloat16_every_variant_matches_plain_data_parallelism(results: Path, name: str) -> None:
    ours, theirs = (checkpoint(results, n, "weights") for n in (name, "dp2-bf16"))
    assert largest_difference(ours, theirs) < PARAMETER
    ours, theirs = (load_folder(results / n / "continued") for n in (name, "dp2-bf16"))
    apart = torch.cat([(ours[n] != theirs[n]).flatten() for n in theirs]).float().mean().item()
    assert apart < BF16_ROUNDED_APART


def test_in_bfloat16_the_main_parameters_are_fp32_and_stay_close_to_those_of_an_fp32_model(results: Path) -> None:
    ours, exact = (checkpoint(results, name, "weights") for name in ("dp2-bf16", "one"))
    differences = torch.cat([(ours[name] - exact[name]).abs().flatten() for name in exact])
    assert PARAMETER < differences.mean().item() < BF16_MEAN_PARAMETER
    assert not same_bits(ours, {name: tensor.bfloat16().float() for name, tensor in ours.items()})
    exported = load_folder(results / "dp2-bf16" / "continued")
    assert same_bits(exported, {name: tensor.bfloat16().float() for name, tensor in exported.items()})


@pytest.mark.parametrize("name", [name for name in CASES if name.endswith("bf16-grads")])
def test_gradients_summed_in_bfloat16_stay_close_to_those_summed_in_fp32(results: Path, name: str) -> None:
    assert facts(results, name)["gradient_dtypes"] == ["torch.bfloat16"]
    assert facts(results, "dp2-bf16")["gradient_dtypes"] == ["torch.float32"]
    first, exact = (grad_norms(results, n)[0] for n in (name, "dp2-bf16"))
    assert first == pytest.approx(exact, rel=BF16_GRADIENT_NORM)
    assert first != exact
    ours, theirs = (checkpoint(results, n, "exp_avg") for n in (name, "dp2-bf16"))
    assert largest_difference(ours, theirs) < BF16_GRADIENT * largest(theirs)
    ours, theirs = (checkpoint(results, n, "weights") for n in (name, "dp2-bf16"))
    differences = torch.cat([(ours[n] - theirs[n]).abs().flatten() for n in theirs])
    assert differences.mean() < BF16_MEAN_PARAMETER
    assert not same_bits(ours, {n: tensor.bfloat16().float() for n, tensor in ours.items()})


@pytest.mark.parametrize("name", ROUNDED_MOMENTS)
def test_moments_in_bfloat16_are_saved_as_such(results: Path, name: str) -> None:
    folder = results / name / "checkpoints" / "step-00000002"
    saved = {
        state: {tensor.dtype for file in (folder / state).glob("*.safetensors") for tensor in load_file(file).values()}
        for state in STATES
    }
    assert saved == {"weights": {torch.float32}, "exp_avg": {torch.bfloat16}, "exp_avg_sq": {torch.bfloat16}}


@pytest.mark.parametrize("name", ["dp2-spread-bf16-moments", "pp2-dp2-bf16-moments"])
def test_layouts_with_moments_in_bfloat16_agree(results: Path, name: str) -> None:
    ours, theirs = (load_folder(results / n / "continued") for n in (name, "dp2-bf16-moments"))
    assert largest_difference(ours, theirs) < PARAMETER


@pytest.mark.parametrize("name", ROUNDED_MOMENTS)
def test_first_moments_in_bfloat16_are_those_in_float32_rounded_at_each_update(results: Path, name: str) -> None:
    """Two updates round twice, by up to half of 1/128 of a value each. Second moments have another adam_beta2."""
    ours, theirs = (checkpoint(results, n, "exp_avg") for n in (name, reference(name)))
    assert ours.keys() == theirs.keys()
    for tensor, rounded in ours.items():
        difference = (rounded.float() - theirs[tensor]).norm() / theirs[tensor].norm().clamp(min=1e-30)
        assert 0 < difference < 1 / 128, f"{tensor}: {difference:.1e}"


@pytest.mark.parametrize("name", OFFLOADED)
@pytest.mark.parametrize("state", STATES)
def test_offloading_changes_no_bit(results: Path, state: str, name: str) -> None:
    spread = name.replace("offload", "spread")
    assert same_bits(checkpoint(results, name, state), checkpoint(results, spread, state))


@pytest.mark.parametrize("name", RESUMED)
@pytest.mark.parametrize("state", STATES)
def test_a_checkpoint_of_any_layout_is_read_and_written_bit_for_bit(results: Path, state: str, name: str) -> None:
    source = checkpoint(results, RESUMED[name], state)
    assert same_bits(checkpoint(results, name, state, "reloaded"), source)


@pytest.mark.parametrize("name", [name for name in RESUMED if name in EXACT or RESUMED[name] == name])
def test_a_resumed_run_continues_like_the_saved_one(results: Path, name: str) -> None:
    ours, source = load_folder(results / name / "resumed"), load_folder(results / RESUMED[name] / "continued")
    assert same_bits(ours, source) if RESUMED[name] == name else largest_difference(ours, source) < PARAMETER
    assert facts(results, name)["num_steps"] == 3


@pytest.mark.parametrize("name", CASES)
def test_ranks_that_share_a_parameter_have_the_rounded_main_parameter(results: Path, name: str) -> None:
    found = facts(results, name)
    assert found["replicas_agree"]
    assert found.get("replicas_agree_after_load", True)


@pytest.mark.parametrize("name", CASES)
def test_a_nan_on_one_rank_makes_all_ranks_skip_and_changes_nothing(results: Path, name: str) -> None:
    found = facts(results, name)
    assert found["skipped"]
    assert found["unchanged"]


@pytest.mark.parametrize("name", CASES)
def test_an_empty_minibatch_is_a_skipped_update_on_all_ranks(results: Path, name: str) -> None:
    assert facts(results, name)["empty_is_skipped"]


@pytest.mark.parametrize("name", CASES)
def test_offloading_between_updates_empties_the_device_and_restores_every_bit(results: Path, name: str) -> None:
    """Offload before the third update; a resumed run, which must give the same bits, does not offload."""
    found = facts(results, name)
    assert found["offload_empties"]
    assert found["offload_returns"]
