"""Checks of the fields of a model's `config.json`."""

from __future__ import annotations

import reprlib
from collections.abc import Iterator
from typing import Any

from megatron_bapo.config.families import FAMILIES, Family
from megatron_bapo.config.field_values import expected, is_number, size_problems
from megatron_bapo.config.linear_attention_fields import LINEAR_ROPE_KEYS, linear_attention_problems

_SUPPORTED_VALUES: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu",),
    "mlp_bias": (False, None),
    "attention_bias": (False, None),
    "attention_out_bias": (False, None),
    "bias": (False, None),
    "attention_dropout": (0, None),
    "residual_dropout": (0, None),
    "use_sliding_window": (False, None),
    "sliding_window": (None, 0),
    "dual_chunk_attention_config": (None,),
    "llama_4_scaling": (None,),
    "ada_rms_norm_t_cond": (False, None),
    "is_causal": (True,),
    "logit_scale": (1,),
    "partial_rotary_factor": (1, None),
    "use_mrope": (False, None),
    "shared_expert_intermediate_size": (0, None),
    "n_shared_experts": (0, None),
    "num_shared_experts": (0, None),
    "num_nextn_predict_layers": (0, None),
    "rope_interleave": (True, None),
    "moe_layer_freq": (1, None),
    "quantization_config": (None,),
    "compression_config": (None,),
}
"""Supported values of fields whose other values change the model; the first one is the default.

vLLM reads some of them, such as `sliding_window` and `bias`, from every config.json, and transformers only for some
families.
"""

_ROPE_KEYS = {
    "default": ((), ()),
    "linear": (("factor",), ()),
    "llama3": (("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"), ()),
    "yarn": (
        ("factor", "original_max_position_embeddings"),
        ("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"),
    ),
}
"""Required and optional keys of each RoPE type, as in transformers' modeling_rope_utils."""

_KINDS: dict[str, tuple[type, str]] = {
    "model_type": (str, "text"),
    "layer_types": (list, "a list"),
    "mlp_only_layers": (list, "a list"),
    "mlp_layer_types": (list, "a list"),
    "rope_scaling": (dict, "an object"),
    "rope_parameters": (dict, "an object"),
}
"""Type of each field that is not a number, with its name in messages."""

SIZES = (
    *("num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads"),
    *("vocab_size", "max_position_embeddings"),
)
LATENT_SIZES = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
EXPERT_SIZES = ("num_experts", "num_experts_per_tok", "moe_intermediate_size")
_OPTIONAL_SIZES = ("head_dim", "num_nextn_predict_layers")
SIGMOID_ROUTER_DEFAULTS = {
    "n_group": 1,
    "topk_group": 1,
    "routed_scaling_factor": 1.0,
    "first_k_dense_replace": 1,
}
"""Values of missing fields, as in transformers' configuration of GLM-4.5."""
_LATENT_ROPE_KEYS = {
    "default": ((), ()),
    "yarn": (
        ("factor", "original_max_position_embeddings", "mscale", "mscale_all_dim"),
        ("beta_fast", "beta_slow"),
    ),
}
"""Those of latent attention: transformers and vLLM read other keys, or a missing scale, differently."""
_VLLM_VALUES = {
    "attention_bias": True,
    "rms_norm_eps": 1e-5,
    "swiglu_alpha": 1.702,
    "swiglu_limit": 7.0,
}
"""Values of gpt-oss that vLLM's model has whatever config.json says; the published models have them."""
_WINDOW_ROPE_KEYS = {"yarn": (("factor", "original_max_position_embeddings", "beta_fast", "beta_slow"), ("truncate",))}
"""Those of gpt-oss: vLLM always computes YaRN, and reads no other keys."""
_ROUTER_VALUES = {"scoring_func": "sigmoid", "topk_method": "noaux_tc"}
"""Fields by which vLLM chooses the router of a latent-attention model; transformers knows only this one."""
_GROUP_SCORE_EXPERTS = 2
"""Experts of a group whose scores are added up to choose groups, as in DeepSeek-V3."""


def rope_settings(fields: dict[str, Any]) -> dict[str, Any]:
    """Return the RoPE settings, which transformers 5 and earlier versions name differently."""
    return fields.get("rope_scaling") or fields.get("rope_parameters") or {}


def rope_type(rope: dict[str, Any]) -> str:
    return rope.get("rope_type") or rope.get("type") or "default"


def rope_parameters(rope: dict[str, Any]) -> dict[str, Any]:
    """Return the settings that are specific to the RoPE type."""
    common = ("rope_type", "type", "rope_theta", "partial_rotary_factor")
    return {name: value for name, value in rope.items() if value is not None and name not in common}


