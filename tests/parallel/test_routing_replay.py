"""Routing replay of a mixture-of-experts model in every kind of layout."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file
from transformers import AutoModelForCausalLM, PreTrainedModel

from tests.parallel.examples import NUM_EXAMPLES, make_examples
from tests.parallel.launching import launch_all, launch_with_gpu_megatron
from tests.parallel.layouts import LAYOUTS, MODELS
from tests.parallel.routing import forced, input_tokens, log_probs, routers, routes_of
from tests.parallel.tensors import largest, largest_difference, load_folder, save_random_model
from tests.tolerances import GRADIENT, HUGGING_FACE_LOG_PROB, LOG_PROB

LAYOUT_NAMES = (
    *("one-process", "dp2", "pp2-uneven", "pp2-vpp2", "cp2-ep2", "tp2-sp-ep2", "pp2-dp2", "ep2-pp2-vpp2"),
    "tp2-sp-ep2-etp1-cp2-pp2-vpp2",
)
"""Between them: recomputation of whole layers and of experts only, and several micro-batches in flight."""


def case(layout: str, replay: str, mini_batch: int = NUM_EXAMPLES, *, noise: bool) -> dict:
    return {"parallel": LAYOUTS[layout].parallel, "replay": replay, "noise": noise, "mini_batch": mini_batch}


CASES = {
    **{f"trainer-{layout}": case(layout, "trainer", noise=True) for layout in LAYOUT_NAMES},
    **{f"trainer-{layout}-minibatch": case(layout, "trainer", 8, noise=True) for layout in ("dp2", "tp2-sp-ep2")},
    "none-one-process": case("one-process", "none", noise=True),
    **{f"rollout-{layout}": case(layout, "rollout", noise=False) for layout in LAYOUT_NAMES},
    "rollout-dp2-minibatch": case("dp2", "rollout", 8, noise=False),
    "engine-rollout": case("one-process", "rollout", noise=False) | {"behaviour": "rollout"},
    "engine-none": case("one-process", "none", noise=False) | {"behaviour": "rollout"},
}


SIGMOID_CASES = {
    f"{model}-{layout}": case(layout, "rollout", noise=False)
    for model, layout in (("glm4_moe", "one-process"), ("glm4_moe", "tp2-sp-ep2"), ("deepseek_v3", "tp2-sp-ep2"))
}
"""Cases of models whose routers score experts by sigmoids; each model has a folder of its own."""


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with `NAME/` for every case."""
    root = tmp_path_factory.mktemp("routing")
    cases = []
    sigmoid = sorted({name.partition("-")[0] for name in SIGMOID_CASES})
    for model_type, folder in ("qwen3_moe", root), *((name, root / name) for name in sigmoid):
        of_model = {n: case for n, case in SIGMOID_CASES.items() if n.startswith(f"{model_type}-")}
        model = AutoModelForCausalLM.from_config(MODELS[model_type])
        save_random_model(model, folder / "model")
        save_reference(model, folder)
        shared = {"model": str(folder / "model"), "engine": str(folder / "engine.safetensors")}
        cases += [{**case, **shared, "name": name} for name, case in (of_model or CASES).items()]
    launch_all("routing_ranks.py", sorted(cases, key=lambda case: str(case["parallel"])), root)
    return root


@pytest.fixture(scope="module")
def gpu_megatron(results: Path) -> Path:
    """Return a folder with two cases, run with the Megatron-Core version of the GPU lock."""
    shared = {"model": str(results / "model"), "engine": str(results / "engine.safetensors")}
    cases = [{**CASES[name], **shared, "name": name} for name in ("rollout-pp2-dp2", "trainer-pp2-dp2")]
    root = launch_with_gpu_megatron("routing_ranks.py", cases, results, 4)
    for name in ("forced", "engine"):
        (root / f"{name}.safetensors").symlink_to(results / f"{name}.safetensors")
    return root


def test_megatron_of_the_gpu_lock_replays_the_same_way(gpu_megatron: Path) -> None:
    test_ratios_of_the_first_update_are_exactly_1_if_it_replays_the_recomputation(gpu_megatron, "pp2-dp2")
    test_log_probs_are_those_of_a_model_that_is_forced_to_the_engines_routes(gpu_megatron, "rollout-pp2-dp2")


