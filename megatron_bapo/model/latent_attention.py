"""Multi-head latent attention: Megatron's module with down-projections that every tensor-parallel rank has whole."""

from __future__ import annotations

from typing import Any

import torch

from megatron_bapo.parallel.megatron import ColumnParallelLinear, MLASelfAttention, MLATransformerConfig


class ReplicatedLinear(torch.nn.Linear):
    """A linear layer on this rank's tokens, in Megatron's interface; tags the weight for the gradient sum."""

    def __init__(self, num_inputs: int, num_outputs: int, config: MLATransformerConfig) -> None:
        super().__init__(num_inputs, num_outputs, bias=False, dtype=config.params_dtype)
        self.weight.sequence_parallel = config.sequence_parallel  # pyright: ignore[reportAttributeAccessIssue]

    def forward(self, input: torch.Tensor) -> tuple[torch.Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return super().forward(input), None


class LatentAttention(MLASelfAttention):
    """Megatron's multi-head latent attention.

    Its local spec splits the down-projections over tensor-parallel ranks and gathers their output. The gradient of the
    key that all heads share is then that of the rank's own heads (Megatron-Core 0.16.1 and 0.19.2:
    `gather_from_tensor_model_parallel_region` in `get_query_key_value_tensors`, whose backward pass sums nothing). With
    whole down-projections under sequence parallelism, as in Transformer Engine's spec, gradients are summed.
    """

    def __init__(self, config: MLATransformerConfig, submodules: Any, *args: Any, **settings: Any) -> None:
        super().__init__(config, submodules, *args, **settings)
        if submodules.linear_kv_down_proj is ColumnParallelLinear:
            widths = config.kv_lora_rank + config.qk_pos_emb_head_dim, config.q_lora_rank
            self.linear_kv_down_proj = ReplicatedLinear(config.hidden_size, widths[0], config)
            if widths[1]:
                self.linear_q_down_proj = ReplicatedLinear(config.hidden_size, widths[1], config)

    def _resolve_qk_norm_config(self, submodules: Any) -> dict[str, Any]:
        """Return the modules of the spec.

        Megatron-Core 0.19.2 would put a norm before queries that are not compressed.
        """
        names = ("linear_q_proj", "linear_q_up_proj", "linear_kv_up_proj", "q_layernorm", "kv_layernorm")
        return {name: getattr(submodules, name) for name in names}
