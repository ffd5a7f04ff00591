"""The section `model`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, PositiveFloat, PositiveInt, model_validator

from megatron_bapo.config.lora import LoraConfig
from megatron_bapo.config.section import Section


class CreateModelConfig(Section):
    """A randomly initialized checkpoint with Qwen3's architecture and a byte tokenizer, written to the run directory.

    The keys are those of a Hugging Face config.json."""

    num_hidden_layers: PositiveInt = 4
    """Number of layers."""
    hidden_size: PositiveInt = 128
    """Width of the hidden states."""
    intermediate_size: PositiveInt = 384
    """Width of the MLPs."""
    num_attention_heads: PositiveInt = 4
    """Number of attention heads."""
    num_key_value_heads: PositiveInt = 2
    """Number of key/value heads, each of which is shared by several attention heads."""
    head_dim: Annotated[PositiveInt, Field(multiple_of=2)] = 32
    """Width of an attention head."""
    max_position_embeddings: PositiveInt = 512
    """Maximum length of prompt and response together, in tokens."""
    tie_word_embeddings: bool = True
    """Share the weights of the input and output embeddings."""
    initializer_range: PositiveFloat = 0.06
    """Standard deviation of the initial weights. With 0.02, common for wide models, so narrow a model learns slowly."""
    vocab_size: Annotated[int, Field(ge=258)] = 320
    """Vocabulary size. 256 bytes, the end of sequence and the common beginning of the prompts are used; the rest makes
    it divisible by tensor parallel sizes."""


class ModelConfig(Section):
    """The policy: exactly one of `path` and `create`."""

    path: Path | None = None
    """Folder of a Hugging Face checkpoint with config.json, safetensors files and tokenizer files."""
    create: CreateModelConfig | None = None
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """Data type of the weights and activations in trainer and engines."""
    transformer_impl: Literal["local", "transformer_engine"] = "local"
    """Implementation of the layers: Megatron's own with attention in plain torch, or Transformer Engine's fused layers,
    which need a GPU."""
    lora: LoraConfig | None = None
    freeze_router: bool = False
    """Leave the routers, which choose the experts of each token, as they are."""

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        if (self.path is None) == (self.create is None):
            one = "give exactly one of model.path (a Hugging Face folder) and model.create (a small model)"
            raise ValueError(f"{one}; null removes one that another file sets, such as model.create=null")
        return self
