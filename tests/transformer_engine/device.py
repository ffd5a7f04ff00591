"""What lets Transformer Engine's modules be built and called without a GPU: the functions that need one are replaced.

Its libraries are loaded as they are, and no CUDA driver stands in for the missing one. Only these do not run: the check
that there is a GPU, the kernels, and the question for the GPU's compute capability.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from types import ModuleType
from typing import Any
from unittest.mock import patch

import torch
import transformer_engine.pytorch as te
import transformer_engine_torch
from transformer_engine.pytorch import quantization
from transformer_engine.pytorch.attention.dot_product_attention import dot_product_attention
from transformer_engine.pytorch.module import base
from transformer_engine.pytorch.tensor import Float8CurrentScalingQuantizer, Float8Quantizer

HOPPER = (9, 0)
CPU = torch.device("cpu")
PER_TENSOR = (Float8Quantizer, Float8CurrentScalingQuantizer)
"""Quantizers with one scale for a tensor."""


@dataclass(frozen=True)
class Call:
    """A call of one of Transformer Engine's functions, with its arguments by name."""

    function: str
    """Name of the function, or of the module whose forward it is."""
    arguments: dict[str, Any]


def _copy(module: ModuleType, **replaced: Any) -> ModuleType:
    copy = ModuleType(module.__name__)
    copy.__dict__.update(module.__dict__, **replaced)
    copy.__dict__["__getattr__"] = lambda name: getattr(module, name)
    return copy


def _quantized(tensor: torch.Tensor, quantizer: Any, *_: Any) -> Any:
    """Return what Transformer Engine's kernel writes to, without values."""
    if isinstance(quantizer, PER_TENSOR):  # allocated in C++, which needs a driver
        data = torch.empty(tensor.shape, dtype=torch.uint8, device=tensor.device)
        return quantizer.create_tensor_from_data(data, tensor.dtype)
    return quantizer.make_empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)


@contextmanager
def modules_on_the_cpu() -> Iterator[None]:
    """Let modules be built on the CPU. Parameters in FP8 have their classes and shapes, and no values."""
    cuda = _copy(torch.cuda, is_available=lambda: True)
    with ExitStack() as stack:
        stack.enter_context(patch.object(base, "torch", _copy(torch, cuda=cuda)))
        # Attention sinks.
        zeros = _copy(torch, zeros=lambda *size, device: torch.zeros(*size, device=CPU))
        stack.enter_context(patch.object(dot_product_attention, "torch", zeros))
        stack.enter_context(patch.object(transformer_engine_torch, "quantize", _quantized))
        create = partial(quantization.RecipeState.create, device=CPU)
        stack.enter_context(patch.object(quantization.RecipeState, "create", create))
        stack.enter_context(patch.object(quantization, "get_device_compute_capability", lambda: HOPPER))
        yield


def _linear(self: Any, inp: torch.Tensor, **_: Any) -> Any:
    rows, weights = inp.size(0), [*self.parameters()]
    if self.sequence_parallel and self.parallel_mode == "column":
        rows *= self.tp_size
    elif self.sequence_parallel and self.parallel_mode == "row":
        rows //= self.tp_size
    out = inp.new_zeros(rows, *inp.shape[1:-1], weights[-1].size(0))
    return (out, self.bias) if self.return_bias else out


def _grouped(self: Any, inp: torch.Tensor, m_splits: Any, **_: Any) -> Any:
    assert len(m_splits) == self.num_gemms
    assert sum(m_splits) == inp.size(0)
    out = inp.new_zeros(inp.size(0), self.weight0.size(0))
    return (out, [getattr(self, f"bias{i}") for i in range(self.num_gemms)]) if self.return_bias else out


def _attention(self: Any, query_layer: torch.Tensor, key_layer: torch.Tensor, **_: Any) -> torch.Tensor:
    assert query_layer.size(1) == self.num_attention_heads // self.tp_size
    assert key_layer.size(1) == self.num_gqa_groups_per_partition
    return torch.zeros_like(query_layer).flatten(1)


def _product(A: torch.Tensor, B: torch.Tensor, out_dtype: torch.dtype, layout: str, **_: Any) -> list[torch.Tensor]:
    assert layout == "TN"
    return [B.to(out_dtype) @ A.to(out_dtype).T]


def _kernels() -> Iterator[tuple[Any, str, Callable[..., Any]]]:
    """Yield the owner and name of every function with a kernel that our layers call, and what takes its place."""
    from megatron.core.extensions import transformer_engine as wrappers

    yield te.Linear, "forward", _linear
    yield te.LayerNormLinear, "forward", _linear
    yield te.RMSNorm, "forward", lambda self, input, **_: torch.zeros_like(input)
    yield te.GroupedLinear, "forward", _grouped
    yield te.DotProductAttention, "forward", _attention
    yield wrappers, "apply_rotary_pos_emb", lambda t, **_: torch.zeros_like(t)
    yield wrappers, "general_gemm", _product


@contextmanager
def bound_kernels() -> Iterator[list[Call]]:
    """Replace kernels by zeros of their shape and return the calls, each bound to the function's own signature.

    A keyword that the function does not take raises TypeError.
    """
    calls: list[Call] = []

    def checked(name: str, function: Callable[..., Any], result: Callable[..., Any]) -> Callable[..., Any]:
        signature = inspect.signature(function)

        def call(*args: Any, **kwargs: Any) -> Any:
            arguments = signature.bind(*args, **kwargs).arguments
            calls.append(Call(name, dict(arguments)))
            return result(**arguments)

        return call

    with ExitStack() as stack:
        for owner, name, result in [*_kernels()]:
            label = owner.__name__ if name == "forward" else name
            stack.enter_context(patch.object(owner, name, checked(label, getattr(owner, name), result)))
        yield calls
