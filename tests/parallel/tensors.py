"""Folders of safetensors files and the differences between two of them."""

from pathlib import Path

import torch
from safetensors.torch import load_file
from transformers import PreTrainedModel


def save_random_model(model: PreTrainedModel, folder: Path, seed: int = 0) -> None:
    """Write a model whose weights are large enough for every part to matter; norms and biases are around 1."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1 + (parameter.dim() == 1))
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.copy_(0.1 * torch.randn(buffer.shape, generator=generator))
    model.save_pretrained(folder)


def load_folder(folder: Path) -> dict[str, torch.Tensor]:
    """Return every tensor of a folder as fp32."""
    return {name: tensor.float() for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


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
