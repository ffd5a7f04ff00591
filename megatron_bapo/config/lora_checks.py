"""Rules of low-rank adapters."""

from __future__ import annotations

from collections.abc import Iterator

from megatron_bapo.config.architecture import Architecture
from megatron_bapo.config.schema import Config


def lora_problems(config: Config) -> Iterator[str]:
    """Yield the broken rules of adapters, one line each."""
    if config.model.lora is None:
        return
    if config.fp8 is not None:
        yield (
            f"model.lora with fp8.recipe={config.fp8.recipe}: adapters need linear layers with separate inputs, and "
            "FP8 products are fused with the norms before them; remove the section fp8 or model.lora"
        )
    if config.weight_sync.transport == "cuda_ipc":
        yield (
            "model.lora with weight_sync.transport=cuda_ipc: engines would read the trainer's parameters, in which the "
            "adapters are not merged; set transport=store or nccl"
        )
    if config.model.lora.dropout and config.algorithm.clip_bounds.method == "speculate":
        yield (
            f"model.lora.dropout={config.model.lora.dropout} with algorithm.clip_bounds.method=speculate: a pass that "
            "is repeated with other bounds would drop other elements; set method=score, or dropout=0"
        )


def lora_shape_problems(config: Config, architecture: Architecture) -> Iterator[str]:
    """Yield the broken rules that depend on the architecture."""
    parallel, lora = config.parallel, config.model.lora
    if lora is None:
        return
    tp, etp = parallel.tensor_model_parallel_size, parallel.expert_tensor_parallel_size
    if architecture.moe_layers and etp is not None and tp % etp:
        yield (
            f"model.lora with parallel.expert_tensor_parallel_size={etp}: it must divide tensor_model_parallel_size="
            f"{tp}, because Megatron counts the gradient norm of replicated parameters once per tensor-parallel group; "
            "choose a divisor"
        )
