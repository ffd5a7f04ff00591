"""Parameters of each rank of a layout by Megatron's rules, without starting processes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from megatron_bapo.config.architecture import FAMILIES, Architecture
from megatron_bapo.config.pipeline_layers import stage_layers
from megatron_bapo.config.schema import ParallelConfig
from megatron_bapo.model.hf_mapping import global_name
from megatron_bapo.model.hf_table import TABLE, Table
from megatron_bapo.parallel.groups import Axis, ParallelGroups
from megatron_bapo.parallel.megatron import parallel_state


def architecture(family: str, **changes: Any) -> Architecture:
    """Return a small model; those with experts have one dense layer among their four."""
    shape: dict[str, Any] = {
        "num_hidden_layers": 4,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 6,
        "vocab_size": 22,
        "max_position_embeddings": 64,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e4,
        "tie_word_embeddings": False,
    }
    if FAMILIES[family].experts:
        shape |= {
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 8,
            "norm_topk_prob": True,
            "moe_layers": frozenset({0, 2, 3}),
        }
    if FAMILIES[family].sigmoid_router:
        shape |= {"n_group": 2, "topk_group": 1, "routed_scaling_factor": 2.5, "partial_rotary_factor": 0.5}
    if FAMILIES[family].shared_expert:
        shape |= {"shared_expert_intermediate_size": 24}
    if FAMILIES[family].alternating_windows:
        shape |= {"moe_layers": frozenset(range(4)), "sliding_window": 3}
    if FAMILIES[family].gated_delta_net:
        shape |= {"linear_layers": frozenset({0, 1, 3}), "linear_num_key_heads": 8, "linear_num_value_heads": 16}
        shape |= {"linear_key_head_dim": 3, "linear_value_head_dim": 2, "linear_conv_kernel_dim": 4}
    if not FAMILIES[family].dense_layers:
        shape |= {"moe_layers": frozenset(range(4))}
    shape |= changes
    if FAMILIES[family].latent_attention:
        # With compressed queries, and in one family without.
        shape |= {"q_lora_rank": 12 * (family != "kimi_k2"), "kv_lora_rank": 10, "v_head_dim": 5}
        shape |= {"qk_nope_head_dim": 4, "qk_rope_head_dim": 2, "head_dim": 6}
        shape["num_key_value_heads"] = shape["num_attention_heads"]
    return Architecture(family=FAMILIES[family], **shape)


def groups_of(parallel: ParallelConfig, rank: int) -> ParallelGroups:
    """Position of one rank in the mesh, without process groups."""
    pp, tp = parallel.pipeline_model_parallel_size, parallel.tensor_model_parallel_size
    etp, ep = parallel.expert_tensor_parallel_size or tp, parallel.expert_model_parallel_size
    order = "tp-cp-ep-dp-pp"
    dense = parallel_state.RankGenerator(
        tp=tp, ep=1, dp=parallel.data_parallel_size, pp=pp, cp=parallel.context_parallel_size, order=order
    )
    expert = parallel_state.RankGenerator(
        tp=etp, ep=ep, dp=parallel.world_size // (etp * ep * pp), pp=pp, cp=1, order=order
    )

    def axis(generator: Any, token: str) -> Axis:
        ranks = next(group for group in generator.get_ranks(token) if rank in group)
        absent: Any = None
        return Axis(absent, ranks.index(rank), len(ranks))

    return ParallelGroups(
        tensor=axis(dense, "tp"),
        pipeline=axis(dense, "pp"),
        context=axis(dense, "cp"),
        data=axis(dense, "dp"),
        data_context=axis(dense, "dp-cp"),
        expert=axis(expert, "ep"),
        expert_tensor=axis(expert, "tp"),
        expert_data=axis(expert, "dp"),
        num_virtual_stages=parallel.virtual_pipeline_model_parallel_size,
    )


def parameter_shapes(
    arch: Architecture, parallel: ParallelConfig, groups: ParallelGroups, *, transformer_engine: bool = False
) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Return (global name, shape) of every parameter of one rank, in Megatron's order of chunks, layers and modules."""
    num_chunks, stage = groups.num_virtual_stages, groups.pipeline
    layers = stage_layers(arch, parallel, stage.rank)
    tp, hidden = groups.tensor.size, arch.hidden_size
    vocab = (arch.padded_vocab_size(tp) // tp, hidden)
    for chunk in range(num_chunks):
        offset = layers[chunk].start
        if groups.is_first_stage and chunk == 0:
            yield "embedding.word_embeddings.weight", vocab
        for layer in range(len(layers[chunk])):
            for name, shape in _layer(arch, groups, offset + layer, transformer_engine):
                experts_per_rank = arch.num_experts // groups.expert.size
                yield (
                    global_name(f"decoder.layers.{layer}.{name}", offset, groups.expert.rank * experts_per_rank),
                    shape,
                )
        if groups.is_last_stage and chunk == num_chunks - 1:
            yield "decoder.final_layernorm.weight", (hidden,)
            if not arch.tie_word_embeddings or parallel.pipeline_model_parallel_size > 1:
                yield "output_layer.weight", vocab


def _layer(
    arch: Architecture, groups: ParallelGroups, layer: int, transformer_engine: bool
) -> Iterator[tuple[str, tuple[int, ...]]]:
    tp, etp, hidden, fused = groups.tensor.size, groups.expert_tensor.size, arch.hidden_size, transformer_engine
    has_experts, has_delta_net = layer in arch.moe_layers, layer in arch.linear_layers
    if not fused or arch.kv_lora_rank or has_delta_net:
        yield "input_layernorm.weight", (hidden,)
    attention = _latent_attention if arch.kv_lora_rank else _grouped_attention
    if has_delta_net:
        attention = _delta_net
    yield from ((f"self_attention.{name}", shape) for name, shape in attention(arch, tp, fused))
    if has_experts or not fused:
        yield "pre_mlp_layernorm.weight", (hidden,)
    if not has_experts:
        if fused:
            yield "mlp.linear_fc1.layer_norm_weight", (hidden,)
        yield "mlp.linear_fc1.weight", (2 * arch.intermediate_size // tp, hidden)
        yield "mlp.linear_fc2.weight", (hidden, arch.intermediate_size // tp)
        return
    yield "mlp.router.weight", (arch.num_experts, hidden)
    if arch.family.linear_biases:
        yield "mlp.router.bias", (arch.num_experts,)
    if arch.family.sigmoid_router:
        yield "mlp.router.expert_bias", (arch.num_experts,)
    shapes: dict[str, tuple[int, ...]] = {
        "linear_fc1.weight": (2 * arch.moe_intermediate_size // etp, hidden),
        "linear_fc2.weight": (hidden, arch.moe_intermediate_size // etp),
    }
    if arch.family.linear_biases:
        shapes |= {"linear_fc1.bias": (2 * arch.moe_intermediate_size // etp,), "linear_fc2.bias": (hidden,)}
    experts = range(arch.num_experts // groups.expert.size)
    if fused:
        yield from ((f"mlp.experts.{name}{e}", shape) for name, shape in shapes.items() for e in experts)
    else:
        yield from ((f"mlp.experts.local_experts.{e}.{name}", shape) for e in experts for name, shape in shapes.items())
    if width := arch.shared_expert_intermediate_size:
        if arch.family.shared_expert_gate:
            yield "mlp.shared_experts.gate_weight", (1, hidden)
        yield "mlp.shared_experts.linear_fc1.weight", (2 * width // tp, hidden)
        yield "mlp.shared_experts.linear_fc2.weight", (hidden, width // tp)


def _grouped_attention(arch: Architecture, tp: int, fused: bool) -> Iterator[tuple[str, tuple[int, ...]]]:
    hidden, d = arch.hidden_size, arch.head_dim
    qkv = (arch.num_attention_heads * (1 + arch.family.output_gate) + 2 * arch.num_key_value_heads) * d // tp
    if arch.family.attention_sinks:
        yield f"core_attention.{'attention.' * fused}softmax_offset", (arch.num_attention_heads // tp,)
    yield "linear_proj.weight", (hidden, arch.num_attention_heads * d // tp)
    if arch.family.linear_biases:
        yield "linear_proj.bias", (hidden,)
    if fused:
        yield "linear_qkv.layer_norm_weight", (hidden,)
    yield "linear_qkv.weight", (qkv, hidden)
    if arch.family.qkv_bias:
        yield "linear_qkv.bias", (qkv,)
    if arch.family.qk_norm:
        yield "q_layernorm.weight", (d,)
        yield "k_layernorm.weight", (d,)


def _delta_net(arch: Architecture, tp: int, _fused: bool) -> Iterator[tuple[str, tuple[int, ...]]]:
    key_heads, heads = arch.linear_num_key_heads // tp, arch.linear_num_value_heads // tp
    keys, values = key_heads * arch.linear_key_head_dim, heads * arch.linear_value_head_dim
    yield "conv1d", (2 * keys + values, 1, arch.linear_conv_kernel_dim)
    yield "dt_bias", (heads,)
    yield "A_log", (heads,)
    yield "norm", (arch.linear_value_head_dim,)
    yield "in_proj.weight", (2 * (keys + values + heads), arch.hidden_size)
    yield "out_proj.weight", (arch.hidden_size, values)


def _latent_attention(arch: Architecture, tp: int, fused: bool) -> Iterator[tuple[str, tuple[int, ...]]]:
    heads, hidden, q_rank, kv_rank = arch.num_attention_heads // tp, arch.hidden_size, arch.q_lora_rank, 10
    yield "linear_proj.weight", (hidden, heads * 5)
    if q_rank:
        yield "linear_q_down_proj.weight", (q_rank, hidden)
        if fused:
            yield "linear_q_up_proj.layer_norm_weight", (q_rank,)
        yield "linear_q_up_proj.weight", (heads * 6, q_rank)
    else:
        yield "linear_q_proj.weight", (heads * 6, hidden)
    yield "linear_kv_down_proj.weight", (kv_rank + 2, hidden)
    if fused:
        yield "linear_kv_up_proj.layer_norm_weight", (kv_rank,)
    yield "linear_kv_up_proj.weight", (heads * (4 + 5), kv_rank)
    if not fused:
        if q_rank:
            yield "q_layernorm.weight", (q_rank,)
        yield "kv_layernorm.weight", (kv_rank,)


@dataclass(frozen=True)
class Shard:
    """One rank's part of a model, with the interface that import and export use."""

    architecture: Architecture
    parameters: dict[str, torch.nn.Parameter]
    table: Table = TABLE
    chunks: tuple[()] = ()
    """Replacement for a DDP chunk; without optimizer shards there is nothing to gather before an export."""

    def named_parameters(self) -> Iterator[tuple[str, torch.nn.Parameter]]:
        yield from self.parameters.items()


def empty_shard(
    arch: Architecture, parallel: ParallelConfig, rank: int, *, transformer_engine: bool = False
) -> tuple[Shard, ParallelGroups]:
    """Return the parameters of a rank, filled with NaN."""
    groups = groups_of(parallel, rank)
    shapes = parameter_shapes(arch, parallel, groups, transformer_engine=transformer_engine)
    return Shard(arch, {name: torch.nn.Parameter(torch.full(shape, torch.nan)) for name, shape in shapes}), groups
