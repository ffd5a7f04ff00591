"""The section `model.lora`."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import PositiveFloat, PositiveInt, field_validator

from megatron_bapo.config.section import PartialFraction, Section

# fmt: off
TargetModule = Literal[
    "q_proj", "k_proj", "v_proj", "o_proj",
    "q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj",  # latent attention
    "gate_proj", "up_proj", "down_proj",
]
# fmt: on


class LoraConfig(Section):
    """Low-rank adapters (LoRA): the model's weights are frozen, and only the adapters are trained.

    The keys are PEFT's without the prefix `lora_`, and so is the definition: a linear layer W with an adapter computes
    W x + alpha / rank * B A dropout(x)."""

    rank: PositiveInt = 16
    """Rank of every adapter (PEFT's `r`)."""
    alpha: PositiveFloat = 32.0
    """Numerator of the adapters' scale alpha / rank (PEFT's `lora_alpha`)."""
    dropout: PartialFraction = 0.0
    """Probability with which an element of an adapter's input is dropped in updates, but not when log-probs are
    recomputed."""
    target_modules: tuple[TargetModule, ...] = (
        *("q_proj", "k_proj", "v_proj", "o_proj"),
        *("gate_proj", "up_proj", "down_proj"),
    )
    """Linear layers that have adapters, by their Hugging Face names, in every layer and every expert."""
    path: Path | None = None
    """PEFT folder whose adapters the run starts from; null: A is random and B is zero, as in PEFT."""

    @field_validator("target_modules")
    @classmethod
    def _some_modules_once(cls, names: tuple[TargetModule, ...]) -> tuple[TargetModule, ...]:
        if not names or len(set(names)) < len(names):
            raise ValueError(f"name at least one module, and each only once; got {list(names)}")
        return names

    @property
    def scale(self) -> float:
        """Factor of the adapters' output."""
        return self.alpha / self.rank
