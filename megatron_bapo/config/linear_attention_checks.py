"""Rules of models whose layers are mostly a Gated DeltaNet (Qwen3-Next, Qwen3.5)."""

from __future__ import annotations

from collections.abc import Iterator

from megatron_bapo.config.architecture import Architecture
from megatron_bapo.config.pipeline_layers import engine_stage
from megatron_bapo.config.rollout import EngineSizeConfig
from megatron_bapo.config.schema import Config, ParallelConfig

_CPU_HEAD_WIDTHS = (64, 128)
"""Widths of keys and values for which vLLM's kernels for CPUs are built."""
_CPU_CONVOLUTION = 4
"""Tokens of the convolution for which they are built."""


def policy_linear_problems(config: Config, where: str) -> Iterator[str]:
    """Yield the broken rules of the policy; `where` names the source of its architecture."""
    if config.model.lora is not None:
        yield (
            f"model.lora with Gated DeltaNets ({where}): neither the trainer nor its engines have adapters of them; "
            "remove the section, which trains all weights"
        )
    if (quantization := config.rollout.quantization) is not None:
        yield f"rollout.quantization={quantization} with Gated DeltaNets ({where}) is not supported; remove it"
    if (replay := config.algorithm.routing_replay) != "none":
        yield f"algorithm.routing_replay={replay} with Gated DeltaNets ({where}) is not supported; set it to none"


def trainer_linear_problems(
    config: Config, parallel: ParallelConfig, architecture: Architecture, where: str
) -> Iterator[str]:
    """Yield the broken rules of a model that the trainer runs."""
    heads, tp, cp = (
        architecture.linear_num_key_heads,
        parallel.tensor_model_parallel_size,
        parallel.context_parallel_size,
    )
    if heads % (tp * cp):
        yield (
            f"{where}: linear_num_key_heads={heads} must be a multiple of parallel.tensor_model_parallel_size={tp} x "
            f"context_parallel_size={cp}, whose ranks share the heads; choose sizes whose product divides {heads}"
        )
    if config.fp8 is not None:
        yield f"fp8 with Gated DeltaNets ({where}) is not supported; remove the section fp8"


def engine_linear_problems(
    config: Config, architecture: Architecture, where: str, key: str, engine: EngineSizeConfig
) -> Iterator[str]:
    """Yield the broken rules of an engine, whose section of the configuration is `key`."""
    tp, pp, heads = engine.tensor_parallel_size, engine.pipeline_parallel_size, architecture.linear_num_key_heads
    if config.rollout.batch_invariant:
        yield (
            f"rollout.batch_invariant=true with Gated DeltaNets ({where}), for which vLLM has no batch-invariant "
            "kernels; remove it"
        )
    if heads % tp:
        yield (
            f"{where}: linear_num_key_heads={heads} must be a multiple of {key}.tensor_parallel_size={tp}, which "
            f"splits it; choose a size that divides {heads}"
        )
    num_layers = architecture.num_hidden_layers
    needed = {"a layer of full attention": frozenset(range(num_layers)) - architecture.linear_layers}
    if architecture.family.grouped_projections:
        needed["a layer with experts"] = architecture.moe_layers
    for name, layers in needed.items():
        stages = {engine_stage(layer, num_layers, pp) for layer in layers}
        if lacking := sorted(set(range(pp)) - stages):
            yield (
                f"{where}: vLLM needs {name} on every pipeline stage of an engine, and with {key}."
                f"pipeline_parallel_size={pp} there is none on stage {lacking[0]}, counted from 0; choose fewer stages"
            )


def cpu_engine_problems(architecture: Architecture, dtype: str, where: str, *, torchvision: bool) -> Iterator[str]:
    """Yield what keeps an engine on a CPU from computing the model in `dtype`; `where` names the architecture's source.

    `torchvision` says whether it is installed. Sources: vLLM 0.32, vllm/model_executor/layers/mamba/ops/cpu/
    gdn_attention.py and causal_conv1d.py, csrc/cpu/sgl-kernels (`chunk_gated_delta_rule_cpu`), and models/qwen3_5.py.
    """
    gpu = "or generate on a GPU"
    if dtype != "bfloat16":
        yield (
            f"model.dtype={dtype} with Gated DeltaNets ({where}): on CPUs, vLLM computes them only in bfloat16; set "
            f"model.dtype=bfloat16, {gpu}"
        )
    key, value = architecture.linear_key_head_dim, architecture.linear_value_head_dim
    if key != value or key not in _CPU_HEAD_WIDTHS:
        widths = " or ".join(map(str, _CPU_HEAD_WIDTHS))
        yield (
            f"{where}: linear_key_head_dim={key} and linear_value_head_dim={value} must be equal, and {widths}, for "
            f"vLLM's kernels for CPUs; use another model, {gpu}"
        )
    if (kernel := architecture.linear_conv_kernel_dim) != _CPU_CONVOLUTION:
        yield (
            f"{where}: linear_conv_kernel_dim={kernel} must be {_CPU_CONVOLUTION} for vLLM's kernels for CPUs; use "
            f"another model, {gpu}"
        )
    if not (architecture.family.grouped_projections or torchvision):
        yield (
            f"{where}: vLLM imports torchvision with Qwen3.5, and it is not installed; install a build of torchvision "
            f"for the installed torch, {gpu} (requirements.txt has it), or use Qwen3-Next"
        )
