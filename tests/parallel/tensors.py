"""Folders of safetensors files and the differences between two of them."""

from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import load_file
from transformers import PreTrainedModel, Qwen3_5ForCausalLM, Qwen3_5MoeForCausalLM, Qwen3NextForCausalLM

ZERO_CENTERED = (Qwen3NextForCausalLM, Qwen3_5ForCausalLM, Qwen3_5MoeForCausalLM)


def save_random_model(model: PreTrainedModel, folder: Path, seed: int = 0) -> None:
    """Write a model whose weights are large enough for every part to matter; norms and biases are around 1."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1 + (parameter.dim() == 1))
            if name.endswith("gate_up_proj_bias"):
                parameter.mul_(50)  # so that some gates and up projections are clamped
            if isinstance(model, ZERO_CENTERED) and name.endswith("norm.weight") and "linear_attn" not in name:
                parameter.sub_(1)  # these norms add one to their weights
            if name.endswith("conv1d.weight"):
                parameter.mul_(10)  # queries and keys, which are normalized, are not near zero
            if name.endswith("A_log"):
                parameter.sub_(3)  # states decay over several tokens
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.copy_(0.1 * torch.randn(buffer.shape, generator=generator))
    model.save_pretrained(folder)


def load_folder(folder: Path) -> dict[str, torch.Tensor]:
    """Return every tensor of a folder as fp32."""
    files = folder.glob("*.safetensors")
    found = {name: tensor.float() for file in files for name, tensor in load_file(file).items()}
    return {name: tensor for each in found.items() for name, tensor in by_expert(*each)}


def by_expert(name: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of single experts, as in other models' files, of one of gpt-oss's for all experts."""
    layer, is_stacked, rest = name.partition(".mlp.experts.")
    module, _, bias = rest.partition("_proj")
    if not is_stacked or module not in ("gate_up", "down"):
        yield name, tensor
        return
    kind = "bias" if bias else "weight"
    for expert, of_one in enumerate(tensor.unbind()):
        parts = {"down": of_one} if module == "down" else {"gate": of_one[..., 0::2], "up": of_one[..., 1::2]}
        for part, values in parts.items():
            yield f"{layer}.mlp.experts.{expert}.{part}_proj.{kind}", values.t().contiguous()


def largest(tensors: dict[str, torch.Tensor]) -> float:
    return max(tensor.abs().max().item() for tensor in tensors.values())


def largest_difference(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> float:
    assert ours.keys() == theirs.keys()
    return largest({name: ours[name] - theirs[name] for name in ours})


def same_bits(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> bool:
    assert ours.keys() == theirs.keys()
    assert ours
    return all(torch.equal(ours[name], theirs[name]) for name in ours)


def without_flops(metrics: dict[str, float]) -> dict[str, float]:
    """Return the metrics that do not depend on the layout: BAPO scores no minibatch of one micro-batch on each rank."""
    return {name: value for name, value in metrics.items() if name != "perf/model_flops"}
