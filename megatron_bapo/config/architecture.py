"""A model's architecture, read from its Hugging Face `config.json` and checked.

A field that is known to change the model in a way that the trainer does not support is refused by name. This module
does not import torch, because configurations are checked with it before anything starts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron_bapo.config.padding import round_up
from megatron_bapo.errors import UserError
from megatron_bapo.files import read_json_object

WEIGHTS_INDEX = "model.safetensors.index.json"
"""Name of the file that maps the tensors of a sharded checkpoint to its files."""


@dataclass(frozen=True)
class Family:
    """Differences of a model family from a plain pre-norm RMSNorm/SwiGLU/RoPE decoder."""

    qkv_bias: bool = False
    qk_norm: bool = False
    experts: bool = False
    shared_expert: str | None = None
    """Name, in the tensors' names, of the expert that every token passes; None: the family has none."""
    shared_expert_gate: bool = False
    """Whether each token weights the output of the shared expert by the sigmoid of a gate."""
    own_fields: frozenset[str] = frozenset()
    """Fields that this family reads, and that must not change other families."""
    default_head_dim: int | None = None
    """Width of a head if config.json has none, as in transformers; None: hidden_size / num_attention_heads."""


FAMILIES = {
    "llama": Family(),
    "qwen2": Family(qkv_bias=True),
    "qwen3": Family(qk_norm=True, default_head_dim=128),
    "qwen3_moe": Family(qk_norm=True, experts=True),
    "qwen2_moe": Family(
        qkv_bias=True,
        experts=True,
        shared_expert="shared_expert",
        shared_expert_gate=True,
        own_fields=frozenset({"shared_expert_intermediate_size"}),
    ),
}

_SUPPORTED_VALUES: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu",),
    "mlp_bias": (False, None),
    "attention_bias": (False, None),
    "qkv_bias": (True, None),
    "attention_dropout": (0, None),
    "use_sliding_window": (False, None),
    "partial_rotary_factor": (1, None),
    "use_mrope": (False, None),
    "shared_expert_intermediate_size": (0, None),
    "n_shared_experts": (0, None),
    "num_shared_experts": (0, None),
    "num_nextn_predict_layers": (0, None),
    "quantization_config": (None,),
    "compression_config": (None,),
}
"""Supported values of fields whose other values change the model; the first one is the default."""

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
    "rope_scaling": (dict, "an object"),
    "rope_parameters": (dict, "an object"),
}
"""Type of each field that is not a number, with its name in messages."""

_SIZES = (
    *("num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads"),
    *("vocab_size", "max_position_embeddings"),
)
_EXPERT_SIZES = ("num_experts", "num_experts_per_tok", "moe_intermediate_size")


@dataclass(frozen=True)
class Architecture:
    """A model's architecture; the fields have Hugging Face's names."""

    family: Family
    num_hidden_layers: int
    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    max_position_embeddings: int
    rms_norm_eps: float
    rope_theta: float
    tie_word_embeddings: bool
    rope_scaling: Mapping[str, Any] = field(default_factory=dict, hash=False)
    """`rope_type` and its parameters, in transformers' spelling; empty for plain RoPE."""
    num_experts: int = 0
    num_experts_per_tok: int = 0
    moe_intermediate_size: int = 0
    norm_topk_prob: bool = False
    """Whether the weights of the selected experts are scaled to sum to one."""
    shared_expert_intermediate_size: int = 0
    """Width of the expert that every token passes in layers with experts; 0: there is none."""
    moe_layers: frozenset[int] = frozenset()
    """Indices, from 0, of the layers that have experts instead of one MLP."""

    @property
    def has_dense_layers(self) -> bool:
        """Whether any layer has a plain MLP."""
        return len(self.moe_layers) < self.num_hidden_layers

    @property
    def route_item_bytes(self) -> int:
        """Bytes of an expert number in recorded routes: int8 up to 128 experts, otherwise int16; -1 is no expert."""
        return 1 if self.num_experts <= 128 else 2

    @property
    def route_bytes(self) -> int:
        """Bytes of the recorded routes of one token through all layers with experts."""
        return len(self.moe_layers) * self.num_experts_per_tok * self.route_item_bytes

    @property
    def context_length(self) -> int:
        """Number of tokens that the position embedding covers.

        With YaRN it is computed, because Qwen's recipe for YaRN leaves max_position_embeddings unchanged.
        """
        if self.rope_scaling.get("rope_type") != "yarn":
            return self.max_position_embeddings
        return int(self.rope_scaling["original_max_position_embeddings"] * self.rope_scaling["factor"])

    def padded_vocab_size(self, tensor_parallel_size: int) -> int:
        """Return the vocabulary size padded to split evenly over the tensor-parallel ranks."""
        return round_up(self.vocab_size, tensor_parallel_size)


