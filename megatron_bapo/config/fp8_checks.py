"""Rules of Transformer Engine layers and of FP8."""

from __future__ import annotations

from collections.abc import Iterator

from megatron_bapo.config.architecture import Architecture
from megatron_bapo.config.schema import Config


def transformer_engine_problems(config: Config) -> Iterator[str]:
    """Yield the broken rules that do not depend on the architecture, one line each."""
    is_engine = config.model.transformer_impl == "transformer_engine"
    if is_engine and config.model.dtype == "float32":
        yield (
            "model.transformer_impl=transformer_engine with model.dtype=float32: its fused attention needs bfloat16; "
            "set dtype=bfloat16, or transformer_impl=local"
        )
    if not is_engine and config.parallel.cp_comm_type != "p2p":
        yield (
            f"parallel.cp_comm_type={config.parallel.cp_comm_type} with model.transformer_impl=local, which always "
            "all-gathers keys and values; remove it, or set transformer_impl=transformer_engine"
        )
    if config.fp8 is not None:
        yield from _fp8_problems(config)


def _fp8_problems(config: Config) -> Iterator[str]:
    fp8 = config.fp8
    assert fp8 is not None
    if config.model.transformer_impl != "transformer_engine":
        yield (
            f"fp8.recipe={fp8.recipe} with model.transformer_impl={config.model.transformer_impl}: only Transformer "
            "Engine computes in FP8; set transformer_impl=transformer_engine, or remove the section fp8"
        )
    if config.model.dtype != "bfloat16":
        yield (
            f"fp8.recipe={fp8.recipe} with model.dtype={config.model.dtype}: everything outside FP8 must be in "
            "bfloat16; set model.dtype=bfloat16"
        )
    if fp8.recipe == "delayed" and fp8.first_last_layers_bf16:
        yield (
            "fp8.first_last_layers_bf16=true with fp8.recipe=delayed, whose scales are reduced once for all layers "
            "together; set recipe=tensorwise or blockwise, or first_last_layers_bf16=false"
        )
    if fp8.uses_delayed_scaling and config.algorithm.clip_bounds.method == "speculate":
        yield (
            f"algorithm.clip_bounds.method=speculate with fp8.recipe={fp8.recipe}: its scales depend on past training "
            "passes, so a pass that is repeated with other bounds would differ from that of method=score; set "
            "method=score, or recipe=tensorwise or blockwise"
        )
    if config.optimizer.cpu_offload and fp8.recipe != "delayed":
        yield (
            f"optimizer.cpu_offload=true with fp8.recipe={fp8.recipe}: Megatron's offloaded optimizer supports only "
            "recipe=delayed; set fp8.recipe=delayed, or cpu_offload=false"
        )
    if fp8.param:
        yield from _parameter_problems(config)


def _parameter_problems(config: Config) -> Iterator[str]:
    """Yield the broken rules of weights that are kept in FP8, which have no bfloat16 storage."""
    fp8 = config.fp8
    assert fp8 is not None
    if not config.parallel.use_distributed_optimizer:
        yield (
            "fp8.param=true with parallel.use_distributed_optimizer=false: only the distributed optimizer keeps their "
            "fp32 values; set use_distributed_optimizer=true, or param=false"
        )
    if fp8.uses_delayed_scaling:
        yield (
            f"fp8.param=true with fp8.recipe={fp8.recipe}: weights that are loaded, at the start or on resume, would "
            "be rounded with scale 1, because checkpoints do not contain the scales; set recipe=tensorwise or "
            "blockwise, or param=false"
        )
    if fp8.recipe == "mxfp8":
        yield (
            "fp8.param=true with fp8.recipe=mxfp8 is not supported: its weights have two quantized copies, which "
            "Megatron gathers through the gradient buffer; set param=false"
        )
    if config.trainer.offload:
        yield (
            "fp8.param=true with trainer.offload=true: only unquantized tensors can be offloaded; set one of the two "
            "to false"
        )
    if config.weight_sync.transport == "cuda_ipc":
        yield (
            "fp8.param=true with weight_sync.transport=cuda_ipc: engines would read bfloat16 parameters, which the "
            "trainer then does not have; set transport=store or nccl, or param=false"
        )


def transformer_engine_shape_problems(config: Config, architecture: Architecture, where: str) -> Iterator[str]:
    """Yield the broken rules that depend on the architecture; `where` names its source in messages."""
    parallel = config.parallel
    tp, cp = parallel.tensor_model_parallel_size, parallel.context_parallel_size
    if parallel.cp_comm_type == "a2a" and cp > 1:
        for name in ("num_attention_heads", "num_key_value_heads"):
            heads = getattr(architecture, name)
            if heads % (tp * cp):
                yield (
                    f"parallel.cp_comm_type=a2a splits heads over context-parallel ranks: {name}={heads} ({where}) "
                    f"must be a multiple of tensor_model_parallel_size={tp} x context_parallel_size={cp}; set "
                    "cp_comm_type=p2p or all_gather"
                )
    if config.fp8 is not None:
        yield from _fp8_shape_problems(config, architecture, where)


def _fp8_shape_problems(config: Config, architecture: Architecture, where: str) -> Iterator[str]:
    fp8, parallel, arch = config.fp8, config.parallel, architecture
    assert fp8 is not None
    if arch.kv_lora_rank:
        yield f"fp8 with latent attention ({where}) is not supported; remove the section fp8"
    tp, etp = parallel.tensor_model_parallel_size, parallel.expert_tensor_parallel_size
    widths = {
        "hidden_size": (arch.hidden_size, 1),
        "num_attention_heads x head_dim": (arch.num_attention_heads * arch.head_dim, tp),
        "(num_attention_heads + 2 num_key_value_heads) x head_dim": (
            (arch.num_attention_heads + 2 * arch.num_key_value_heads) * arch.head_dim,
            tp,
        ),
    }
    if arch.has_dense_layers:
        widths["intermediate_size"] = (arch.intermediate_size, tp)
    if arch.moe_layers:
        widths["moe_intermediate_size"] = (arch.moe_intermediate_size, etp or tp)
        widths["shared_expert_intermediate_size"] = (arch.shared_expert_intermediate_size, tp)
    for name, (width, size) in widths.items():
        if width % (size * fp8.weight_multiple):
            split = f" / {size} tensor-parallel ranks" if size > 1 else ""
            yield (
                f"fp8.recipe={fp8.recipe}{' with fp8.param=true' * fp8.param}: {name}={width}{split} ({where}) must be "
                f"a multiple of {fp8.weight_multiple}; "
                + ("set param=false, lower the tensor parallelism" if fp8.param else "lower the tensor parallelism")
                + ", or remove the section fp8"
            )
    per_stage = arch.num_hidden_layers // parallel.pipeline_model_parallel_size
    for side, number in zip(("start", "end"), fp8.num_bf16_layers, strict=True):
        if number > per_stage:
            yield (
                f"fp8.num_layers_at_{side}_in_bf16={number} must not exceed the {per_stage} layers of a pipeline "
                "stage in an even division; lower it"
            )
