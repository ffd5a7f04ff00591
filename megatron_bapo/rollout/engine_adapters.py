"""Low-rank adapters in vLLM's worker processes: a policy version replaces the only adapter of the engine, in memory.

vLLM 0.32 reads adapters from folders. Requests that name an adapter which a worker has already are served without
reading one (`LRUCacheWorkerLoRAManager.add_adapter` in vllm/lora/worker_manager.py), so the workers register each
version's tensors under the same number before any request names it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from itertools import chain
from typing import Any

import torch
from vllm.lora.lora_model import LoRAModel
from vllm.lora.lora_weights import LoRALayerWeights
from vllm.lora.request import LoRARequest

from megatron_bapo.config.lora import LoraConfig
from megatron_bapo.config.lora_transfer import engine_rank
from megatron_bapo.errors import RunError

ADAPTER_ID = 1


def adapter_request() -> LoRARequest:
    """Return what a request to an engine names to be served with the adapter of the newest policy version."""
    return LoRARequest("policy", ADAPTER_ID, lora_path="/received-with-the-policy-version")


def adapter_arguments(adapters: LoraConfig) -> dict[str, Any]:
    """Return the arguments of an engine that serves adapters, of these layers only."""
    return {
        "enable_lora": True,
        "max_loras": 1,
        "max_lora_rank": engine_rank(adapters),
        "lora_target_modules": list(adapters.target_modules),
    }


def replace_adapter(runner: Any, tensors: Iterable[tuple[str, torch.Tensor]], scale: float) -> None:
    """Make the tensors the adapter of a worker's layers; `scale` is the factor of its output.

    The names are those of `adapter_table`. Parts that belong to other ranks may hold anything. Raises RunError if a
    tensor belongs to a layer that cannot have an adapter, which vLLM ignores, or if a layer of this worker gets none.
    """
    halves = defaultdict[str, dict[str, torch.Tensor]](dict)
    for name, tensor in tensors:
        module, _, half = name.removesuffix(".weight").rpartition(".")
        halves[module][half] = tensor
    # The products are copies, as vLLM requires: the tensors may be views of memory that a later version reuses.
    weights = {
        module: LoRALayerWeights(module, len(found["lora_A"]), 1, found["lora_A"].clone(), found["lora_B"] * scale, 1.0)
        for module, found in halves.items()
    }
    manager = runner.lora_manager._adapter_manager
    _check_layers(weights.keys(), manager)
    rank = max(layer.rank for layer in weights.values())
    manager.remove_adapter(ADAPTER_ID)
    manager.add_adapter(LoRAModel(ADAPTER_ID, rank, weights))
    manager.activate_adapter(ADAPTER_ID)


def _check_layers(received: Iterable[str], manager: Any) -> None:
    """Check that the worker's layers with adapters are those whose tensors it has received."""
    parts = manager.packed_modules
    known = {*chain.from_iterable(parts.get(name, [name]) for name in manager.modules)}
    for name in sorted({*received} - known):
        raise RunError(f"vLLM has no layer {name} that can have an adapter; set weight_sync.lora=merged")
    for name in manager.modules:
        if not {*parts.get(name, [name])}.intersection(received):
            raise RunError(f"vLLM's layer {name} has received no adapter")
