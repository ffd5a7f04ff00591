"""Builds this rank's shard of the policy model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from megatron_bapo.config.architecture import Architecture
from megatron_bapo.config.pipeline_layers import stage_layers
from megatron_bapo.config.schema import Config, ParallelConfig
from megatron_bapo.model.architecture import rotary, transformer_config
from megatron_bapo.model.expert_biases import prepare_expert_biases
from megatron_bapo.model.hf_mapping import global_name
from megatron_bapo.model.hf_table import TABLE, Table
from megatron_bapo.model.layer_specs import block_spec
from megatron_bapo.model.lora import Adapters, attach_adapters, is_adapter
from megatron_bapo.model.lora_mapping import adapter_table
from megatron_bapo.model.packed_attention import LatentRotaryEmbedding, PackedRotaryEmbedding
from megatron_bapo.model.routing_replay import RoutingReplay
from megatron_bapo.parallel.groups import ParallelGroups
from megatron_bapo.parallel.megatron import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    Float16Module,
    GPTModel,
    TransformerConfig,
    finalize_model_grads,
)
from megatron_bapo.parallel.platform import has_gpu, local_device


@dataclass(frozen=True)
class Chunk:
    """Consecutive layers of the policy in a DDP wrapper; a stage of an interleaved pipeline has several chunks."""

    gpt: GPTModel
    ddp: DistributedDataParallel
    layer_offset: int
    """Number of layers before this chunk."""


@dataclass(frozen=True)
class PolicyModel:
    """One pipeline stage of the policy."""

    architecture: Architecture
    config: TransformerConfig
    chunks: tuple[Chunk, ...]
    expert_offset: int
    """Number of experts of a layer on earlier expert-parallel ranks."""
    routing: RoutingReplay | None = None
    """Routing replay, if `algorithm.routing_replay` is on; a frozen model has none."""
    adapters: Adapters | None = None
    """Adapters, with `model.lora`; then no other parameters are trained."""
    adapters_on: bool = True
    """Whether the model computes with its adapters."""

    @property
    def table(self) -> Table:
        """Mapping of the parameters to Hugging Face tensors."""
        return TABLE

    @property
    def trained(self) -> TrainedParameters | Adapters:
        """What the optimizer updates and checkpoints contain: the adapters, or without any all trained parameters."""
        return TrainedParameters(self) if self.adapters is None else self.adapters

    def without_adapters(self) -> PolicyModel:
        """Return the model that the adapters adapt, which has the same parameters in memory."""
        return replace(self, adapters_on=False)

    def named_parameters(self) -> Iterator[tuple[str, torch.nn.Parameter]]:
        """Iterate over this rank's parameters by Megatron name, with layer and expert numbers of the whole model.

        Adapters are not among them.
        """
        for chunk in self.chunks:
            for name, parameter in chunk.gpt.named_parameters():
                if not is_adapter(name):
                    yield global_name(name, chunk.layer_offset, self.expert_offset), parameter

    def output_weight(self) -> torch.Tensor:
        """Return this rank's rows of the output layer, [padded vocabulary / tensor size, hidden]; last stage only."""
        gpt = self.chunks[-1].gpt
        tied = gpt.share_embeddings_and_output_weights
        weight = gpt.shared_embedding_or_output_weight() if tied else gpt.output_layer.weight
        assert weight is not None, "only the last pipeline stage has an output layer"
        return weight


@dataclass(frozen=True)
class TrainedParameters:
    """Parameters of a model that an optimizer updates, with the interface that import and export use."""

    model: PolicyModel

    @property
    def architecture(self) -> Architecture:
        return self.model.architecture

    @property
    def table(self) -> Table:
        return self.model.table

    @property
    def chunks(self) -> tuple[Chunk, ...]:
        return self.model.chunks

    def named_parameters(self) -> Iterator[tuple[str, torch.nn.Parameter]]:
        return ((name, each) for name, each in self.model.named_parameters() if each.requires_grad)


