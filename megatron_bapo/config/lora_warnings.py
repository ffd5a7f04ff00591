"""Warnings about low-rank adapters."""

from __future__ import annotations

from collections.abc import Iterator

from megatron_bapo.config.lora_checks import modules_of
from megatron_bapo.config.lora_transfer import reason_to_merge
from megatron_bapo.config.model_checks import policy_architecture
from megatron_bapo.config.schema import Config


def lora_warnings(config: Config) -> Iterator[str]:
    """Yield a line about target modules that the model lacks, and one about adapters that are merged unasked."""
    lora = config.model.lora
    policy = None if lora is None else policy_architecture(config)
    if lora is None or policy is None:
        return
    modules = modules_of(policy)
    if absent := [name for name in lora.target_modules if name not in modules]:
        yield (
            f"model.lora.target_modules has {', '.join(absent)}, without effect on this model, whose linear layers are "
            f"{', '.join(modules)}; name some of those instead"
        )
    if config.weight_sync.lora is None and (obstacle := reason_to_merge(config, policy)) is not None:
        yield (
            "each weight update sends all weights with the adapters merged, not the adapters alone, because of "
            f"{obstacle.reason}; {obstacle.way_out}, or set weight_sync.lora=merged to confirm it"
        )