def listed_files(index: Path) -> list[str]:
    """Return the names of the files of a sharded checkpoint. Raises UserError for a damaged index."""
    files = read_json_object(index).get("weight_map")
    if not isinstance(files, dict) or not all(isinstance(name, str) for name in files.values()):
        raise UserError(f"{index} must map tensors to file names under weight_map; download it again")
    return sorted(set(files.values()))


def read_architecture(model_path: Path) -> Architecture:
    """Read the architecture in `model_path/config.json`.

    Raises UserError for a missing file or an unsupported model family, and otherwise with every missing field and every
    unsupported value.
    """
    file = model_path / "config.json"
    if not file.is_file():
        raise UserError(f"{file} does not exist; model.path must be a Hugging Face checkpoint folder")
    fields = read_json_object(file)
    if problems := [f"{file}: {problem}" for problem in _kind_problems(fields)]:
        raise UserError("\n".join(problems))
    if fields.get("model_type") not in FAMILIES:
        raise UserError(
            f"{file}: model_type is {fields.get('model_type')!r}, which the trainer does not support; use a model of "
            f"the types {', '.join(FAMILIES)}"
        )
    # Published checkpoints have num_experts; transformers 5 writes num_local_experts.
    fields = {"num_experts": fields.get("num_local_experts"), "decoder_sparse_step": 1} | fields
    if problems := [f"{file}: {problem}" for problem in _problems(fields)]:
        raise UserError("\n".join(problems))
    return _architecture(fields)


def _architecture(fields: dict[str, Any]) -> Architecture:
    family = FAMILIES[fields["model_type"]]
    heads, rope = fields["num_attention_heads"], _rope(fields)
    moe_layers = _moe_layers(fields) if family.experts else frozenset()
    scaled = _rope_type(rope) != "default"
    return Architecture(
        family=family,
        **{name: fields[name] for name in _SIZES},
        num_key_value_heads=fields.get("num_key_value_heads") or heads,
        head_dim=fields.get("head_dim") or family.default_head_dim or fields["hidden_size"] // heads,
        rms_norm_eps=fields["rms_norm_eps"],
        rope_theta=float(rope.get("rope_theta") or fields.get("rope_theta") or 10000.0),
        tie_word_embeddings=bool(fields.get("tie_word_embeddings", False)),
        rope_scaling={"rope_type": _rope_type(rope), **_rope_parameters(rope)} if scaled else {},
        **({name: fields[name] for name in _EXPERT_SIZES} if moe_layers else {}),
        norm_topk_prob=bool(moe_layers and fields.get("norm_topk_prob", False)),
        shared_expert_intermediate_size=_shared_width(fields) if moe_layers else 0,
        moe_layers=moe_layers,
    )


def _moe_layers(fields: dict[str, Any]) -> frozenset[int]:
    """Return Qwen's layers with experts: every `decoder_sparse_step`-th one, except those in `mlp_only_layers`."""
    step, dense = fields["decoder_sparse_step"], fields.get("mlp_only_layers") or ()
    layers = range(fields["num_hidden_layers"]) if fields["num_experts"] else ()
    return frozenset(layer for layer in layers if (layer + 1) % step == 0 and layer not in dense)


def _shared_width(fields: dict[str, Any]) -> int:
    """Return the width of the expert that every token passes; 0 without one."""
    return fields["shared_expert_intermediate_size"] if FAMILIES[fields["model_type"]].shared_expert else 0


def _rope(fields: dict[str, Any]) -> dict[str, Any]:
    """Return the RoPE settings, which transformers 5 and earlier versions name differently."""
    return fields.get("rope_scaling") or fields.get("rope_parameters") or {}


def _rope_type(rope: dict[str, Any]) -> str:
    return rope.get("rope_type") or rope.get("type") or "default"


def _rope_parameters(rope: dict[str, Any]) -> dict[str, Any]:
    """Return the settings that are specific to the RoPE type."""
    common = ("rope_type", "type", "rope_theta", "partial_rotary_factor")
    return {name: value for name, value in rope.items() if value is not None and name not in common}