def finish_param_gather(chunks: Sequence[DistributedDataParallel]) -> None:
    """Complete the parameters on every rank. Call this before anything other than a forward pass reads them.

    With overlap_param_gather an optimizer step defers the gather to the next forward pass; otherwise there is nothing
    to do. Collective over data-parallel ranks.
    """
    for chunk in chunks:
        if chunk.use_forward_hook:
            for bucket_group in chunk.bucket_groups + chunk.expert_parallel_bucket_groups:
                bucket_group.finish_param_sync(skip_next_bucket_dispatch=True)


def ddp_config(
    parallel: ParallelConfig, *, grads_in_fp32: bool = True, fp8_param: bool = False
) -> DistributedDataParallelConfig:
    """Return the DDP settings: gradients are summed in fp32 or the model's dtype; `fp8_param` gathers FP8 weights."""
    return DistributedDataParallelConfig(
        grad_reduce_in_fp32=grads_in_fp32,
        use_distributed_optimizer=parallel.use_distributed_optimizer,
        overlap_grad_reduce=parallel.overlap_grad_reduce,
        overlap_param_gather=parallel.overlap_param_gather,
        bucket_size=parallel.ddp_bucket_size,
        fp8_param_gather=fp8_param,
    )


def build_policy(
    config: Config,
    architecture: Architecture,
    groups: ParallelGroups,
    *,
    frozen: bool = False,
    on_gpu: bool | None = None,
) -> PolicyModel:
    """Build this rank's shard of a model on its device, with randomly initialized weights.

    A `frozen` model has no gradients and no gradient buffers. `on_gpu` says whether the device is a GPU; None: whether
    this machine has one.
    """
    parallel, on_gpu = config.parallel, has_gpu() if on_gpu is None else on_gpu
    megatron = transformer_config(architecture, config.model, parallel, config.fp8, on_gpu=on_gpu)
    layers = stage_layers(architecture, parallel, groups.pipeline.rank)
    chunks = tuple(
        _build_chunk(config, architecture, megatron, groups, index, layers[index], frozen)
        for index in range(groups.num_virtual_stages)
    )
    megatron.moe_router_enable_expert_bias = False  # Megatron would update the biases, which it has created by now
    expert_offset, routing, adapters = _expert_offset(architecture, groups), None, None
    if config.algorithm.routing_replay != "none" and not frozen:
        routing = RoutingReplay.install(architecture, chunks, groups, sp=parallel.sequence_parallel)
    if config.model.lora is not None and not frozen:
        adapters = Adapters(architecture, adapter_table(config.model.lora), chunks, expert_offset)
    model = PolicyModel(architecture, megatron, chunks, expert_offset, routing, adapters)
    if not frozen:
        _connect_to_schedule(model, parallel)
    return model


