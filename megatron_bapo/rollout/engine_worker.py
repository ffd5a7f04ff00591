"""What runs inside vLLM's worker processes, and the faults of vLLM that are worked around there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import nn
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.platforms import current_platform

from megatron_bapo.weight_sync.transport import WeightStore


class WeightLoader:
    """vLLM adds this to its worker class (`worker_extension_cls`); the engine calls it through `collective_rpc`."""

    model_runner: Any

    def load_policy(self, store_folder: str, version: int) -> None:
        """Overwrite the model's weights in place with a committed version of the store, checksums verified."""
        self.model_runner.reload_weights(weights_iterator=WeightStore(Path(store_folder)).read(version))
        if current_platform.is_cpu() and self.model_runner.model_config.hf_config.tie_word_embeddings:
            _repack_tied_lm_head(self.model_runner.get_model())


def _repack_tied_lm_head(model: nn.Module) -> None:
    """Refresh the copy of the embedding that a tied output layer multiplies with.

    vLLM 0.32.0 on CPUs packs each linear weight into a copy. The reload repacks the embedding's alone (limitation 2 in
    vllm/model_executor/model_loader/reload/__init__.py), and the output layer goes on with the old weights, silently.
    Remove this once tests/e2e/test_engine.py passes without it.
    """
    for module in model.modules():
        if isinstance(module, ParallelLMHead):
            module.quant_method.process_weights_after_loading(module)
