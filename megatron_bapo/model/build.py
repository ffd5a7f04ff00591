"""Builds this rank's part of the policy."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megatron_bapo.config.architecture import Architecture, read_architecture
from megatron_bapo.config.schema import Config
from megatron_bapo.model.architecture import transformer_config
from megatron_bapo.model.hf_mapping import global_name
from megatron_bapo.model.layer_specs import block_spec
from megatron_bapo.parallel.groups import ParallelGroups
from megatron_bapo.parallel.megatron import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    Float16Module,
    GPTModel,
    TransformerConfig,
    get_transformer_layer_offset,
)
from megatron_bapo.parallel.platform import has_gpu, local_device

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class PolicyModel:
    """One pipeline stage of the policy, wrapped for data parallelism."""

    architecture: Architecture
    config: TransformerConfig
    gpt: GPTModel
    ddp: DistributedDataParallel
    layer_offset: int
    """Layers on earlier pipeline stages."""
    expert_offset: int
    """Experts of each layer on earlier expert-parallel ranks."""

    def named_parameters(self) -> Iterator[tuple[str, torch.nn.Parameter]]:
        """Megatron's names without the wrappers' prefixes, with the whole model's layer and expert numbers."""
        for name, parameter in self.gpt.named_parameters():
            yield global_name(name, self.layer_offset, self.expert_offset), parameter


def build_policy(config: Config, model_path: Path, groups: ParallelGroups) -> PolicyModel:
    """The model of `model_path` with fresh weights, on this rank's device; load weights next."""
    architecture = read_architecture(model_path)
    dtype = DTYPES[config.model.dtype]
    megatron = transformer_config(architecture, config.parallel, dtype, cpu_initialization=not has_gpu())
    spec: Any = block_spec(megatron)
    gpt = GPTModel(
        megatron,
        spec,
        architecture.padded_vocab_size(groups.tensor.size),
        architecture.max_position_embeddings,
        pre_process=groups.is_first_stage,
        post_process=groups.is_last_stage,
        share_embeddings_and_output_weights=architecture.tie_word_embeddings,
        position_embedding_type="rope",
        rotary_base=architecture.rope_theta,  # pyright: ignore[reportArgumentType]
        parallel_output=True,
    ).to(local_device())
    wrapped = Float16Module(megatron, gpt) if megatron.bf16 else gpt
    ddp = DistributedDataParallel(megatron, DistributedDataParallelConfig(grad_reduce_in_fp32=True), wrapped)
    expert_offset = groups.expert.rank * (architecture.num_experts // groups.expert.size)
    return PolicyModel(architecture, megatron, gpt, ddp, get_transformer_layer_offset(megatron), expert_offset)
