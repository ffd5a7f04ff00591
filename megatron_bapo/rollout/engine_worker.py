"""Code that runs inside vLLM's worker processes: weight updates, and workarounds for faults of vLLM.

In vLLM 0.32's weight transfer (vllm/distributed/weight_transfer) workers start an update, receive weights and finish;
start undoes each layer's packing, sharding and quantization, and finish does them again. This file implements its
`WeightTransferEngine` with the project's weight sources.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import nn
from vllm.distributed.parallel_state import get_pp_group, get_tp_group
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.platforms import current_platform

from megatron_bapo.config.architecture import read_architecture
from megatron_bapo.errors import RunError
from megatron_bapo.model.hf_table import EMBEDDING, OUTPUT_LAYER
from megatron_bapo.model.stacked_experts import for_engine
from megatron_bapo.model.weight_layouts import EngineLayout
from megatron_bapo.parallel.platform import release_cached_memory
from megatron_bapo.rollout.engine_adapters import replace_adapter
from megatron_bapo.rollout.route_recorder import RouteRecorder
from megatron_bapo.rollout.weight_sources import WeightSource, read_frozen_tensors, weight_source
from megatron_bapo.weight_sync.route import TransferGroup, WeightRoute

BACKEND = "megatron_bapo"
SINKS = ".sinks"
"""End of the names of attention sinks."""


@dataclass
class RouteInfo(WeightTransferInitInfo):
    route: dict[str, Any]


@dataclass
class VersionInfo(WeightTransferUpdateInfo):
    version: int


class PolicyReceiver(WeightTransferEngine[RouteInfo, VersionInfo]):
    """Overwrites a worker's weights in place with its part of a policy version."""

    init_info_cls = RouteInfo
    update_info_cls = VersionInfo
    source: WeightSource

    def init_transfer_engine(self, init_info: RouteInfo) -> None:
        tensor, pipeline = get_tp_group(), get_pp_group()
        layout = EngineLayout(
            tensor.world_size, pipeline.world_size, self.vllm_config.parallel_config.enable_expert_parallel
        )
        rank = pipeline.rank_in_group * tensor.world_size + tensor.rank_in_group
        route = WeightRoute.from_json(init_info.route).on_node(self.vllm_config.parallel_config.node_rank)
        self.source = weight_source(route, layout, rank, self.device)
        architecture = read_architecture(Path(self.model_config.model))
        self._family = architecture.family
        hf_config = self.model_config.hf_config
        self._repeats_embedding = architecture.tie_word_embeddings and not hf_config.tie_word_embeddings
        # The trainer does not send them, but an engine that has slept at level 2 has lost them like all others.
        self._frozen = read_frozen_tensors(Path(self.model_config.model))

    def start_weight_update(self) -> None:
        if current_platform.is_cpu():
            _forget_expert_kernels(self.model)
        initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self.receive_weights(self.parse_update_info(update_info))
        if not current_platform.is_cpu():
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: VersionInfo) -> None:
        """Load whole tensors; vLLM's weight loaders select this worker's parts."""
        self._version = update_info.version
        tensors = chain(self._frozen.items(), self.source.read(self._version))
        sinks: dict[str, torch.Tensor] = {}
        if self._family.attention_sinks:
            tensors = _without_sinks(tensors, sinks)
        if self._family.stacked_experts:
            tensors = for_engine(tensors)
        if self._repeats_embedding:
            tensors = _with_output_layer(tensors)
        self.model.load_weights(tensors)  # pyright: ignore[reportCallIssue]
        if self._family.attention_sinks:
            _load_sinks(self.model, sinks)

    def finish_weight_update(self) -> None:
        finalize_layerwise_reload(self.model, self.model_config)
        if current_platform.is_cpu() and self.model_config.hf_config.tie_word_embeddings:
            _repack_tied_lm_head(self.model)
        self.source.finish(self._version)
        release_cached_memory()

    def shutdown(self) -> None:
        pass


WeightTransferEngineFactory.register_engine(BACKEND, PolicyReceiver)


