"""Warnings about low-rank adapters."""

from __future__ import annotations

from collections.abc import Iterator

from megatron_bapo.config.lora_transfer import reason_to_merge
from megatron_bapo.config.model_checks import policy_architecture
from megatron_bapo.config.schema import Config


def lora_warnings(config: Config) -> Iterator[str]:
    """Yield one line if engines receive merged weights although the configuration does not ask for them."""
    if config.model.lora is None or config.weight_sync.lora is not None:
        return
    policy = policy_architecture(config)
    if policy is not None and (obstacle := reason_to_merge(config, policy)) is not None:
        yield (
            "each weight update sends all weights with the adapters merged, not the adapters alone, because of "
            f"{obstacle.reason}; {obstacle.way_out}, or set weight_sync.lora=merged to confirm it"
        )
