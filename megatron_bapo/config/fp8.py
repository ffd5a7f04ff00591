"""The section `fp8`, and what its recipes ask of hardware and lengths."""

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
"""transformer_engine/pytorch/quantization.py, TE 2.20."""


class Fp8Config(Section):
    """Matrix products of the layers in FP8, in training and scoring alike; the keys are Megatron's without `fp8_`."""

    recipe: Fp8Recipe = "blockwise"
    """Where scales come from: `delayed`, one a tensor from its past largest values, which checkpoints do not hold: a
    resumed run collects them anew and does not repeat the interrupted one's bits; `tensorwise`, from the tensor itself;
    `blockwise`, one for 128 x 128 weights and for 128 of a token's activations; `mxfp8`, one for 32 numbers, on
    Blackwell."""
    format: Literal["e4m3", "hybrid"] | None = None
    """`hybrid` has gradients in E5M2; by default that of `delayed` and `tensorwise`, the others take `e4m3`."""
    param: bool = False
    """Keep the layers' weights in FP8, too; fp32 main parameters stay with the optimizer."""
    first_last_layers_bf16: bool = False
    num_layers_at_start_in_bf16: NonNegativeInt = 1
    """With first_last_layers_bf16; so is the next one."""
    num_layers_at_end_in_bf16: NonNegativeInt = 1

    @property
    def number_format(self) -> Literal["e4m3", "hybrid"]:
        return self.format or ("hybrid" if self.recipe in ("delayed", "tensorwise") else "e4m3")

    @property
    def remembers_passes(self) -> bool:
        """Whether a training pass changes the scales of the next one, so that none can be repeated bit for bit."""
        return self.recipe == "delayed"

    @property
    def num_bf16_layers(self) -> tuple[int, int]:
        """At the start and at the end of the model."""
        if not self.first_last_layers_bf16:
            return 0, 0
        return self.num_layers_at_start_in_bf16, self.num_layers_at_end_in_bf16

    @property
    def multiple(self) -> int:
        """Of which lengths and the widths of matrices must be multiples (get_fp8_align_size, Megatron-Core 0.19)."""
        return 32 if self.recipe == "mxfp8" else 16

    @property
    def weight_multiple(self) -> int:
        """Of both sides of a weight kept in FP8: blocks are whole."""
        return 128 if self.param and self.recipe == "blockwise" else self.multiple


def capability_problem(recipe: Fp8Recipe, capability: ComputeCapability) -> str | None:
    """Why GPUs of this compute capability cannot run the recipe; None when they can."""
    least = _LEAST_CAPABILITY[recipe]
    if capability < least:
        needed, found = (".".join(map(str, version)) for version in (least, capability))
        instead = [name for name, capable in _LEAST_CAPABILITY.items() if capable <= capability]
        way_out = f"set fp8.recipe={instead[-1]}" if instead else "leave the section fp8 out"
        return f"fp8.recipe={recipe} needs GPUs of compute capability {needed} or higher, these have {found}; {way_out}"
    if recipe == "mxfp8" and capability >= (12, 0):
        return (
            "fp8.recipe=mxfp8 on GPUs of compute capability 12: Transformer Engine has not all of its products there; "
            "set fp8.recipe=tensorwise"
        )
    return None
