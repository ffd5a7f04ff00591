"""A model's architecture, read from its Hugging Face `config.json` and checked.

A field that is known to change the model in a way that the trainer does not support is refused by name. This module
does not import torch, because configurations are checked with it before anything starts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from megatron_bapo.config.architecture_checks import (
    EXPERT_SIZES,
    LATENT_SIZES,
    SIGMOID_ROUTER_DEFAULTS,
    SIZES,
    field_problems,
    has_qkv_bias,
    kind_problems,
    partial_rotary_factor,
    rope_parameters,
    rope_settings,
    rope_type,
)
from megatron_bapo.config.families import FAMILIES, MULTIMODAL, Family
from megatron_bapo.config.linear_attention_fields import CHUNK, LINEAR_SIZES, linear_layers
from megatron_bapo.config.padding import round_up
from megatron_bapo.errors import UserError
from megatron_bapo.files import read_json_object

WEIGHTS_INDEX = "model.safetensors.index.json"
"""Name of the file that maps the tensors of a sharded checkpoint to its files."""


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
    n_group: int = 1
    topk_group: int = 1
    """Experts are chosen from the best `topk_group` of `n_group` equal groups of experts."""
    routed_scaling_factor: float = 1.0
    """Factor of the weights of the selected experts."""
    partial_rotary_factor: float = 1.0
    """Share of a head's dimensions that RoPE rotates."""
    q_lora_rank: int = 0
    """Width of the vector from which a token's queries are computed; 0: they are computed from the hidden state."""
    kv_lora_rank: int = 0
    """Width of the vector from which a token's keys and values are computed; 0: the attention is not latent."""
    qk_nope_head_dim: int = 0
    """Dimensions of a latent attention's query and key that RoPE leaves, the first ones of its `head_dim`."""
    qk_rope_head_dim: int = 0
    """Dimensions of a latent attention's query and key that RoPE rotates. All heads share the key's."""
    v_head_dim: int = 0
    """Width of a latent attention's value."""
    sliding_window: int = 0
    """Number of tokens that every second layer, from the first one on, attends to: a token itself and those before it.

    0: all layers attend to all tokens.
    """
    linear_layers: frozenset[int] = frozenset()
    """Indices, from 0, of the layers that are a Gated DeltaNet instead of attention."""
    linear_num_key_heads: int = 0
    linear_num_value_heads: int = 0
    """Heads of a Gated DeltaNet. Each query and key head serves the same number of consecutive value heads."""
    linear_key_head_dim: int = 0
    linear_value_head_dim: int = 0
    linear_conv_kernel_dim: int = 0
    """Tokens that the convolution before a Gated DeltaNet's recurrence sees: a token itself and those before it."""
    num_nextn_predict_layers: int = 0
    """Layers behind the last one that predict further tokens. They are neither loaded nor trained nor exported."""

    @property
    def has_dense_layers(self) -> bool:
        """Whether any layer has a plain MLP."""
        return len(self.moe_layers) < self.num_hidden_layers

    def window(self, layer: int) -> int | None:
        """Return the number of tokens that a layer attends to, itself included; None: all."""
        return self.sliding_window if self.sliding_window and layer % 2 == 0 else None

    def attended(self, length: float, square: float) -> float:
        """Return the mean over the layers of twice the number of pairs of a token and one that it attends to.

        `length` and `square` are sums over sequences of their lengths and of the squares. Layers without a window have
        `square`, and the others at most twice their window for each token.
        """
        if self.linear_layers:
            return (self.num_hidden_layers - len(self.linear_layers)) * square / self.num_hidden_layers
        if not self.sliding_window:
            return square
        share = -(-self.num_hidden_layers // 2) / self.num_hidden_layers
        return (1 - share) * square + share * min(square, 2.0 * self.sliding_window * length)

    @property
    def rotary_dim(self) -> int:
        """Number of a head's dimensions that RoPE rotates: the first ones, in latent attention the last ones."""
        return self.qk_rope_head_dim or int(self.head_dim * self.partial_rotary_factor)

    @property
    def value_dim(self) -> int:
        """Width of a head's value."""
        return self.v_head_dim or self.head_dim

    @property
    def attention_width(self) -> int:
        """Mean width of queries and values, added up over the heads."""
        return self.num_attention_heads * (self.head_dim + self.value_dim) // 2

    @property
    def qkv_width(self) -> int:
        """Width of the queries, keys and values of attention, and of the gates of its output."""
        queries = self.num_attention_heads * (1 + self.family.output_gate)
        return (queries + 2 * self.num_key_value_heads) * self.head_dim

    @property
    def linear_key_width(self) -> int:
        """Width of a Gated DeltaNet's queries, and of its keys, added up over the heads."""
        return self.linear_num_key_heads * self.linear_key_head_dim

    @property
    def linear_value_width(self) -> int:
        """Width of a Gated DeltaNet's values, and of its output, added up over the heads."""
        return self.linear_num_value_heads * self.linear_value_head_dim

    @property
    def linear_mixed_width(self) -> int:
        """Width of a Gated DeltaNet's queries, keys and values, which its convolution mixes over tokens."""
        return 2 * self.linear_key_width + self.linear_value_width

    @property
    def linear_in_width(self) -> int:
        """Width of a Gated DeltaNet's queries, keys, values and gates, and a beta and a decay for each value head."""
        return 2 * (self.linear_key_width + self.linear_value_width + self.linear_num_value_heads)

    @property
    def shares_prompts(self) -> bool:
        """Whether a prompt's responses share its KV cache in vLLM.

        vLLM 0.32 caches states of Gated DeltaNets only at the ends of long blocks, and needs chunked prefill for it
        (MambaModelConfig in vllm/model_executor/models/config.py), which does not work on CPUs.
        """
        return not self.linear_layers

    @property
    def linear_share(self) -> float:
        """Share of the layers that are a Gated DeltaNet."""
        return len(self.linear_layers) / self.num_hidden_layers

    @property
    def recurrence_flops(self) -> int:
        """FLOPs of one token's forward pass through the recurrence of a Gated DeltaNet, in chunks.

        With C tokens of a chunk, D and E the widths of a key and a value, a value head multiplies keys and queries with
        keys (4 C D), solves a triangular system (C (D + E)), multiplies scores with what is written (2 C E), and reads
        the state twice and writes it once (6 D E) (arXiv 2412.06464).
        """
        key, value = self.linear_key_head_dim, self.linear_value_head_dim
        return self.linear_num_value_heads * (CHUNK * (5 * key + 3 * value) + 6 * key * value)

    @property
    def cached_dim(self) -> int:
        """Width of what latent attention caches of a token: its compressed keys and values, and the rotated key."""
        return self.kv_lora_rank + self.qk_rope_head_dim

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


def written_dtype(model_path: Path) -> str:
    """Return the dtype that `model_path/config.json` gives for the weights, under the key of transformers 5 or 4."""
    fields = read_json_object(model_path / "config.json")
    return fields.get("dtype") or fields.get("torch_dtype") or "float32"


def read_architecture(model_path: Path) -> Architecture:
    """Read the architecture in `model_path/config.json`.

    Raises UserError for a missing file or an unsupported model family, and otherwise with every missing field and every
    unsupported value.
    """
    file = model_path / "config.json"
    if not file.is_file():
        raise UserError(f"{file} does not exist; model.path must be a Hugging Face checkpoint folder")
    return parsed_architecture(read_json_object(file), file)


def parsed_architecture(fields: dict[str, Any], file: Path) -> Architecture:
    """Return the architecture of the fields of a config.json, `file` in messages. Raises as `read_architecture`."""
    if problems := [f"{file}: {problem}" for problem in kind_problems(fields)]:
        raise UserError("\n".join(problems))
    if fields.get("model_type") in MULTIMODAL:
        raise UserError(
            f"{file}: model_type is {fields['model_type']!r}, a multimodal model, of which the trainer supports only "
            "the language model; write it to a folder of its own with tools/extract_text_model.py"
        )
    if fields.get("model_type") not in FAMILIES:
        raise UserError(
            f"{file}: model_type is {fields.get('model_type')!r}, which the trainer does not support; use a model of "
            f"the types {', '.join(FAMILIES)}"
        )
    # Published checkpoints have num_experts; transformers 5 writes num_local_experts.
    fields = {"num_experts": fields.get("num_local_experts"), "decoder_sparse_step": 1} | fields
    family = FAMILIES[fields["model_type"]]
    fields = {"norm_topk_prob": family.default_norm_topk_prob} | fields
    if family.sigmoid_router:
        defaults = {} if family.latent_attention else SIGMOID_ROUTER_DEFAULTS
        fields = defaults | fields | {"num_experts": fields.get(family.expert_field)}
    if family.stacked_experts:
        # The softmax over the logits of the selected experts is that over all, divided by the sum of the selected ones.
        fields = fields | {"moe_intermediate_size": fields.get("intermediate_size"), "norm_topk_prob": True}
    if not family.dense_layers:
        width = fields.get("shared_expert_intermediate_size")
        fields = {"intermediate_size": width} | fields | {"decoder_sparse_step": 1, "mlp_only_layers": None}
    if problems := [f"{file}: {problem}" for problem in field_problems(fields)]:
        raise UserError("\n".join(problems))
    return _architecture(fields)


def _architecture(fields: dict[str, Any]) -> Architecture:
    family = FAMILIES[fields["model_type"]]
    if "use_qk_norm" in family.own_fields:
        family = replace(family, qk_norm=bool(fields.get("use_qk_norm")))
    family = replace(family, qkv_bias=has_qkv_bias(fields))
    heads, rope = fields["num_attention_heads"], rope_settings(fields)
    moe_layers = _moe_layers(fields) if family.experts else frozenset()
    scaled, head_dim = rope_type(rope) != "default", fields.get("head_dim")
    latent = {name: fields[name] for name in LATENT_SIZES} if family.latent_attention else {}
    if latent:  # config.json's head_dim, if there is one, is qk_rope_head_dim
        head_dim = latent["qk_nope_head_dim"] + latent["qk_rope_head_dim"]
        latent["q_lora_rank"] = fields.get("q_lora_rank") or 0
    return Architecture(
        family=family,
        **{name: fields[name] for name in SIZES},
        num_key_value_heads=fields.get("num_key_value_heads") or heads,
        head_dim=head_dim or family.default_head_dim or fields["hidden_size"] // heads,
        rms_norm_eps=fields["rms_norm_eps"],
        rope_theta=float(rope.get("rope_theta") or fields.get("rope_theta") or 10000.0),
        tie_word_embeddings=bool(fields.get("tie_word_embeddings", False)),
        rope_scaling={"rope_type": rope_type(rope), **rope_parameters(rope)} if scaled else {},
        **({name: fields[name] for name in EXPERT_SIZES} if moe_layers else {}),
        norm_topk_prob=bool(moe_layers and fields.get("norm_topk_prob", False)),
        shared_expert_intermediate_size=_shared_width(fields) if moe_layers else 0,
        **latent,
        partial_rotary_factor=partial_rotary_factor(fields),
        moe_layers=moe_layers,
        n_group=fields["n_group"] if family.sigmoid_router else 1,
        topk_group=fields["topk_group"] if family.sigmoid_router else 1,
        routed_scaling_factor=float(fields["routed_scaling_factor"]) if family.sigmoid_router else 1.0,
        sliding_window=fields["sliding_window"] if family.alternating_windows else 0,
        **({name: fields[name] for name in LINEAR_SIZES} if family.gated_delta_net else {}),
        linear_layers=linear_layers(fields) if family.gated_delta_net else frozenset(),
        num_nextn_predict_layers=fields.get("num_nextn_predict_layers") or 0,
    )


def _moe_layers(fields: dict[str, Any]) -> frozenset[int]:
    """Return the layers with experts.

    They are all but the first `first_k_dense_replace` ones, or, in Qwen's models, every `decoder_sparse_step`-th one
    except those in `mlp_only_layers`.
    """
    if FAMILIES[fields["model_type"]].sigmoid_router:
        return frozenset(range(fields["first_k_dense_replace"], fields["num_hidden_layers"]))
    step, dense = fields["decoder_sparse_step"], fields.get("mlp_only_layers") or ()
    layers = range(fields["num_hidden_layers"]) if fields["num_experts"] else ()
    return frozenset(layer for layer in layers if (layer + 1) % step == 0 and layer not in dense)


def _shared_width(fields: dict[str, Any]) -> int:
    """Return the width of the expert that every token passes; 0 without one."""
    family = FAMILIES[fields["model_type"]]
    if family.shared_expert is None:
        return 0
    if family.sigmoid_router:  # several shared experts are one wider expert
        return fields["n_shared_experts"] * fields["moe_intermediate_size"]
    return fields["shared_expert_intermediate_size"]
