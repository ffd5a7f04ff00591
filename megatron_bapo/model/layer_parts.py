"""Which layers of which models have a parameter, for the table of `hf_mapping.py`."""

from __future__ import annotations

from megatron_bapo.config.architecture import Architecture


def is_dense(arch: Architecture, layer: int) -> bool:
    return layer not in arch.moe_layers


def has_experts(arch: Architecture, layer: int) -> bool:
    return layer in arch.moe_layers


def has_router_bias(arch: Architecture, layer: int) -> bool:
    return arch.family.sigmoid_router and layer in arch.moe_layers


def has_router(name: str, arch: Architecture, layer: int) -> bool:
    return arch.family.router == name and layer in arch.moe_layers


def has_linear_biases(arch: Architecture, _: int) -> bool:
    return arch.family.linear_biases


def has_expert_biases(arch: Architecture, layer: int) -> bool:
    return arch.family.linear_biases and layer in arch.moe_layers


def has_sinks(arch: Architecture, _: int) -> bool:
    return arch.family.attention_sinks


def has_shared_expert(name: str, arch: Architecture, layer: int) -> bool:
    return arch.family.shared_expert == name and layer in arch.moe_layers


def has_attention(arch: Architecture, layer: int) -> bool:
    return layer not in arch.linear_layers


def has_delta_net(arch: Architecture, layer: int) -> bool:
    return layer in arch.linear_layers


def has_grouped_projections(arch: Architecture, layer: int) -> bool:
    return layer in arch.linear_layers and arch.family.grouped_projections


def has_separate_projections(arch: Architecture, layer: int) -> bool:
    return layer in arch.linear_layers and not arch.family.grouped_projections


def has_qk_norm(arch: Architecture, layer: int) -> bool:
    return arch.family.qk_norm and has_attention(arch, layer)


def has_latent_attention(arch: Architecture, _: int) -> bool:
    return arch.family.latent_attention


def has_grouped_attention(arch: Architecture, layer: int) -> bool:
    return not arch.family.latent_attention and has_attention(arch, layer)


def has_compressed_queries(arch: Architecture, _: int) -> bool:
    return arch.q_lora_rank > 0


def has_latent_queries_of_hidden(arch: Architecture, _: int) -> bool:
    return arch.family.latent_attention and not arch.q_lora_rank


def has_qkv_bias(arch: Architecture, _: int) -> bool:
    return arch.family.qkv_bias


def has_own_output(arch: Architecture, _: int) -> bool:
    return not arch.tie_word_embeddings
