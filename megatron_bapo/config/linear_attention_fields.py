"""Fields of the `config.json` of models whose layers are mostly a Gated DeltaNet (Qwen3-Next, Qwen3.5)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from megatron_bapo.config.field_values import size_problems

LINEAR_SIZES = (
    *("linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim", "linear_value_head_dim"),
    "linear_conv_kernel_dim",
)
CHUNK = 64
"""Tokens of a sequence that the recurrence of a Gated DeltaNet computes at once (`model/delta_rule.py`)."""
LINEAR_ROPE_KEYS = {"default": ((), ("mrope_interleaved", "mrope_section"))}
"""Those of Qwen3.5: the three positions of multimodal RoPE are the same for text."""
_LINEAR_VALUES = {"attn_output_gate": (True,), "output_gate_type": ("swish", "silu")}
"""Fields of Qwen3.5 that vLLM reads, and transformers does not; the first value is the default."""
_LINEAR, _FULL = "linear_attention", "full_attention"


def linear_layers(fields: dict[str, Any]) -> frozenset[int]:
    """Return the layers that are a Gated DeltaNet: those of `layer_types`, or all but each last of an interval."""
    num_layers, interval = fields["num_hidden_layers"], fields.get("full_attention_interval") or 4
    kinds = fields.get("layer_types") or [_LINEAR if (i + 1) % interval else _FULL for i in range(num_layers)]
    return frozenset(layer for layer, kind in enumerate(kinds) if kind == _LINEAR)


def linear_attention_problems(fields: dict[str, Any]) -> Iterator[str]:
    """Yield what is wrong with the fields of a model that has Gated DeltaNets."""
    found = list(size_problems(fields, LINEAR_SIZES))
    if fields.get("full_attention_interval") is not None:
        found += size_problems(fields, ("full_attention_interval",))
    yield from found
    if not found and (values := fields["linear_num_value_heads"]) % (keys := fields["linear_num_key_heads"]):
        yield f"linear_num_value_heads is {values}; it must be a multiple of linear_num_key_heads={keys}"
    kinds, layers = fields.get("layer_types"), fields.get("num_hidden_layers")
    for kind in sorted(set(map(str, kinds or ())) - {_LINEAR, _FULL}):
        yield f"layer_types has {kind!r}, which the trainer does not support; it must be {_LINEAR!r} or {_FULL!r}"
    if kinds and len(kinds) != layers:
        yield f"layer_types has {len(kinds)} layers; it must have num_hidden_layers={layers}"
    if kinds and _FULL not in kinds:
        yield f"layer_types has no {_FULL!r}, without which vLLM does not serve the model; use a model that has one"
    for name, supported in _LINEAR_VALUES.items():
        if fields.get(name, supported[0]) not in supported:
            yield f"{name} is {fields[name]!r}, which the trainer does not support; it must be {supported[0]!r}"