def _problems(fields: dict[str, Any]) -> Iterator[str]:
    family = FAMILIES[fields["model_type"]]
    yield from _size_problems(fields, _SIZES)
    if family.experts:
        yield from _expert_problems(fields)
    if fields.get("num_key_value_heads") is None and ("num_key_value_heads" in fields or family == FAMILIES["llama"]):
        pass  # every attention head has its own key/value head
    else:
        yield from _size_problems(fields, ("num_key_value_heads",))
    epsilon = fields.get("rms_norm_eps")
    if not isinstance(epsilon, int | float) or epsilon <= 0:
        yield _expected("rms_norm_eps", epsilon, "a positive number")
    for name, supported in _SUPPORTED_VALUES.items():
        if name not in family.own_fields and fields.get(name, supported[0]) not in supported:
            yield f"{name} is {fields[name]!r}, which the trainer does not support; it must be {supported[0]!r}"
    for kind in sorted(set(map(str, fields.get("layer_types") or ())) - {"full_attention"}):
        yield f"layer_types has {kind!r}, which the trainer does not support; every layer must be 'full_attention'"
    yield from _rope_problems(fields)


def _expected(name: str, value: Any, kind: str) -> str:
    if value is None:
        return f"{name} is missing; use the checkpoint's original config.json"
    return f"{name} is {value!r}; it must be {kind}"


def _kind_problems(fields: dict[str, Any]) -> Iterator[str]:
    for name, (kind, words) in _KINDS.items():
        if not isinstance(fields.get(name), kind | None):
            yield _expected(name, fields[name], words)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _size_problems(fields: dict[str, Any], names: tuple[str, ...]) -> Iterator[str]:
    for name in names:
        value = fields.get(name)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            yield _expected(name, value, "a positive whole number")


def _expert_problems(fields: dict[str, Any]) -> Iterator[str]:
    if fields["num_experts"] == 0:
        return  # The model is dense.
    shared = ("shared_expert_intermediate_size",) * (FAMILIES[fields["model_type"]].shared_expert is not None)
    found = list(_size_problems(fields, (*_EXPERT_SIZES, *shared, "decoder_sparse_step")))
    yield from found
    if found:
        return
    selected, experts = fields["num_experts_per_tok"], fields["num_experts"]
    if selected > experts:
        yield f"num_experts_per_tok is {selected}; it must not exceed num_experts={experts}"
    if selected == 1 and fields.get("norm_topk_prob"):
        yield (
            "norm_topk_prob is True with num_experts_per_tok=1, which leaves the router without a gradient; it must be "
            "False"
        )


def _rope_problems(fields: dict[str, Any]) -> Iterator[str]:
    if fields.get("rope_scaling") and fields.get("rope_parameters"):
        yield "rope_scaling and rope_parameters are both given, but libraries differ in which one they read; keep one"
        return
    name = "rope_scaling" if fields.get("rope_scaling") else "rope_parameters"
    rope = _rope(fields)
    theta = rope.get("rope_theta") or fields.get("rope_theta") or 10000.0
    if not _is_number(theta):
        yield _expected("rope_theta", theta, "a number")
    if _rope_type(rope) not in _ROPE_KEYS:
        yield (
            f"{name} has the type {_rope_type(rope)!r}, which the trainer does not support; it must be one of "
            f"{', '.join(_ROPE_KEYS)}"
        )
        return
    required, optional = _ROPE_KEYS[_rope_type(rope)]
    given = _rope_parameters(rope)
    for key in required:
        if key not in given:
            yield f"{name}.{key} is missing, but the RoPE type {_rope_type(rope)!r} requires it; add it"
        elif not _is_number(given[key]):
            yield _expected(f"{name}.{key}", given[key], "a number")
    for key in sorted(given.keys() - {*required, *optional}):
        yield f"{name}.{key} is not supported with the RoPE type {_rope_type(rope)!r}; use a model without it"
    if rope.get("partial_rotary_factor", 1) not in (1, None):
        yield (
            f"{name}.partial_rotary_factor is {rope['partial_rotary_factor']!r}, which the trainer does not support; "
            "it must be 1"
        )
    if "original_max_position_embeddings" in fields:
        yield (
            f"original_max_position_embeddings must be inside {name}, because libraries differ in how they read it "
            "elsewhere; move it there"
        )