def partial_rotary_factor(fields: dict[str, Any]) -> float:
    """Return the share of a head's dimensions that RoPE rotates, which transformers 5 writes to the RoPE settings."""
    default = FAMILIES[fields["model_type"]].partial_rotary_factor
    return rope_settings(fields).get("partial_rotary_factor") or fields.get("partial_rotary_factor") or default


def has_qkv_bias(fields: dict[str, Any]) -> bool:
    """Return whether queries, keys and values have biases, which some families read from config.json."""
    family = FAMILIES[fields["model_type"]]
    is_read = "attention_bias" in family.own_fields
    return bool(fields.get("attention_bias", family.qkv_bias)) if is_read else family.qkv_bias


def field_problems(fields: dict[str, Any]) -> Iterator[str]:
    """Yield every missing field and every unsupported value, one line each."""
    family = FAMILIES[fields["model_type"]]
    yield from size_problems(fields, SIZES)
    if family.experts:
        yield from _expert_problems(fields)
    if family.latent_attention:
        yield from _latent_attention_problems(fields)
    elif _is_multi_head(fields):
        pass  # every attention head has its own key/value head
    else:
        yield from size_problems(fields, ("num_key_value_heads",))
    yield from size_problems(fields, [name for name in _OPTIONAL_SIZES if fields.get(name)])
    if family.default_head_dim is not None and fields.get("head_dim", family.default_head_dim) is None:
        yield f"head_dim is None, which transformers does not read as a missing one, {family.default_head_dim}; give it"
    epsilon = fields.get("rms_norm_eps")
    if epsilon is None or not is_number(epsilon) or epsilon <= 0:
        yield expected("rms_norm_eps", epsilon, "a positive number")
    for name, supported in _supported_values(family).items():
        if name not in family.own_fields and fields.get(name, supported[0]) not in supported:
            value = reprlib.repr(fields[name])
            yield f"{name} is {value}, which the trainer does not support; it must be {supported[0]!r}"
    if family.default_sliding_window is not None:
        yield from _window_problems(fields, family.default_sliding_window)
    # Libraries differ in whether they read it.
    has_bias = has_qkv_bias(fields)
    if fields.get("qkv_bias") not in (None, has_bias):
        yield f"qkv_bias is {fields['qkv_bias']!r}, which the trainer does not support; it must be {has_bias}"
    if fields.get("tie_word_embeddings") and not family.ties_embeddings:
        yield (
            f"tie_word_embeddings is True, but vLLM serves {fields['model_type']} only with an output layer of its "
            "own; use a model in which it is False"
        )
    if family.alternating_windows:
        yield from _alternating_window_problems(fields)
    elif family.gated_delta_net:
        yield from linear_attention_problems(fields)
    else:
        for kind in sorted(set(map(str, fields.get("layer_types") or ())) - {"full_attention"}):
            yield f"layer_types has {kind!r}, which the trainer does not support; every layer must be 'full_attention'"
    yield from _rope_problems(fields)


def kind_problems(fields: dict[str, Any]) -> Iterator[str]:
    """Yield the fields of another type than expected, one line each."""
    for name, (kind, words) in _KINDS.items():
        if not isinstance(fields.get(name), kind | None):
            yield expected(name, fields[name], words)


def _is_multi_head(fields: dict[str, Any]) -> bool:
    """Whether config.json says by null, or Llama's by nothing, that every head has its own key and value."""
    family, name = FAMILIES[fields["model_type"]], "num_key_value_heads"
    return family.null_key_value_heads and fields.get(name) is None and (name in fields or family == FAMILIES["llama"])


def _window_problems(fields: dict[str, Any], default: int) -> Iterator[str]:
    """Yield what is wrong with the window of a family that has one unless config.json says null.

    0 is refused as well, because vLLM reads it as null and transformers as a window.
    """
    if "sliding_window" not in fields:
        yield (
            f"sliding_window is missing, and transformers and vLLM then use a window of {default} tokens, which the "
            "trainer does not support; use a model whose config.json has null there"
        )
    elif fields["sliding_window"] is not None:
        value = reprlib.repr(fields["sliding_window"])
        yield f"sliding_window is {value}, which the trainer does not support; it must be None"


