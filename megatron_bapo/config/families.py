"""Supported model families and how they differ."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Family:
    """Differences of a model family from a plain pre-norm RMSNorm/SwiGLU/RoPE decoder."""

    qkv_bias: bool = False
    qk_norm: bool = False
    experts: bool = False
    dense_layers: bool = True
    """Whether layers may have a plain MLP in a model with experts."""
    shared_expert: str | None = None
    """Name, in the tensors' names, of the expert that every token passes; None: the family has none."""
    shared_expert_gate: bool = False
    """Whether each token weights the output of the shared expert by the sigmoid of a gate."""
    default_norm_topk_prob: bool = False
    """Whether the weights of the selected experts are divided by their sum if config.json does not say it."""
    reads_norm_topk_prob: bool = True
    """Whether transformers reads that from config.json."""
    sigmoid_router: bool = False
    """Whether the router scores experts by sigmoids, and chooses among them with a bias, instead of by a softmax."""
    latent_attention: bool = False
    """Whether keys and values are computed from one narrow vector per token (multi-head latent attention)."""
    partial_rotary_factor: float = 1.0
    """Share of a head's dimensions that RoPE rotates if config.json has none."""
    ties_embeddings: bool = True
    """Whether vLLM can serve a model whose output layer is the embedding."""
    expert_field: str = "num_experts"
    """Field of config.json with the number of experts of a layer."""
    own_fields: frozenset[str] = frozenset()
    """Fields that this family reads, and that must not change other families."""
    default_sliding_window: int | None = None
    """Window of the attention in transformers and vLLM if config.json has no `sliding_window`; None: there is none."""
    null_key_value_heads: bool = True
    """Whether transformers reads a `num_key_value_heads` of null; every head then has its own key and value."""
    linear_biases: bool = False
    """Whether the attention's output, the router and the experts have biases, as its queries, keys and values."""
    attention_sinks: bool = False
    """Whether each head has a learned logit that takes part in the softmax over the keys and has no value."""
    alternating_windows: bool = False
    """Whether the first, third, ... layer attends only to the last `sliding_window` tokens."""
    clamped_swiglu: bool = False
    """Whether experts compute gate * sigmoid(1.702 gate) * (up + 1) of values that are clamped to 7."""
    stacked_experts: bool = False
    """Whether files have one tensor for all experts of a layer, transposed, with gate and up in alternating columns."""
    gated_delta_net: bool = False
    """Whether most layers are a Gated DeltaNet (arXiv 2412.06464) instead of attention."""
    grouped_projections: bool = False
    """Whether files have the projections of a Gated DeltaNet's key head and its value heads next to each other."""
    output_gate: bool = False
    """Whether the sigmoid of a gate, computed as the queries are, weights the output of attention."""
    zero_centered_norms: bool = False
    """Whether norms multiply by one plus their weight, except that of a Gated DeltaNet."""
    router: str = "gate"
    """Name, in the tensors' names, of the router."""
    default_head_dim: int | None = None
    """Width of a head if config.json has none, as in transformers; None: hidden_size / num_attention_heads."""


_DEEPSEEK_V3 = Family(
    experts=True,
    shared_expert="shared_experts",
    default_norm_topk_prob=True,
    sigmoid_router=True,
    latent_attention=True,
    ties_embeddings=False,
    expert_field="n_routed_experts",
    own_fields=frozenset({"n_shared_experts", "num_nextn_predict_layers", "scoring_func", "topk_method"}),
)

_QWEN_FIELDS = frozenset({"sliding_window"})
"""Qwen's models have a sliding window only with `use_sliding_window`."""

_QWEN3_5 = Family(
    qk_norm=True,
    gated_delta_net=True,
    output_gate=True,
    zero_centered_norms=True,
    partial_rotary_factor=0.25,
    null_key_value_heads=False,
    default_head_dim=256,
    own_fields=frozenset({"partial_rotary_factor"}),
)
_SHARED_EXPERT = {
    "experts": True,
    "shared_expert": "shared_expert",
    "shared_expert_gate": True,
    "default_norm_topk_prob": True,
    "own_fields": _QWEN3_5.own_fields | {"shared_expert_intermediate_size"},
}

FAMILIES = {
    "llama": Family(),
    "mistral": Family(
        default_sliding_window=4096, null_key_value_heads=False, own_fields=frozenset({"sliding_window"})
    ),
    "seed_oss": Family(
        qkv_bias=True,
        default_head_dim=128,
        own_fields=frozenset({"attention_bias", "attention_dropout", "residual_dropout"}),
    ),
    "qwen2": Family(qkv_bias=True, own_fields=_QWEN_FIELDS),
    "qwen3": Family(qk_norm=True, default_head_dim=128, own_fields=_QWEN_FIELDS),
    "qwen3_moe": Family(qk_norm=True, experts=True, null_key_value_heads=False, own_fields=_QWEN_FIELDS),
    "qwen2_moe": Family(
        qkv_bias=True,
        experts=True,
        shared_expert="shared_expert",
        shared_expert_gate=True,
        own_fields=_QWEN_FIELDS | {"shared_expert_intermediate_size"},
    ),
    "qwen3_next": replace(_QWEN3_5, **_SHARED_EXPERT, grouped_projections=True, ties_embeddings=False),
    "qwen3_5_text": _QWEN3_5,
    "qwen3_5_moe_text": replace(_QWEN3_5, **_SHARED_EXPERT, dense_layers=False, reads_norm_topk_prob=False),
    "glm4_moe": Family(
        experts=True,
        shared_expert="shared_experts",
        default_norm_topk_prob=True,
        sigmoid_router=True,
        partial_rotary_factor=0.5,
        null_key_value_heads=False,
        ties_embeddings=False,
        expert_field="n_routed_experts",
        own_fields=frozenset(
            {
                *("attention_bias", "use_qk_norm", "partial_rotary_factor", "n_shared_experts"),
                "num_nextn_predict_layers",
            }
        ),
    ),
    "gpt_oss": Family(
        qkv_bias=True,
        linear_biases=True,
        experts=True,
        attention_sinks=True,
        alternating_windows=True,
        clamped_swiglu=True,
        stacked_experts=True,
        router="router",
        ties_embeddings=False,
        null_key_value_heads=False,
        default_head_dim=64,
        expert_field="num_local_experts",
        own_fields=frozenset({"attention_bias", "sliding_window", "quantization_config"}),
    ),
    "deepseek_v3": _DEEPSEEK_V3,
    "kimi_k2": _DEEPSEEK_V3,
    "glm4_moe_lite": replace(
        _DEEPSEEK_V3, own_fields=frozenset({"n_shared_experts", "num_nextn_predict_layers", "mlp_layer_types"})
    ),
}

MULTIMODAL = ("qwen3_5", "qwen3_5_moe")
"""Types of models whose language model is of a supported family."""
