"""Rules of models with attention sinks, windows in every second layer and biases of experts (gpt-oss)."""

from __future__ import annotations

from collections.abc import Iterator

from megatron_bapo.config.architecture import Architecture
from megatron_bapo.config.rollout import EngineSizeConfig
from megatron_bapo.config.schema import Config, ParallelConfig


def policy_sink_problems(config: Config, where: str) -> Iterator[str]:
    """Yield the broken rules of the policy; `where` names the source of its architecture."""
    if config.model.lora is not None:
        yield (
            f"model.lora with gpt-oss ({where}): neither the trainer nor its engines have adapters of it; remove the "
            "section, which trains all weights"
        )
    if (quantization := config.rollout.quantization) is not None:
        yield f"rollout.quantization={quantization} with gpt-oss ({where}) is not supported; remove it"
    if (replay := config.algorithm.routing_replay) != "none":
        yield (
            f"algorithm.routing_replay={replay} with gpt-oss ({where}): routes are recorded by their places in the KV "
            "cache, which vLLM frees behind a window; set it to none"
        )


def trainer_sink_problems(config: Config, parallel: ParallelConfig, where: str) -> Iterator[str]:
    """Yield the broken rules of a model that the trainer runs."""
    tp, cp = parallel.tensor_model_parallel_size, parallel.context_parallel_size
    etp = parallel.expert_tensor_parallel_size or tp
    if etp > 1:
        yield (
            f"parallel.expert_tensor_parallel_size={etp} (by default tensor_model_parallel_size) with gpt-oss "
            f"({where}): each rank would add an expert's whole bias to its part of the output; set it to 1, and "
            "expert_model_parallel_size above 1"
        )
    fused = config.model.transformer_impl == "transformer_engine"
    if fused and cp > 1 and parallel.cp_comm_type != "a2a":
        yield (
            f"parallel.cp_comm_type={parallel.cp_comm_type} with gpt-oss ({where}): of Transformer Engine's ways to "
            "exchange between context-parallel ranks only a2a has attention sinks; set cp_comm_type=a2a"
        )
    if config.fp8 is not None:
        yield f"fp8 with gpt-oss ({where}) is not supported; remove the section fp8"


def engine_sink_problems(architecture: Architecture, where: str, key: str, engine: EngineSizeConfig) -> Iterator[str]:
    """Yield the broken rules of an engine, whose section of the configuration is `key`."""
    tp, pp = engine.tensor_parallel_size, engine.pipeline_parallel_size
    heads, width = architecture.num_key_value_heads, architecture.moe_intermediate_size
    if heads % tp:
        yield (
            f"{where}: num_key_value_heads={heads} must be a multiple of {key}.tensor_parallel_size={tp}, because vLLM "
            f"does not share the heads of gpt-oss; choose a size that divides {heads}"
        )
    if width % (tp * pp):
        yield (
            f"{where}: intermediate_size={width} must be a multiple of {key}.tensor_parallel_size={tp} x "
            f"pipeline_parallel_size={pp}, by which vLLM checks gpt-oss; choose sizes whose product divides {width}"
        )