def _alternating_window_problems(fields: dict[str, Any]) -> Iterator[str]:
    """Yield what is wrong with the fields of gpt-oss that vLLM's model does not read, and with its weights' format."""
    yield from size_problems(fields, ("sliding_window",))
    kinds, layers = fields.get("layer_types"), fields.get("num_hidden_layers")
    if kinds is not None and kinds != [("sliding_attention", "full_attention")[i % 2] for i in range(len(kinds))]:
        yield (
            f"layer_types is {reprlib.repr(kinds)}; it must be 'sliding_attention' and 'full_attention' in turn: "
            "vLLM computes the layers so whatever it says"
        )
    elif kinds is not None and len(kinds) != layers:
        yield f"layer_types has {len(kinds)} layers; it must have num_hidden_layers={layers}"
    for name, value in _VLLM_VALUES.items():
        if fields.get(name, value) != value:
            yield f"{name} is {fields[name]!r}, which vLLM does not read for {fields['model_type']}; it must be {value}"
    if (quantized := fields.get("quantization_config")) is not None:
        yield (
            f"quantization_config is {reprlib.repr(quantized)}: engines with such weights could not take those of the "
            "trainer; convert the folder to bfloat16 with tools/dequantize_mxfp4.py"
        )


def _expert_problems(fields: dict[str, Any]) -> Iterator[str]:
    family, sizes = FAMILIES[fields["model_type"]], [*EXPERT_SIZES, "decoder_sparse_step"]
    if fields["num_experts"] == 0 and not (family.sigmoid_router or family.stacked_experts):
        return  # The model is dense.
    if family.sigmoid_router:
        sizes += ["n_shared_experts", "n_group", "topk_group"]
    elif family.shared_expert is not None:
        sizes.append("shared_expert_intermediate_size")
    found = list(size_problems(fields, sizes))
    yield from found
    if found:
        return
    selected, experts = fields["num_experts_per_tok"], fields["num_experts"]
    if selected > experts:
        yield f"num_experts_per_tok is {selected}; it must not exceed {family.expert_field}={experts}"
    if selected == 1 and fields.get("norm_topk_prob"):
        yield (
            "norm_topk_prob is True with num_experts_per_tok=1, which leaves the router without a gradient; it must be "
            "False"
        )
    if family.sigmoid_router:
        yield from _sigmoid_router_problems(fields)


def _supported_values(family: Family) -> dict[str, tuple[Any, ...]]:
    """Return `_SUPPORTED_VALUES` with those that depend on the family, whose model no library changes by them."""
    values = _SUPPORTED_VALUES | {"use_qk_norm": (family.qk_norm, None)}
    return values if family.reads_norm_topk_prob else values | {"norm_topk_prob": (True,)}


def _sigmoid_router_problems(fields: dict[str, Any]) -> Iterator[str]:
    selected, groups, chosen = fields["num_experts_per_tok"], fields["n_group"], fields["topk_group"]
    if selected > 1 and not fields.get("norm_topk_prob"):
        yield (
            f"norm_topk_prob is {fields.get('norm_topk_prob')!r} with num_experts_per_tok={selected}, but Megatron's "
            "sigmoid router scales the weights of the selected experts to sum to one; it must be True"
        )
    scale, dense = fields.get("routed_scaling_factor"), fields.get("first_k_dense_replace")
    if scale is None or not is_number(scale) or scale <= 0:
        yield expected("routed_scaling_factor", scale, "a positive number")
    if not isinstance(dense, int) or isinstance(dense, bool) or dense < 0:
        yield expected("first_k_dense_replace", dense, "a whole number of at least 0")
    elif "mlp_layer_types" in FAMILIES[fields["model_type"]].own_fields:
        yield from _mlp_type_problems(fields)
    if fields["num_experts"] % groups or chosen > groups:
        yield (
            f"n_group is {groups} with n_routed_experts={fields['num_experts']} and topk_group={chosen}; it must "
            "divide the experts and be at least topk_group"
        )
    elif chosen < groups and selected // chosen != _GROUP_SCORE_EXPERTS:
        yield (
            f"topk_group is {chosen} of {groups} groups with num_experts_per_tok={selected}: Megatron scores a group "
            f"by its {selected // chosen} best experts, and the model by {_GROUP_SCORE_EXPERTS}; use a model whose "
            f"num_experts_per_tok is {_GROUP_SCORE_EXPERTS} times its topk_group"
        )


def _mlp_type_problems(fields: dict[str, Any]) -> Iterator[str]:
    """Yield a difference between the layers with experts of vLLM, by a number, and of transformers, by a list.

    Without a list transformers gives all but the first layer experts.
    """
    found, dense = fields.get("mlp_layer_types"), fields["first_k_dense_replace"]
    if found is None:
        same = dense == 1
    else:
        same = found == ["sparse" if layer >= dense else "dense" for layer in range(len(found))]
        same = same and len(found) == fields.get("num_hidden_layers")
    if not same:
        yield (
            f"mlp_layer_types is {reprlib.repr(found)} with first_k_dense_replace={dense}, of which transformers reads "
            "the first and vLLM the second; they must name the same layers"
        )


