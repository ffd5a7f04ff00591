"""Low-rank adapters: one process equals PEFT, every layout equals one process, and exports load in PEFT."""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.func import functional_call
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen3MoeConfig

from megatron_bapo.algorithm.loss_tokens import LossTokens
from megatron_bapo.algorithm.policy_loss import policy_loss
from megatron_bapo.config.algorithm import AlgorithmConfig
from megatron_bapo.config.architecture import read_architecture
from megatron_bapo.config.lora import LoraConfig
from megatron_bapo.model.hf_mapping import expected_shapes, frozen_tensors
from megatron_bapo.model.lora_mapping import PEFT_PREFIX, adapter_table
from megatron_bapo.model.peft_folder import ADAPTER_WEIGHTS, write_adapter_config
from megatron_bapo.planning.flops import forward_flops
from megatron_bapo.planning.parameters import num_active_adapter_parameters
from megatron_bapo.trainer.checkpoint import checkpoints
from megatron_bapo.trainer.conversion import hugging_face_from_checkpoint, peft_from_checkpoint
from megatron_bapo.weight_sync.transport import WeightStore
from tests.parallel.examples import make_examples
from tests.parallel.launching import PEFT_SITE, launch_all, launch_with_gpu_megatron
from tests.parallel.layouts import LAYOUTS, MODELS
from tests.parallel.tensors import largest, largest_difference, load_folder, same_bits, save_random_model
from tests.tolerances import (
    BF16_GRADIENT,
    BF16_LOG_PROB,
    GPU_GRADIENT_COSINE,
    GRADIENT,
    HUGGING_FACE_LOG_PROB,
    LOG_PROB,
    PARAMETER,
    PEFT_GRADIENT,
    PEFT_LOG_PROB,
)

RANK, ALPHA = 3, 6.0
SOME = ("q_proj", "v_proj", "up_proj")
"""Target modules that are parts of fused layers."""
LAYOUT_NAMES = {
    "qwen3": (
        *("one-process", "tp2", "tp2-sp", "pp2-vpp2", "cp2", "dp2-distopt-overlap", "cp2-selective", "tp4-sp"),
        *("tp2-sp-pp2-cp2", "one-process-bf16", "tp2-sp-bf16"),
    ),
    "qwen2": ("one-process", "tp2"),
    "mistral": ("one-process", "tp2-sp"),
    "qwen3_moe": (
        *("one-process", "tp2-sp", "dp2", "ep2", "tp2-sp-ep2", "tp2-sp-ep4-etp1", "ep2-pp2-vpp2", "pp2-dp2"),
        "tp2-sp-ep2-etp1-cp2-pp2-vpp2",
    ),
    "only_experts": ("one-process", "tp2-sp-ep2"),
    "qwen2_moe": ("one-process", "tp2-sp-ep2"),
    "glm4_moe": ("one-process", "tp2-sp-ep2"),
    "deepseek_v3": ("one-process", "tp4-sp"),
}
"""Between them: every mesh axis, recomputation of whole layers and of parts, and overlap."""
CONFIGS = {
    **MODELS,
    "only_experts": Qwen3MoeConfig(**MODELS["qwen3_moe"].to_dict() | {"mlp_only_layers": []}),
}
RESUMED_FROM = {"tp2-sp": "one-process", "cp2": "tp2-sp", "dp2-distopt-overlap": "cp2", "ep2-pp2-vpp2": "ep2"}
SOME_LAYOUTS = ("one-process", "tp2-sp", "tp4-sp", "pp2-vpp2-cp2")
NEW_LAYOUTS = ("one-process", "tp2-sp-ep2")
DROPOUT_CASES = [("qwen3", "tp2"), ("qwen3", "tp2-sp"), ("qwen3", "cp2-selective"), ("qwen3_moe", "tp2-sp-ep2")]
CASES = [(model, name) for model, names in LAYOUT_NAMES.items() for name in names]
ADAPTER_CASES = [*(f"{model}-{layout}" for model, layout in CASES), *(f"some-{layout}" for layout in SOME_LAYOUTS)]
GPU_MEGATRON_CASES = [("qwen3", "tp2-sp"), ("qwen3_moe", "tp2-sp-ep2")]


