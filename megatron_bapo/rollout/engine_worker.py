"""What runs inside vLLM's worker processes, and the faults of vLLM that are worked around there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import nn
from vllm.distributed.parallel_state import get_pp_group, get_tp_group
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.platforms import current_platform

from megatron_bapo.model.weight_layouts import EngineLayout
from megatron_bapo.weight_sync.transport import WeightStore


class WeightLoader:
    """vLLM adds this to its worker class (`worker_extension_cls`); the engine calls it through `collective_rpc`."""

    model_runner: Any

    def verify_policy(self, store_folder: str, version: int) -> int:
        """Compare the checksums of what this worker will read of a committed version; the number of bytes."""
        store = WeightStore(Path(store_folder))
        return store.verify(version, self._reader(store, version))

    def load_policy(self, store_folder: str, version: int) -> None:
        """Overwrite the model's weights in place with this worker's part of a version that was verified.

        vLLM's loaders cut each worker's part out of whole tensors; these are mapped, so that only the part is read.
        """
        store = WeightStore(Path(store_folder))
        if current_platform.is_cpu():
            _forget_expert_kernels(self.model_runner.get_model())
        self.model_runner.reload_weights(weights_iterator=store.read(version, self._reader(store, version)))
        if current_platform.is_cpu() and self.model_runner.model_config.hf_config.tie_word_embeddings:
            _repack_tied_lm_head(self.model_runner.get_model())
        store.manifest(version)  # gone if the version was overwritten meanwhile

    def _reader(self, store: WeightStore, version: int) -> int | None:
        """This worker's number in the plan; None, which stands for all parts, when the plan is for another layout."""
        tensor, pipeline = get_tp_group(), get_pp_group()
        expert_parallel = self.model_runner.vllm_config.parallel_config.enable_expert_parallel
        layout = EngineLayout(tensor.world_size, pipeline.world_size, expert_parallel)
        if store.plan(version).reader_layout != layout.name:
            return None
        return pipeline.rank_in_group * tensor.world_size + tensor.rank_in_group


def _forget_expert_kernels(model: nn.Module) -> None:
    """Have the reload build each layer's expert kernel anew.

    vLLM 0.32.0 on CPUs packs the experts' weights when it builds the kernel; a reload that finds one packs no more, and
    the kernel reads unpacked weights as packed ones (`_setup_kernel` in unquantized_fused_moe_method.py). Remove this
    once tests/e2e/test_engine.py passes without it.
    """
    for module in model.modules():
        method = getattr(module, "quant_method", None)
        if getattr(method, "moe_kernel", None) is not None:
            method.moe_kernel = None  # pyright: ignore[reportOptionalMemberAccess]


def _repack_tied_lm_head(model: nn.Module) -> None:
    """Refresh the copy of the embedding that a tied output layer multiplies with.

    vLLM 0.32.0 on CPUs packs each linear weight into a copy. The reload repacks the embedding's alone (limitation 2 in
    vllm/model_executor/model_loader/reload/__init__.py), and the output layer goes on with the old weights, silently.
    Remove this once tests/e2e/test_engine.py passes without it.
    """
    for module in model.modules():
        if isinstance(module, ParallelLMHead):
            module.quant_method.process_weights_after_loading(module)