def _latent_attention_problems(fields: dict[str, Any]) -> Iterator[str]:
    yield from size_problems(fields, LATENT_SIZES)
    if fields.get("q_lora_rank") is not None:
        yield from size_problems(fields, ("q_lora_rank",))
    nope, rope, value = (fields.get(name) for name in LATENT_SIZES[1:])
    if isinstance(nope, int) and isinstance(rope, int) and isinstance(value, int) and value > nope + rope:
        yield (
            f"v_head_dim is {value}, which the trainer does not support; it must be at most qk_nope_head_dim + "
            f"qk_rope_head_dim = {nope + rope}"
        )
    heads = fields.get("num_attention_heads")
    if fields.get("num_key_value_heads") not in (None, heads):
        yield (
            f"num_key_value_heads is {fields['num_key_value_heads']!r}, but in latent attention every head has its "
            f"own key and value; it must be num_attention_heads={heads}"
        )
    own = FAMILIES[fields["model_type"]].own_fields
    for name, value in _ROUTER_VALUES.items():
        if name in own and fields.get(name) != value:
            yield f"{name} is {fields.get(name)!r}, which the trainer does not support; it must be {value!r}"


def _rope_problems(fields: dict[str, Any]) -> Iterator[str]:
    if fields.get("rope_scaling") and fields.get("rope_parameters"):
        yield "rope_scaling and rope_parameters are both given, but libraries differ in which one they read; keep one"
        return
    name = "rope_scaling" if fields.get("rope_scaling") else "rope_parameters"
    rope = rope_settings(fields)
    family = FAMILIES[fields["model_type"]]
    theta = rope.get("rope_theta") or fields.get("rope_theta") or 10000.0
    if not is_number(theta) or theta <= 0:
        yield expected("rope_theta", theta, "a positive number")
    keys = _WINDOW_ROPE_KEYS if family.alternating_windows else _ROPE_KEYS
    if family.latent_attention:
        keys = _LATENT_ROPE_KEYS
    if family.gated_delta_net:
        keys = LINEAR_ROPE_KEYS
    if family.alternating_windows and not (rope.get("rope_theta") or fields.get("rope_theta")):
        yield expected("rope_theta", None, "a positive number")
    if rope_type(rope) not in [*keys]:  # it may be of a type that no key can have
        yield (
            f"{name} has the type {rope_type(rope)!r}, which the trainer does not support; it must be one of "
            f"{', '.join(keys)}"
        )
        return
    required, optional = keys[rope_type(rope)]
    given = rope_parameters(rope)
    for key in required:
        if key not in given:
            yield f"{name}.{key} is missing, but the RoPE type {rope_type(rope)!r} requires it; add it"
        elif not is_number(given[key]) or given[key] <= 0:
            yield expected(f"{name}.{key}", given[key], "a positive number")
    if not isinstance(given.get("truncate", True), bool):
        yield expected(f"{name}.truncate", given["truncate"], "true or false")
    for key in sorted(given.keys() - {*required, *optional}):
        if key == "attn_factor":
            yield (
                f"{name}.attn_factor is {given[key]!r}, which neither transformers nor vLLM reads; remove it to train "
                "the model that they compute, or give attention_factor, which they read"
            )
            continue
        yield f"{name}.{key} is not supported with the RoPE type {rope_type(rope)!r}; use a model without it"
    factor = rope.get("partial_rotary_factor", 1)
    if "partial_rotary_factor" in family.own_fields:
        yield from _partial_rotary_problems(fields)
    elif factor not in (1, None):
        yield f"{name}.partial_rotary_factor is {factor!r}, which the trainer does not support; it must be 1"
    if "original_max_position_embeddings" in fields:
        yield (
            f"original_max_position_embeddings must be inside {name}, because libraries differ in how they read it "
            "elsewhere; move it there"
        )


def _partial_rotary_problems(fields: dict[str, Any]) -> Iterator[str]:
    factor, kind = partial_rotary_factor(fields), rope_type(rope_settings(fields))
    if not is_number(factor) or not 0 < factor <= 1:
        yield expected("partial_rotary_factor", factor, "a number above 0 and up to 1")
    elif kind != "default" and factor != 1:
        yield (
            f"partial_rotary_factor is {factor!r} with the RoPE type {kind!r}, which the trainer does not support "
            "together; the type must be 'default'"
        )
