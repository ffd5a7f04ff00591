"""What engines receive of a policy with adapters: the adapters alone, or weights in which they are merged."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from megatron_bapo.config.architecture import Architecture
from megatron_bapo.config.lora import LoraConfig
from megatron_bapo.config.schema import Config

VLLM_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Ranks for which vLLM 0.32 allocates memory (`MaxLoRARanks` in vllm/config/lora.py); adapters may have lower ones."""


class Obstacle(NamedTuple):
    """Why engines cannot serve adapters beside the weights that they adapt, and what to do about it."""

    reason: str
    way_out: str


def sent_adapters(config: Config, architecture: Architecture) -> LoraConfig | None:
    """Return the adapters of which policy versions consist; None: engines receive all weights, with adapters merged."""
    lora, choice = config.model.lora, config.weight_sync.lora
    is_merged = choice == "merged" or (choice is None and reason_to_merge(config, architecture) is not None)
    return None if is_merged else lora


def reason_to_merge(config: Config, architecture: Architecture) -> Obstacle | None:
    """Return why adapters are merged if `weight_sync.lora` is null; None: they are not, or there are none."""
    if config.model.lora is None:
        return None
    if config.model.dtype == "float32":
        return Obstacle(
            "model.dtype=float32, for which vLLM has kernels of adapters only on CPUs",
            "set model.dtype=bfloat16, or on CPUs weight_sync.lora=adapters",
        )
    return next(adapter_obstacles(config, config.model.lora, architecture), None)


def adapter_obstacles(config: Config, lora: LoraConfig, architecture: Architecture) -> Iterator[Obstacle]:
    """Yield why engines cannot serve these adapters on any machine."""
    rollout = config.rollout
    if lora.rank > VLLM_RANKS[-1]:
        yield Obstacle(f"model.lora.rank={lora.rank}: vLLM allows at most {VLLM_RANKS[-1]}", "lower the rank")
    if architecture.moe_layers:
        yield Obstacle(
            "a model with experts, for which vLLM has no kernels beside adapters on CPUs, and untested ones on GPUs",
            "choose a model without experts",
        )
    if rollout.sleep_level == 2:
        yield Obstacle("rollout.sleep_level=2, which discards the weights beside the adapters", "set sleep_level=1")
    if rollout.quantization is not None:
        yield Obstacle(
            f"rollout.quantization={rollout.quantization}, which quantizes weights at each weight update", "remove it"
        )


def engine_rank(lora: LoraConfig) -> int:
    """Return the rank for which engines allocate memory."""
    return next(rank for rank in VLLM_RANKS if rank >= lora.rank)
