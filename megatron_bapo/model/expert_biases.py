"""Prepares Megatron's experts for biases: its local layers fail with them, and its sums of gradients are wrong."""

from __future__ import annotations

from typing import Any

import torch

from megatron_bapo.parallel.megatron import GPTModel


def prepare_expert_biases(gpt: GPTModel) -> None:
    """Correct the layers of a model whose experts have biases, and mark the parameters that differ between ranks.

    Megatron-Core 0.16.1 and 0.19.2 treat the bias of an expert's second layer as one that all tensor-parallel ranks
    share: they add up its gradients over ranks, which have different experts, and count it in the gradient norm on the
    first rank only (`RowParallelLinear` in tensor_parallel/layers.py). The sinks of a rank's heads are not counted on
    the other ranks either.
    """
    for name, module in gpt.named_modules():
        if ".local_experts." in name and name.endswith(".linear_fc2"):
            module.register_forward_hook(_own_memory)
    for name, parameter in gpt.named_parameters():
        of_rank: Any = parameter
        if ".experts." in name:
            of_rank.sequence_parallel = False
        if ".experts." in name or name.endswith(".softmax_offset"):
            of_rank.tensor_model_parallel = True


def _own_memory(
    _linear: torch.nn.Module, _inputs: tuple[Any, ...], outputs: tuple[torch.Tensor, Any]
) -> tuple[torch.Tensor, Any]:
    """Return a copy of the output, to which Megatron adds the bias in place.

    Autograd refuses that for what `reduce_from_tensor_model_parallel_region` returns (Megatron-Core 0.16.1, mlp.py,
    line 247: `output += output_bias.unsqueeze(0) * per_token_scale.unsqueeze(-1)`; the same in 0.19.2).
    """
    return outputs[0].clone(), outputs[1]
