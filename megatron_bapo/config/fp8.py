"""The section `fp8`, and what its recipes require of GPUs and of tensor sizes."""

from __future__ import annotations

from typing import Literal

from megatron_bapo.config.section import NonNegativeInt, Section

Fp8Recipe = Literal["delayed", "tensorwise", "blockwise", "mxfp8"]
ComputeCapability = tuple[int, int]

_LEAST_CAPABILITY: dict[Fp8Recipe, ComputeCapability] = {
    "delayed": (8, 9),
    "tensorwise": (8, 9),
    "blockwise": (9, 0),
    "mxfp8": (10, 0),
}
"""Lowest compute capability that each recipe runs on (transformer_engine/pytorch/quantization.py, TE 2.20)."""


class Fp8Config(Section):
    """FP8 matrix products in the trainer's layers, in training and scoring alike.

    The keys are Megatron's without the prefix `fp8_`. Without this section everything is computed in model.dtype."""

    recipe: Fp8Recipe = "blockwise"
    """Scaling recipe. `delayed` has one scale per tensor, from its past largest values; checkpoints do not contain
    these, so a resumed run is not bitwise equal to an uninterrupted one. `tensorwise` takes the scale from the tensor
    itself; `blockwise` has one scale per 128 x 128 weights and per 128 activations of a token; `mxfp8` has one per 32
    numbers and needs Blackwell GPUs of compute capability 10."""
    format: Literal["e4m3", "hybrid"] | None = None
    """FP8 format: `e4m3` for all tensors, or `hybrid` with gradients in E5M2; null: `hybrid` for `delayed` and
    `tensorwise`, else `e4m3`."""
    param: bool = False
    """Keep the layers' weights in FP8, too. The optimizer keeps fp32 main parameters in any case."""
    first_last_layers_bf16: bool = False
    """Compute the first and last layers of the model in bfloat16."""
    num_layers_at_start_in_bf16: NonNegativeInt = 1
    """Number of first layers in bfloat16 if `first_last_layers_bf16` is set."""
    num_layers_at_end_in_bf16: NonNegativeInt = 1
    """Number of last layers in bfloat16 if `first_last_layers_bf16` is set."""

    @property
    def number_format(self) -> Literal["e4m3", "hybrid"]:
        """FP8 format in use, with the recipe's default resolved."""
        return self.format or ("hybrid" if self.recipe in ("delayed", "tensorwise") else "e4m3")

    @property
    def uses_delayed_scaling(self) -> bool:
        """Whether a training pass changes the scales of the next one, so that no pass can be repeated bit for bit."""
        return self.recipe == "delayed"

    @property
    def num_bf16_layers(self) -> tuple[int, int]:
        """Number of bfloat16 layers at the start and at the end of the model."""
        if not self.first_last_layers_bf16:
            return 0, 0
        return self.num_layers_at_start_in_bf16, self.num_layers_at_end_in_bf16

    @property
    def multiple(self) -> int:
        """Divisor of sequence lengths and matrix widths (get_fp8_align_size, Megatron-Core 0.19)."""
        return 32 if self.recipe == "mxfp8" else 16

    @property
    def weight_multiple(self) -> int:
        """Divisor of both dimensions of a weight; weights kept in FP8 must consist of whole blocks."""
        return 128 if self.param and self.recipe == "blockwise" else self.multiple


def capability_problem(recipe: Fp8Recipe, capability: ComputeCapability) -> str | None:
    """Return why GPUs of this compute capability cannot run the recipe, or None if they can."""
    least = _LEAST_CAPABILITY[recipe]
    if capability < least:
        needed, found = (".".join(map(str, version)) for version in (least, capability))
        instead = [name for name, capable in _LEAST_CAPABILITY.items() if capable <= capability]
        way_out = f"set fp8.recipe={instead[-1]}" if instead else "remove the section fp8"
        return f"fp8.recipe={recipe} needs GPUs of compute capability {needed} or higher, these have {found}; {way_out}"
    if recipe == "mxfp8" and capability >= (12, 0):
        return (
            "fp8.recipe=mxfp8 is not supported on GPUs of compute capability 12, where Transformer Engine lacks some "
            "of its matrix products; set fp8.recipe=tensorwise"
        )
    return None
