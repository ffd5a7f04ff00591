"""Rules of low-rank adapters."""

from __future__ import annotations

from collections.abc import Iterator

from megatron_bapo.config.architecture import Architecture
from megatron_bapo.config.lora_transfer import adapter_obstacles, reason_to_merge, sent_adapters
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
    if config.model.freeze_router:
        yield "model.freeze_router=true with model.lora: adapters freeze all weights of the model; remove freeze_router"
    if config.model.lora.dropout and config.algorithm.clip_bounds.method == "speculate":
        yield (
            f"model.lora.dropout={config.model.lora.dropout} with algorithm.clip_bounds.method=speculate: a pass that "
            "is repeated with other bounds would drop other elements; set method=score, or dropout=0"
        )
    if config.model.lora.dropout and config.logging.entropy_clip_rule:
        yield (
            f"model.lora.dropout={config.model.lora.dropout} with logging.entropy_clip_rule=true: the entropy before "
            "an update is that of a training pass, which drops elements, and the one after it that of a pass without "
            "dropout; set entropy_clip_rule=false, or dropout=0"
        )


def modules_of(architecture: Architecture) -> tuple[str, ...]:
    """Return the names of the model's linear layers that may have adapters."""
    if architecture.kv_lora_rank:
        queries = ("q_a_proj", "q_b_proj") if architecture.q_lora_rank else ("q_proj",)
        inputs = (*queries, "kv_a_proj_with_mqa", "kv_b_proj")
    else:
        inputs = ("q_proj", "k_proj", "v_proj")
    return (*inputs, "o_proj", "gate_proj", "up_proj", "down_proj")


def lora_shape_problems(config: Config, architecture: Architecture, where: str) -> Iterator[str]:
    """Yield the broken rules that depend on the policy's architecture; `where` names its source in messages."""
    parallel, lora = config.parallel, config.model.lora
    if lora is None:
        return
    if set(lora.target_modules).isdisjoint(modules := modules_of(architecture)):
        yield (
            f"model.lora.target_modules=[{', '.join(lora.target_modules)}] names no linear layer of the model "
            f"({where}), so nothing would be trained; choose from {', '.join(modules)}"
        )
    tp, etp = parallel.tensor_model_parallel_size, parallel.expert_tensor_parallel_size
    if architecture.moe_layers and etp is not None and tp % etp:
        yield (
            f"model.lora with parallel.expert_tensor_parallel_size={etp}: it must divide tensor_model_parallel_size="
            f"{tp}, because Megatron counts the gradient norm of replicated parameters once per tensor-parallel group; "
            "choose a divisor"
        )


def lora_transfer_problems(config: Config, policy: Architecture) -> Iterator[str]:
    """Yield the broken rules of what engines receive of a policy with adapters."""
    lora, sync = config.model.lora, config.weight_sync
    if lora is None:
        return
    if sync.lora == "adapters":
        for reason, way_out in adapter_obstacles(config, lora, policy):
            yield f"weight_sync.lora=adapters with {reason}; {way_out}, or set weight_sync.lora=merged"
    if sync.transport == "cuda_ipc" and sent_adapters(config, policy) is None:
        obstacle = None if sync.lora else reason_to_merge(config, policy)
        cause = f"adapters that are merged because of {obstacle.reason}" if obstacle else "weight_sync.lora=merged"
        yield (
            f"weight_sync.transport=cuda_ipc with {cause}: engines would read the trainer's parameters, in which the "
            "adapters are not merged; set transport=store or nccl"
        )
