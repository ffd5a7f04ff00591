"""What the planner counts of a Gated DeltaNet is what the layer saves, computes and keeps."""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from megatron_bapo.config.architecture import read_architecture
from megatron_bapo.config.pipeline_layers import layer_flops
from megatron_bapo.model import gated_delta_net
from megatron_bapo.model.delta_rule import CHUNK, gated_delta_rule
from megatron_bapo.model.gated_delta_net import GatedDeltaNet
from megatron_bapo.planning.delta_net import saved_bytes, state_bytes
from megatron_bapo.planning.flops import forward_flops
from megatron_bapo.planning.known_models import FOLDER
from megatron_bapo.planning.rollout_memory import EngineMemory

NEXT = read_architecture(FOLDER / "Qwen3-Next-80B-A3B-Instruct")
DENSE = read_architecture(FOLDER / "Qwen3.5-27B")
SMALL = replace(
    NEXT, linear_num_key_heads=4, linear_num_value_heads=8, linear_key_head_dim=8, linear_value_head_dim=6
)  # fmt: skip


class _Alone:
    """The group of one rank."""

    def size(self) -> int:
        return 1

    def rank(self) -> int:
        return 0


def _layer(dtype: torch.dtype) -> Any:
    """Return what `GatedDeltaNet` has between its projections, which need Megatron's process groups."""
    layer: Any = GatedDeltaNet.__new__(GatedDeltaNet)
    torch.nn.Module.__init__(layer)
    layer.config, layer.tensor_group, layer.context_group = SimpleNamespace(layernorm_epsilon=1e-6), _Alone(), _Alone()
    layer.key_dim, layer.value_dim = SMALL.linear_key_head_dim, SMALL.linear_value_head_dim
    layer.num_heads, layer.ratio = SMALL.linear_num_key_heads, 2
    layer.mixed = 2 * layer.key_dim + layer.ratio * layer.value_dim
    shapes = {
        "conv1d": (4 * layer.mixed, 1, SMALL.linear_conv_kernel_dim),
        "dt_bias": (8,),
        "A_log": (8,),
        "norm": (6,),
    }
    for name, shape in shapes.items():
        setattr(layer, name, torch.nn.Parameter(torch.rand(shape, dtype=dtype)))
    return layer


@pytest.mark.parametrize("length", [24, 64, 200])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_planned_bytes_are_those_that_autograd_saves(
    length: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gated_delta_net, "copy_to_tensor_model_parallel_region", lambda x, group: x.view_as(x))
    layer, found, held = _layer(dtype), {}, []
    x = torch.randn(2 * length, 4, SMALL.linear_in_width // 4, dtype=dtype, requires_grad=True)
    parameters = {each.untyped_storage().data_ptr() for each in layer.parameters()}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        held.append(tensor)
        found[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        layer._mix(x, SimpleNamespace(key_slots=None, num_sequences=2, longest=length))
    saved = sum(size for address, size in found.items() if address not in parameters)
    assert saved_bytes(SMALL, (length, length), 1, dtype.itemsize) == saved


def test_the_planned_flops_are_those_of_the_recurrences_products_and_its_triangular_system() -> None:
    heads, key, value, num_chunks = 3, 16, 8, 4
    arch = replace(NEXT, linear_num_value_heads=heads, linear_key_head_dim=key, linear_value_head_dim=value)
    shape = (1, num_chunks * CHUNK, heads)
    with FlopCounterMode(display=False) as counter:
        gated_delta_rule(
            torch.randn(*shape, key), torch.randn(*shape, key), torch.randn(*shape, value),
            -torch.rand(shape), torch.rand(shape),
        )  # fmt: skip
    solved = num_chunks * heads * CHUNK**2 * (key + value)
    assert arch.recurrence_flops * num_chunks * CHUNK == counter.get_total_flops() + solved


def test_attention_of_a_hybrid_grows_with_the_square_in_its_layers_with_attention_only() -> None:
    _, whole = forward_flops(DENSE, 4096, 4096**2)
    _, twice = forward_flops(DENSE, 8192, 8192**2)
    squares = 2 * 16 * 24 * 256 * 4096**2
    assert twice - 2 * whole == pytest.approx(2 * squares)
    assert whole - squares == 48 * DENSE.recurrence_flops * 4096


def test_the_flops_of_the_layers_are_those_of_the_model() -> None:
    layers, length = sum(layer_flops(DENSE, layer) for layer in range(64)), 4096
    linear, attention = forward_flops(DENSE, length, 2 * length**2)
    outside = 2 * DENSE.vocab_size * DENSE.hidden_size
    assert layers + outside == pytest.approx((linear + attention) / length, rel=1e-3)


def test_a_sequences_state_is_that_of_vllms_cache() -> None:
    of_recurrence, of_convolution = 48 * 128 * 128, 3 * (2 * 16 * 128 + 48 * 128)
    assert state_bytes(DENSE, 1, 2) == 4 * of_recurrence + 2 * of_convolution
    assert state_bytes(DENSE, 4, 2) * 4 == state_bytes(DENSE, 1, 2)
    assert state_bytes(NEXT, 1, 2) == 4 * 32 * 128 * 128 + 2 * 3 * (2 * 16 * 128 + 32 * 128)


def test_states_take_room_of_the_kv_cache() -> None:
    engine = EngineMemory(0, 0, kv_cache=10_000, kv_per_token=10, max_model_len=100, sharing=1, state_bytes=500)
    assert math.isclose(engine.state_tokens, 50.0)
    assert engine.kv_tokens == 1000