class WeightLoader:
    """Mixin that vLLM adds to its worker class (`worker_extension_cls`); called through `collective_rpc`."""

    weight_transfer_engine: PolicyReceiver
    model_runner: Any
    _routes: RouteRecorder

    def record_routes(self) -> None:
        """Begin to record the routes of requests that ask for it, unless this worker does already; only on CPUs."""
        if not hasattr(self, "_routes"):
            self._routes = RouteRecorder(self.model_runner)

    def take_routes(self, request_id: str) -> list[tuple[int, tuple[int, ...], bytes]]:
        """Return the routes of a request: index of the completion, shape and bytes of `RouteRecorder.take`'s arrays.

        vLLM 0.32.0 returns arrays from its workers only with insecure serialization.
        """
        return [(index, routes.shape, routes.tobytes()) for index, routes in self._routes.take(request_id).items()]

    def divide_logits(self, divisor: float) -> None:
        """Divide all logits by `divisor` from now on: vLLM applies no temperature to the log-probs of prompts."""
        for module in self.model_runner.get_model().modules():
            if isinstance(module, LogitsProcessor):
                module.scale /= divisor

    def verify_policy(self, version: int, group: str | None) -> int | str:
        """Check the parts of a version that this worker will read; return their bytes, or an error message.

        `group` is the JSON of the group that transfers the version.

        Errors are returned, not raised: vLLM 0.32.0 raises the first worker's exception at once, and then takes the
        other workers' results for those of the next call (collective_rpc in vllm/v1/executor/multiproc_executor.py).
        """
        try:
            parsed = None if group is None else TransferGroup.from_json(group)
            return self.weight_transfer_engine.source.verify(version, parsed)
        except RunError as error:
            return str(error)

    def load_adapters(self, version: int, scale: float) -> None:
        """Replace this worker's adapter by that of a version, which consists of adapters; `scale` is their factor.

        Raises RunError if the adapter does not fit the model, or if the version was overwritten meanwhile.
        """
        source = self.weight_transfer_engine.source
        replace_adapter(self.model_runner, source.read(version), scale)
        if not current_platform.is_cpu():
            torch.accelerator.synchronize()
        source.finish(version)


def _forget_expert_kernels(model: nn.Module) -> None:
    """Make the reload build each layer's expert kernel again.

    vLLM 0.32.0 on CPUs packs the experts' weights when it builds the kernel. A reload that finds a kernel does not pack
    them again, and the kernel reads unpacked weights as packed ones (`_setup_kernel` in
    unquantized_fused_moe_method.py). Remove this once tests/e2e/test_engine.py passes without it.
    """
    for module in model.modules():
        method = getattr(module, "quant_method", None)
        if getattr(method, "moe_kernel", None) is not None:
            method.moe_kernel = None  # pyright: ignore[reportOptionalMemberAccess]


def _with_output_layer(tensors: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield all tensors, and the embedding a second time as the output layer that it is tied to.

    vLLM 0.32 builds an output layer of its own if the checkpoint repeats the embedding as one, whatever config.json
    says (`maybe_untie_word_embeddings` in vllm/config/model.py), and would silently keep the old one.
    """
    for name, tensor in tensors:
        yield name, tensor
        if name == EMBEDDING:
            yield OUTPUT_LAYER, tensor


def _without_sinks(
    tensors: Iterable[tuple[str, torch.Tensor]], sinks: dict[str, torch.Tensor]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield all tensors but attention sinks, which are put into `sinks`."""
    for name, tensor in tensors:
        if name.endswith(SINKS):
            sinks[name] = tensor.clone()
        else:
            yield name, tensor


def _load_sinks(model: nn.Module, sinks: dict[str, torch.Tensor]) -> None:
    """Load this worker's attention sinks during a reload.

    vLLM 0.32.0 copies them into the parameter itself (gpt_oss.py), which is then on the meta device, instead of calling
    its weight loader, so it would silently keep the old ones. Remove this once tests/e2e/test_weight_sync.py passes
    without it.
    """
    rank, size = get_tp_group().rank_in_group, get_tp_group().world_size
    own: dict[str, Any] = {name: each for name, each in model.named_parameters() if name.endswith(SINKS)}
    assert own, "vLLM's model has no attention sinks"
    for name, parameter in own.items():
        values = sinks[name.replace(".attn.", ".self_attn.")].chunk(size)[rank]
        parameter.weight_loader(parameter, values)


def _repack_tied_lm_head(model: nn.Module) -> None:
    """Update the packed copy of the embedding that a tied output layer multiplies with.

    vLLM 0.32.0 on CPUs packs each linear weight into a copy. The reload repacks only the embedding's copy (limitation 2
    in vllm/model_executor/model_loader/reload/__init__.py), so the output layer would silently keep the old weights.
    Remove this once tests/e2e/test_engine.py passes without it.
    """
    for module in model.modules():
        if isinstance(module, ParallelLMHead):
            module.quant_method.process_weights_after_loading(module)