TARGETS = {
    "deepseek_v3": (
        "q_a_proj",
        "q_b_proj",
        "kv_a_proj_with_mqa",
        "kv_b_proj",
        "o_proj",
        "gate_proj",
        "up_proj",
        "down_proj",
    ),
}
"""Target modules of models to which not all of the default ones apply."""


def targets_of(model: str) -> dict[str, Any]:
    return {"target_modules": TARGETS[model]} if model in TARGETS else {}


def lora_of(**changes: Any) -> LoraConfig:
    return LoraConfig(rank=RANK, alpha=ALPHA, **changes)


def case_of(root: Path, model: str, layout: str, lora: dict, name: str) -> dict:
    given = LAYOUTS[layout]
    settings = {"model": str(root / model), "parallel": given.parallel, "dtype": given.dtype}
    if "path" in lora and layout in RESUMED_FROM:
        settings["resume_from"] = f"{model}-{RESUMED_FROM[layout]}"
    return {"name": name, "lora": {"rank": RANK, "alpha": ALPHA, **lora}, **settings}


def save_adapter(root: Path, model: str) -> Path:
    """Write random adapters of which both halves matter, as a PEFT folder."""
    folder, generator = root / f"{model}-adapter", torch.Generator().manual_seed(1)
    lora = lora_of(**targets_of(model))
    shapes = expected_shapes(read_architecture(root / model), adapter_table(lora))
    folder.mkdir()
    tensors = {PEFT_PREFIX + name: 0.1 * torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    save_file(tensors, folder / ADAPTER_WEIGHTS)
    write_adapter_config(folder, lora, root / model)
    return folder


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with `MODEL-LAYOUT/` for every case.

    Those named `new-` and `some-` have random initial adapters, and those named `dropout-` drop half of the inputs.
    """
    root, cases = tmp_path_factory.mktemp("lora"), []
    for model in LAYOUT_NAMES:
        save_random_model(AutoModelForCausalLM.from_config(CONFIGS[model]), root / model)
        save_adapter(root, model)
    for layout in LAYOUTS:  # so that those with the same groups are neighbours
        for model, names in LAYOUT_NAMES.items():
            if layout in names:
                path = {"path": str(root / f"{model}-adapter"), **targets_of(model)}
                cases.append(case_of(root, model, layout, path, f"{model}-{layout}"))
            if (model, layout) in DROPOUT_CASES:
                lora = {"path": str(root / f"{model}-adapter"), "dropout": 0.5}
                cases.append(case_of(root, model, layout, lora, f"dropout-{model}-{layout}"))
        if layout in SOME_LAYOUTS:
            cases.append(case_of(root, "qwen3", layout, {"target_modules": SOME}, f"some-{layout}"))
        if layout in NEW_LAYOUTS:
            cases.append(case_of(root, "qwen3_moe", layout, {}, f"new-{layout}"))
    launch_all("lora_ranks.py", cases, root)
    return root


@pytest.fixture(scope="module")
def gpu_megatron(results: Path) -> Path:
    """Return a folder with `MODEL-LAYOUT/` of some cases, run with the Megatron-Core version of the GPU lock."""
    cases = []
    for model, layout in GPU_MEGATRON_CASES:
        case = case_of(results, model, layout, {"path": str(results / f"{model}-adapter")}, f"{model}-{layout}")
        cases.append({key: value for key, value in case.items() if key != "resume_from"})
    return launch_with_gpu_megatron("lora_ranks.py", cases, results, 4)


@pytest.fixture(scope="module")
def peft() -> Any:
    """Return the module `peft`, which is installed apart from the locked environment."""
    assert (PEFT_SITE / ".complete").is_file(), f"{PEFT_SITE} does not exist; `make test` creates it"
    sys.path.append(str(PEFT_SITE))
    import peft

    return peft


def log_probs_of(folder: Path, stem: str) -> dict[str, torch.Tensor]:
    found = {name: x for file in folder.glob(f"{stem}-*.safetensors") for name, x in load_file(file).items()}
    assert len(found) == len(make_examples(9, in_groups=False))
    return found


def metrics_of(folder: Path) -> dict[str, dict[str, float]]:
    return json.loads((folder / "metrics.json").read_text())


def differences(ours: Path, reference: Path) -> dict[str, float]:
    """Return absolute differences of log-probs and parameters, and relative ones of gradients and their norm."""
    gradients = load_folder(reference / "gradients")
    # Some experts get no tokens.
    assert all(gradient.abs().max() > 1e-5 for name, gradient in gradients.items() if ".experts." not in name)
    assert sum(gradient.abs().max() > 1e-5 for gradient in gradients.values()) > 0.75 * len(gradients)
    norms = [metrics_of(folder)["update-0"]["actor/grad_norm"] for folder in (ours, reference)]
    return {
        **{
            stem: largest_difference(log_probs_of(ours, stem), log_probs_of(reference, stem))
            for stem in ("log_probs", "base_log_probs", "final_log_probs")
        },
        "direction": 1 - cosine(load_folder(ours / "gradients"), gradients),
        "grad norm": abs(norms[0] - norms[1]) / norms[1],
        **{
            name: largest_difference(load_folder(ours / name), gradients) / largest(gradients)
            for name in ("gradients", "gradients-padded")
        },
        **{
            name: largest_difference(load_folder(ours / name), load_folder(reference / name))
            for name in ("final", "continued", "merged")
        },
    }


def cosine(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> float:
    """Return the cosine of two gradients of the whole model."""
    pairs = [torch.cat([part[name].flatten() for name in theirs]) for part in (ours, theirs)]
    return torch.cosine_similarity(*pairs, dim=0).item()


LIMITS = {
    **dict.fromkeys(("log_probs", "base_log_probs", "final_log_probs"), LOG_PROB),
    **dict.fromkeys(("grad norm", "gradients", "gradients-padded"), GRADIENT),
    **dict.fromkeys(("final", "continued", "merged"), PARAMETER),
}
BF16_LIMITS = {
    **dict.fromkeys(("log_probs", "base_log_probs"), BF16_LOG_PROB),
    "grad norm": BF16_GRADIENT,
    "direction": 1 - GPU_GRADIENT_COSINE,
}


@pytest.mark.parametrize(("model", "layout"), CASES)
def test_layout_matches_one_process(results: Path, model: str, layout: str) -> None:
    """Compare log-probs, gradients, and adapters after updates, after a resume and merged into the model."""
    found = differences(results / f"{model}-{layout}", results / f"{model}-one-process")
    limits = LIMITS if LAYOUTS[layout].dtype == "float32" else BF16_LIMITS
    assert [f"{name}: {found[name]}" for name in limits if not found[name] <= limits[name]] == []


@pytest.mark.parametrize(("model", "layout"), GPU_MEGATRON_CASES)
def test_megatron_of_the_gpu_lock_matches_one_process(
    results: Path, gpu_megatron: Path, model: str, layout: str
) -> None:
    found = differences(gpu_megatron / f"{model}-{layout}", results / f"{model}-one-process")
    assert [f"{name}: {found[name]}" for name in LIMITS if not found[name] <= LIMITS[name]] == []


@pytest.mark.parametrize("layout", SOME_LAYOUTS)
def test_parts_of_fused_layers_can_have_adapters_alone(results: Path, layout: str) -> None:
    ours, reference = results / f"some-{layout}", results / "some-one-process"
    adapters = load_folder(ours / "final")
    assert {name.split(".")[-3] for name in adapters} == set(SOME)
    assert largest_difference(adapters, load_folder(reference / "final")) < PARAMETER
    merged, base = load_folder(ours / "merged"), load_folder(results / "qwen3")
    changed = {name.split(".")[-2] for name in merged if not torch.equal(merged[name], base[name])}
    assert changed == set(SOME)


def test_initial_adapters_are_the_same_in_every_layout_and_distributed_as_in_peft(results: Path) -> None:
    ours, reference = (load_folder(results / f"new-{layout}" / "initial") for layout in NEW_LAYOUTS)
    assert same_bits(ours, reference)
    assert all(not tensor.any() for name, tensor in ours.items() if ".lora_B." in name)
    scaled = [tensor * tensor.shape[1] ** 0.5 for name, tensor in ours.items() if ".lora_A." in name]
    values = torch.cat([tensor.flatten() for tensor in scaled])
    assert len({tensor.flatten()[0].item() for tensor in scaled}) == len(scaled)
    assert values.abs().max() <= 1
    assert abs(values.std() - 3**-0.5) < 0.01  # uniform between -1 and 1, like kaiming_uniform_ with a = sqrt(5)


@pytest.mark.parametrize("layout", ["tp2-sp", "tp4-sp", "pp2-vpp2"])
def test_adapters_that_are_off_leave_the_base_model(results: Path, layout: str) -> None:
    """The reference model of a KL penalty is the policy without its adapters."""
    reference = AutoModelForCausalLM.from_pretrained(results / "qwen3")
    found = log_probs_of(results / f"qwen3-{layout}", "base_log_probs")
    expected = {name: x.detach() for name, x in response_log_probs(reference).items()}
    assert largest_difference(found, expected) < HUGGING_FACE_LOG_PROB
    assert largest_difference(found, log_probs_of(results / f"qwen3-{layout}", "log_probs")) > 0.1


def response_log_probs(model: Any) -> dict[str, torch.Tensor]:
    """Return the log-probs of the sampled tokens of every example under a model of transformers."""
    found = {}
    for index, example in enumerate(make_examples(126, replies=True, in_groups=False)):
        trajectory = example.trajectory
        tokens = np.concatenate([trajectory.prompt_token_ids, trajectory.response_token_ids]).astype(np.int64)
        tokens_T = torch.from_numpy(tokens)
        log_probs = model(tokens_T[None]).logits[0, :-1].log_softmax(-1).gather(1, tokens_T[1:, None]).squeeze(1)
        found[str(index)] = log_probs[len(trajectory.prompt_token_ids) + trajectory.sampled_positions - 1]
    return found


def loss_of(model: Any, folder: Path) -> torch.Tensor:
    """Return the loss of the first update, under the bounds that it used."""
    update = metrics_of(folder)["update-0"]
    low, high = (torch.tensor(update[f"actor/bapo_clip_{side}"]).float() for side in ("low", "high"))
    losses, examples = [], make_examples(126, replies=True, in_groups=False)
    for example, log_probs in zip(examples, response_log_probs(model).values(), strict=True):
        size, behaviour = len(log_probs), torch.from_numpy(example.trajectory.behaviour_log_probs)
        known = LossTokens(behaviour, torch.full((size,), example.advantage), torch.full((size,), example.weight))
        losses.append(policy_loss(log_probs, torch.zeros(size), known, low, high, AlgorithmConfig()))
    return torch.stack(losses).sum()


@pytest.mark.parametrize(("model", "layout"), [("qwen3", "one-process"), ("qwen3", "tp2-sp"), ("qwen3_moe", "ep2")])
def test_frozen_weights_have_no_flops_of_their_gradients(results: Path, model: str, layout: str) -> None:
    """A scoring pass and a training pass with two products of each frozen weight instead of three."""
    architecture, examples = read_architecture(results / model), make_examples(126, replies=True, in_groups=False)
    lengths = [example.num_input_tokens for example in examples]
    products, attention = forward_flops(architecture, sum(lengths), sum(length**2 for length in lengths))
    adapters = 2.0 * num_active_adapter_parameters(architecture, lora_of(**targets_of(model))) * sum(lengths)
    expected = products + attention + 2 * products + 3 * (attention + adapters)
    update = metrics_of(results / f"{model}-{layout}")["update-0"]
    assert update["perf/model_flops"] == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("model", ["qwen3", "qwen2", "mistral"])
def test_one_process_matches_peft(results: Path, peft: Any, model: str) -> None:
    """Compare log-probs and gradients with PEFT's model of the same folders in float64."""
    ours, base = results / f"{model}-one-process", AutoModelForCausalLM.from_pretrained(results / model).double()
    adapted = peft.PeftModel.from_pretrained(base, results / f"{model}-adapter", is_trainable=True).double()
    expected = {name: x.detach() for name, x in response_log_probs(adapted).items()}
    found = log_probs_of(ours, "log_probs")
    assert largest_difference(found, expected) < PEFT_LOG_PROB * largest(expected)
    loss_of(adapted, ours).backward()
    gradients = {
        name.removeprefix(PEFT_PREFIX).replace(".default.", "."): 0.1 * parameter.grad
        for name, parameter in adapted.named_parameters()
        if parameter.grad is not None
    }
    assert largest_difference(load_folder(ours / "gradients"), gradients) < PEFT_GRADIENT * largest(gradients)


class Adapted:
    """A model of transformers with W + alpha / rank * B A in place of every adapted W, experts included."""

    def __init__(self, model: PreTrainedModel, adapters: dict[str, torch.Tensor]) -> None:
        self.model, self.adapters = model, {name: x.clone().requires_grad_() for name, x in adapters.items()}

    def delta(self, module: str) -> torch.Tensor:
        a, b = (self.adapters[f"{module}.lora_{half}.weight"] for half in "AB")
        return ALPHA / RANK * b @ a

    def __call__(self, tokens: torch.Tensor) -> Any:
        parameters = {}
        for name, value in self.model.named_parameters():
            prefix, _, last = name.rpartition(".experts.")
            experts = [f"{prefix}.experts.{expert}" for expert in range(len(value))] if prefix else []
            if last == "gate_up_proj":
                fused = [torch.cat([self.delta(f"{each}.{half}_proj") for half in ("gate", "up")]) for each in experts]
                parameters[name] = value + torch.stack(fused)
            elif last == "down_proj":
                parameters[name] = value + torch.stack([self.delta(f"{each}.down_proj") for each in experts])
            elif f"{name.removesuffix('.weight')}.lora_A.weight" in self.adapters:
                parameters[name] = value + self.delta(name.removesuffix(".weight"))
        return functional_call(self.model, parameters, (tokens,))


@pytest.mark.parametrize("model", ["qwen3_moe", "qwen2_moe", "glm4_moe", "deepseek_v3"])
def test_one_process_with_experts_matches_plain_torch(results: Path, model: str) -> None:
    """Compare log-probs and gradients of the adapters of attention, dense MLP, every expert and a shared expert."""
    ours, base = results / f"{model}-one-process", AutoModelForCausalLM.from_pretrained(results / model)
    adapted = Adapted(base, load_folder(ours / "initial"))
    expected = {name: x.detach() for name, x in response_log_probs(adapted).items()}
    assert largest_difference(log_probs_of(ours, "log_probs"), expected) < HUGGING_FACE_LOG_PROB
    loss_of(adapted, ours).backward()
    gradients = {name: 0.1 * x.grad for name, x in adapted.adapters.items() if x.grad is not None}
    assert largest_difference(load_folder(ours / "gradients"), gradients) < GRADIENT * largest(gradients)


@pytest.mark.filterwarnings("ignore:The following (rank|alpha)_pattern keys did not match:RuntimeWarning")  # PEFT 0.21
@pytest.mark.parametrize("name", ["qwen3-tp2-sp-pp2-cp2", "only_experts-tp2-sp-ep2"])
def test_the_exported_adapter_loads_in_peft_on_the_base_model(results: Path, peft: Any, name: str) -> None:
    base = AutoModelForCausalLM.from_pretrained(results / name.split("-")[0])
    adapted = peft.PeftModel.from_pretrained(base, results / name / "adapter")
    expected = {index: x.detach() for index, x in response_log_probs(adapted).items()}
    assert largest_difference(log_probs_of(results / name, "final_log_probs"), expected) < HUGGING_FACE_LOG_PROB


@pytest.mark.parametrize("name", ["qwen3-tp2-sp-pp2-cp2", "qwen3_moe-tp2-sp-ep2"])
def test_the_merged_model_has_the_log_probs_of_the_adapted_one(results: Path, name: str) -> None:
    merged = AutoModelForCausalLM.from_pretrained(results / name / "merged")
    expected = {index: x.detach() for index, x in response_log_probs(merged).items()}
    assert largest_difference(log_probs_of(results / name, "final_log_probs"), expected) < HUGGING_FACE_LOG_PROB


@pytest.mark.parametrize(("model", "layout"), DROPOUT_CASES)
def test_dropout_acts_in_updates_and_leaves_the_ranks_with_the_same_adapters(
    results: Path, model: str, layout: str
) -> None:
    """If replicated halves differed between ranks, the policy would not be the model that it exports."""
    ours, without = results / f"dropout-{model}-{layout}", results / f"{model}-{layout}"
    assert same_bits(log_probs_of(ours, "log_probs"), log_probs_of(without, "log_probs"))
    gradients = load_folder(without / "gradients")
    assert largest_difference(load_folder(ours / "gradients"), gradients) > 0.1 * largest(gradients)
    merged = AutoModelForCausalLM.from_pretrained(ours / "merged")
    expected = {index: x.detach() for index, x in response_log_probs(merged).items()}
    assert largest_difference(log_probs_of(ours, "final_log_probs"), expected) < HUGGING_FACE_LOG_PROB


@pytest.mark.parametrize(("model", "layout"), CASES)
def test_engines_receive_the_merged_weights(results: Path, model: str, layout: str) -> None:
    folder = results / f"{model}-{layout}"
    published = {name: tensor.float().clone() for name, tensor in WeightStore(folder / "store").read(1)}
    frozen = frozen_tensors(read_architecture(results / model))
    merged = {name: tensor for name, tensor in load_folder(folder / "merged").items() if name not in frozen}
    assert same_bits(published, merged)


@pytest.mark.parametrize("name", ADAPTER_CASES)
def test_engines_receive_the_adapters_of_the_peft_folder(results: Path, name: str) -> None:
    published = {
        PEFT_PREFIX + key: tensor.clone() for key, tensor in WeightStore(results / name / "adapter-store").read(1)
    }
    exported = load_file(results / name / "adapter" / ADAPTER_WEIGHTS)
    assert same_bits(published, exported)


@pytest.mark.parametrize("name", ["qwen3-tp2-sp", "qwen3_moe-tp2-sp-ep2"])
def test_a_checkpoint_contains_only_adapters_and_converts_to_both_formats(
    results: Path, tmp_path: Path, name: str
) -> None:
    folder, origin = results / name, results / name.split("-")[0]
    (checkpoint,) = checkpoints(folder / "checkpoints")
    for state in ("weights", "exp_avg", "exp_avg_sq"):
        assert load_folder(checkpoint / state).keys() == load_folder(folder / "final").keys()
    hugging_face_from_checkpoint(
        checkpoint, origin, tmp_path / "hf", torch.float32, max_file_bytes=1 << 20, advance=lambda _: None
    )
    assert largest_difference(load_folder(tmp_path / "hf"), load_folder(folder / "merged")) < 1e-7
    peft_from_checkpoint(checkpoint, origin, tmp_path / "adapter", torch.float32)
    assert same_bits(load_folder(tmp_path / "adapter"), load_folder(folder / "adapter"))