def _expert_offset(architecture: Architecture, groups: ParallelGroups) -> int:
    """Return the number of experts of a layer on earlier expert-parallel ranks."""
    return groups.expert.rank * (architecture.num_experts // groups.expert.size)


def _build_chunk(
    config: Config,
    architecture: Architecture,
    megatron: TransformerConfig,
    groups: ParallelGroups,
    index: int,
    layers: range,
    frozen: bool,
) -> Chunk:
    parallel, lora, ddp = config.parallel, config.model.lora, DistributedDataParallelConfig()
    if not frozen:
        in_fp32 = config.optimizer.grads_dtype == "float32"
        ddp = ddp_config(parallel, grads_in_fp32=in_fp32, fp8_param=megatron.fp8_param)
    vp_stage = index if groups.num_virtual_stages > 1 else None
    spec: Any = block_spec(megatron, architecture, layers, fused_linear=lora is None)
    # With gradients enabled, Megatron would keep a copy of the initial values of FP8 weights, which are loaded next.
    with torch.set_grad_enabled(not megatron.fp8_param):
        gpt = GPTModel(
            megatron,
            spec,
            architecture.padded_vocab_size(groups.tensor.size),
            architecture.max_position_embeddings,
            pre_process=groups.is_first_stage and index == 0,
            post_process=groups.is_last_stage and index == groups.num_virtual_stages - 1,
            share_embeddings_and_output_weights=architecture.tie_word_embeddings,
            position_embedding_type="rope",
            vp_stage=vp_stage,
        )
    decoder: Any = gpt.decoder
    numbers = [layer.layer_number - 1 for layer in decoder.layers]
    assert numbers == [*layers], f"Megatron-Core numbers the layers {layers} as {numbers}"
    _set_rotary_embedding(gpt, architecture)
    if gpt.post_process:
        # The model returns hidden states. Log-probs are computed from them in chunks, so the logits of a whole
        # micro-batch never exist. The output layer is still called, because its hooks gather the weight under
        # overlap_param_gather.
        gpt.output_layer.forward = _pass_on  # pyright: ignore[reportAttributeAccessIssue]
    if architecture.family.linear_biases:
        prepare_expert_biases(gpt)
    gpt = gpt.to(local_device()).requires_grad_(not frozen)
    if config.model.freeze_router:
        for router in _routers(gpt):
            router.requires_grad_(False)
    if lora is not None and not frozen:
        offsets = {"layer_offset": layers.start, "expert_offset": _expert_offset(architecture, groups)}
        attach_adapters(gpt, architecture, lora, groups, **offsets, sp=parallel.sequence_parallel)
    in_dtype = Float16Module(megatron, gpt) if megatron.bf16 else gpt
    freeze_router_biases(gpt)
    wrapped = DistributedDataParallel(
        megatron,
        ddp,
        in_dtype,
        disable_bucketing=index > 0,  # communication of later chunks overlaps with the work of other chunks
    )
    return Chunk(gpt, wrapped, layers.start)


def _set_rotary_embedding(gpt: GPTModel, architecture: Architecture) -> None:
    """Replace Megatron's rotary embedding, which is that of the model or, in latent attention, of each layer."""
    frequencies, factor = rotary(architecture)
    frequencies = frequencies.to(local_device())
    decoder: Any = gpt.decoder
    if architecture.kv_lora_rank:
        for layer in decoder.layers:
            layer.self_attention.rotary_pos_emb = LatentRotaryEmbedding(frequencies, factor)
    else:
        embedding: Any = PackedRotaryEmbedding(frequencies)
        gpt.rotary_pos_emb = embedding


def freeze_router_biases(gpt: GPTModel) -> None:
    """Make the routers' biases frozen parameters in fp32, which are imported and exported as all others.

    Megatron has them as buffers, which it converts to the model's dtype, and moves them to balance the load of the
    experts. Engines that generate rollouts do not, so they stay as they are.
    """
    for router in _routers(gpt):
        if router.expert_bias is not None:
            bias = router.expert_bias.float()
            del router.expert_bias
            router.expert_bias = torch.nn.Parameter(bias, requires_grad=False)
            router.enable_expert_bias = False  # do not count the tokens of each expert


def _routers(gpt: GPTModel) -> list[Any]:
    decoder: Any = gpt.decoder
    return [layer.mlp.router for layer in decoder.layers if hasattr(layer.mlp, "router")]


def _pass_on(hidden: torch.Tensor, **_: Any) -> tuple[torch.Tensor, None]:
    return hidden, None


def _connect_to_schedule(model: PolicyModel, parallel: ParallelConfig) -> None:
    """Configure how Megatron's pipeline schedule sums gradients."""
    # Losses are already normalized by the global minibatch token count, so the schedule divides by nothing.
    model.config.finalize_model_grads_func = lambda chunks, *_, **__: finalize_model_grads(chunks)
    if parallel.overlap_grad_reduce:
        no_sync: Any = [chunk.ddp.no_sync for chunk in model.chunks]
        model.config.no_sync_func = no_sync if len(no_sync) > 1 else no_sync[0]
