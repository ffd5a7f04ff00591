"""Builds this rank's part of the policy."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megatron_bapo.config.schema import Config, ParallelConfig
from megatron_bapo.model.architecture import Architecture, read_architecture, transformer_config
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

    def named_parameters(self) -> Iterator[tuple[str, torch.nn.Parameter]]:
        """Megatron's own names, without the wrappers' prefixes."""
        return self.gpt.named_parameters()


def finish_param_gather(chunks: Sequence[DistributedDataParallel]) -> None:
    """Complete the parameters on every rank; comes before anything but a forward pass reads them.

    With overlap_param_gather an optimizer step leaves the gather to the next forward pass. Otherwise there is nothing
    to do. Collective over data-parallel ranks.
    """
    for chunk in chunks:
        if chunk.use_forward_hook:
            for bucket_group in chunk.bucket_groups + chunk.expert_parallel_bucket_groups:
                bucket_group.finish_param_sync(skip_next_bucket_dispatch=True)


def ddp_config(parallel: ParallelConfig) -> DistributedDataParallelConfig:
    """Gradients are summed in fp32 whatever the model's dtype."""
    return DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        use_distributed_optimizer=parallel.use_distributed_optimizer,
        overlap_grad_reduce=parallel.overlap_grad_reduce,
        overlap_param_gather=parallel.overlap_param_gather,
        bucket_size=parallel.ddp_bucket_size,
    )


def build_policy(config: Config, model_path: Path, groups: ParallelGroups) -> PolicyModel:
    """The model of `model_path` with fresh weights, on this rank's device; load weights next."""
    architecture = read_architecture(model_path)
    dtype = DTYPES[config.model.dtype]
    megatron = transformer_config(architecture, config.parallel, dtype, cpu_initialization=not has_gpu())
    spec: Any = block_spec(megatron)
    gpt = GPTModel(
        megatron,
        spec,
        architecture.vocab_size,
        architecture.max_position_embeddings,
        pre_process=groups.is_first_stage,
        post_process=groups.is_last_stage,
        share_embeddings_and_output_weights=architecture.tie_word_embeddings,
        position_embedding_type="rope",
        rotary_base=architecture.rope_theta,  # pyright: ignore[reportArgumentType]
        parallel_output=True,
    ).to(local_device())
    wrapped = Float16Module(megatron, gpt) if megatron.bf16 else gpt
    ddp = DistributedDataParallel(megatron, ddp_config(config.parallel), wrapped)
    if config.parallel.overlap_grad_reduce:
        megatron.no_sync_func = ddp.no_sync  # only the last micro-batch's gradients are complete
    return PolicyModel(architecture, megatron, gpt, ddp, get_transformer_layer_offset(megatron))