def save_reference(model: PreTrainedModel, root: Path) -> None:
    """Write what an engine with noisy routers chooses and finds, and what the model itself finds under these routes.

    `engine.safetensors` has the routes and log-probs of each example, `forced.safetensors` the model's log-probs with
    the weights of the experts chosen by the engine. `forced-gradients/` has a tenth of the gradients of the loss.
    """
    engine, forced_log_probs = {}, {}
    examples = make_examples(model.config.vocab_size, replies=True)
    gates = [router.weight.detach().clone() for router in routers(model)]
    generator = torch.Generator().manual_seed(1)
    noisy = [gate + 0.05 * torch.randn(gate.shape, generator=generator) for gate in gates]
    for index, example in enumerate(examples):
        set_gates(model, noisy)
        engine[f"routes.{index}"] = routes = routes_of(model, input_tokens(example)[:-1])
        set_gates(model, gates)
        assert (routes != routes_of(model, input_tokens(example)[:-1])).any()
        with forced(model, routes):
            forced_log_probs[str(index)] = found = log_probs(model, example)
            (-example.advantage * example.weight * found.sum()).backward()
        engine[f"log_probs.{index}"] = found.detach().numpy()
    save_file(engine, root / "engine.safetensors")
    save_file({name: value.detach().numpy() for name, value in forced_log_probs.items()}, root / "forced.safetensors")
    gradients = {name: 0.1 * parameter.grad for name, parameter in model.named_parameters()}
    model.save_pretrained(root / "forced-gradients", state_dict=gradients)


def set_gates(model: PreTrainedModel, gates: list[torch.Tensor]) -> None:
    with torch.no_grad():
        for router, gate in zip(routers(model), gates, strict=True):
            router.weight.copy_(gate)


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


@pytest.mark.parametrize("name", [name for name in CASES if name.startswith("rollout-")])
def test_log_probs_are_those_of_a_model_that_is_forced_to_the_engines_routes(results: Path, name: str) -> None:
    expected = load_file(results / "forced.safetensors")
    for which in "recomputed", "updated":
        found = load_file(results / name / f"{which}.safetensors")
        assert len(found) == CASES[name]["mini_batch"]
        assert max(np.abs(found[i] - expected[i]).max() for i in found) < HUGGING_FACE_LOG_PROB


@pytest.mark.parametrize("layout", LAYOUT_NAMES)
def test_gradients_are_those_of_one_process_and_reach_the_routers(results: Path, layout: str) -> None:
    ours, theirs = (load_folder(results / f"rollout-{name}" / "gradients") for name in (layout, "one-process"))
    assert largest_difference(ours, theirs) < GRADIENT * largest(theirs)
    gates = {name: gradient for name, gradient in ours.items() if name.endswith("mlp.gate.weight")}
    assert len(gates) == 3
    assert all(gradient.abs().max() > 0.01 * largest(theirs) for gradient in gates.values())


def test_gradients_under_replay_are_those_of_the_forced_model(results: Path) -> None:
    ours, theirs = load_folder(results / "rollout-one-process" / "gradients"), load_folder(results / "forced-gradients")
    assert largest_difference(ours, theirs) < GRADIENT * largest(theirs)


@pytest.mark.parametrize("name", SIGMOID_CASES)
def test_a_sigmoid_router_weights_replayed_experts_by_their_scores_without_the_bias(results: Path, name: str) -> None:
    folder = results / name.partition("-")[0]
    expected, theirs = load_file(folder / "forced.safetensors"), load_folder(folder / "forced-gradients")
    for which in "recomputed", "updated":
        found = load_file(results / name / f"{which}.safetensors")
        assert max(np.abs(found[i] - expected[i]).max() for i in found) < HUGGING_FACE_LOG_PROB
    assert largest_difference(load_folder(results / name / "gradients"), theirs) < GRADIENT * largest(theirs)


def test_replay_removes_the_mismatch_of_an_engine_with_noisy_routers(results: Path) -> None:
    found = {
        name: json.loads((results / f"engine-{name}" / "metrics.json").read_text())["update"]
        for name in ("none", "rollout")
    }
    for metric in "training/gen_kl_error", "training/rollout_probs_diff_max":
        assert found["none"][metric] > 1e-4
        assert found["rollout"][metric] < 1e-3 * found["none"][metric]


@pytest.mark.parametrize("layout", ["dp2", "tp2-sp-ep2-etp1-cp2-pp2-vpp2"])
def test_a_rank_keeps_the_routes_of_its_own_trajectories(results: Path, layout: str) -> None:
    held = np.array(json.loads((results / f"trainer-{layout}" / "metrics.json").read_text())["held"])
    lengths = [len(e.trajectory.prompt_token_ids) + len(e.trajectory.response_token_ids) - 1 for e in make_examples(9)]
    assert held.max(axis=0).tolist() == lengths
    assert ((held > 0).sum(axis=0) == 1).all()


@pytest.mark.parametrize(("layout", "bytes_of_token"), [("dp2", 0), ("cp2-ep2", 3 * 2)])
def test_only_the_ranks_of_a_replica_sum_routes(results: Path, layout: str, bytes_of_token: int) -> None:
    """The ranks of `cp2-ep2` are one replica; a token has a byte for each of 2 experts in 3 layers."""
    found = json.loads((results / f"trainer-{layout}" / "metrics.json").read_text())
    assert found["summed"] == bytes_of_token * sum(e.num_input_tokens for e in make_examples(9, replies=True))
