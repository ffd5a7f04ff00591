"""The gated delta rule and the layer around it against transformers, which reads one token after another."""

import copy
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from transformers import Qwen3_5TextConfig
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5GatedDeltaNet, torch_recurrent_gated_delta_rule

from megatron_bapo.model.delta_rule import CHUNK, gated_delta_rule
from megatron_bapo.model.gated_delta_net import DeltaNetSubmodules, GatedDeltaNet
from megatron_bapo.model.hf_import import local_tensor
from megatron_bapo.model.hf_mapping import lookup
from megatron_bapo.model.packed_attention import SharedTokens, packed_sequences
from megatron_bapo.parallel.megatron import TransformerConfig
from tests.tolerances import GRADIENT, LOG_PROB
from tests.unit.model.shards import architecture

# Megatron-Core 0.16 warns about its own default.
pytestmark = pytest.mark.filterwarnings("ignore:full scope is deprecated:UserWarning")
CPU = torch.device("cpu")
HEADS = {"linear_num_key_heads": 2, "linear_num_value_heads": 4}
WIDTHS = {"linear_key_head_dim": 5, "linear_value_head_dim": 3, "linear_conv_kernel_dim": 4}
HIDDEN = 16


def random_inputs(length: int, generator: torch.Generator, num_sequences: int = 2) -> list[torch.Tensor]:
    """Return queries and keys of length 1, values, decays in log space and betas, all with gradients."""
    shape = num_sequences, length, 3
    query, key = (torch.randn(*shape, 5, generator=generator) for _ in range(2))
    value, beta = torch.randn(*shape, 4, generator=generator), torch.rand(shape, generator=generator)
    decay = -2 * torch.rand(shape, generator=generator) ** 4  # from keeping all to keeping a seventh
    normalized = (torch.nn.functional.normalize(x, dim=-1) for x in (query, key))
    return [x.detach().requires_grad_() for x in (*normalized, value, decay, beta)]


@pytest.mark.parametrize("length", [1, 7, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK + 5])
def test_the_rule_in_chunks_is_that_of_one_token_after_another(length: int) -> None:
    inputs = random_inputs(length, torch.Generator().manual_seed(length))
    reference = [x.detach().clone().requires_grad_() for x in inputs]
    weights = torch.randn(2, length, 3, 4, generator=torch.Generator().manual_seed(1))

    out = gated_delta_rule(*inputs)
    expected, _ = torch_recurrent_gated_delta_rule(*reference[:3], g=reference[3], beta=reference[4])
    (out * weights).sum().backward()
    (expected * weights).sum().backward()

    assert (out - expected).abs().max() < LOG_PROB * max(1, expected.abs().max())
    for ours, theirs in zip(inputs, reference, strict=True):
        assert ours.grad is not None
        assert theirs.grad is not None
        assert (ours.grad - theirs.grad).abs().max() <= GRADIENT * theirs.grad.abs().max()


def test_states_that_forget_everything_within_a_chunk_give_finite_gradients() -> None:
    inputs = random_inputs(2 * CHUNK, torch.Generator().manual_seed(0))
    inputs[3] = torch.full_like(inputs[3], -100.0).requires_grad_()

    gated_delta_rule(*inputs).sum().backward()

    assert all(x.grad is not None and x.grad.isfinite().all() for x in inputs)


class Linear(torch.nn.Linear):
    """A linear layer in Megatron's interface."""

    def __init__(self, num_inputs: int, num_outputs: int, **_: Any) -> None:
        super().__init__(num_inputs, num_outputs, bias=False)

    def forward(self, input: torch.Tensor) -> tuple[torch.Tensor, None]:
        return super().forward(input), None


@pytest.fixture
def one_rank(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def layers(one_rank: None) -> tuple[GatedDeltaNet, Qwen3_5GatedDeltaNet]:
    """Return our layer and that of transformers with the same weights."""
    torch.manual_seed(0)
    reference = Qwen3_5GatedDeltaNet(Qwen3_5TextConfig(hidden_size=HIDDEN, **HEADS, **WIDTHS), 0)
    with torch.no_grad():
        reference.A_log.sub_(1)
        reference.norm.weight.add_(0.1 * torch.randn(3))
        reference.conv1d.weight.mul_(5)
    config = TransformerConfig(
        num_layers=1, hidden_size=HIDDEN, num_attention_heads=1, layernorm_epsilon=1e-6, **HEADS, **WIDTHS
    )
    one: Any = SimpleNamespace(size=lambda: 1, rank=lambda: 0)
    ours = GatedDeltaNet(config, DeltaNetSubmodules(Linear, Linear), 1, pg_collection=SimpleNamespace(tp=one, cp=one))
    arch = architecture("qwen3_5_text", hidden_size=HIDDEN, **HEADS, **WIDTHS)
    tensors = reference.state_dict()
    for name, parameter in ours.named_parameters():
        entry = lookup(f"decoder.layers.0.self_attention.{name}", arch)
        sources = [tensors[each.removeprefix("model.layers.0.linear_attn.")] for each in entry.names]
        parameter.data.copy_(local_tensor(entry, arch, sources, 0, 1))
    return ours, reference


def test_packed_sequences_are_computed_as_transformers_computes_each_of_them(layers: tuple[Any, Any]) -> None:
    ours, reference = layers
    lengths = (70, 66, 20, 3, 1)  # in three batches
    hidden = torch.randn(sum(lengths), 1, HIDDEN)
    expected = torch.cat([reference(x[None, :, 0])[0] for x in hidden.split(lengths)])

    out, bias = ours(hidden, None, packed_seq_params=packed_sequences(lengths, 0, 1, CPU))

    assert bias is None
    assert (out[:, 0] - expected).abs().max() < LOG_PROB * max(1, expected.abs().max())


def test_sequences_that_share_tokens_are_computed_as_if_each_had_its_own(layers: tuple[Any, Any]) -> None:
    ours, _ = layers
    lengths = (9, 8)
    token_U = np.array([*range(9), *range(5), 9, 10, 11])  # the second sequence begins with five tokens of the first
    hidden_T = torch.randn(12, 1, HIDDEN)
    shared = SharedTokens.of(token_U, CPU)
    assert shared is not None

    out_T, _ = ours(hidden_T, None, packed_seq_params=packed_sequences(lengths, 0, 1, CPU, shared))
    out_U, _ = ours(hidden_T[token_U], None, packed_seq_params=packed_sequences(lengths, 0, 1, CPU))

    assert torch.allclose(out_T[token_U], out_U, atol=LOG_PROB, rtol=0)


def test_a_recomputed_layer_has_the_same_gradients(layers: tuple[Any, Any]) -> None:
    ours, _ = layers
    again = copy.deepcopy(ours)
    again.config.recompute_granularity, again.config.recompute_modules = "selective", ["core_attn"]
    hidden, packed = torch.randn(24, 1, HIDDEN), packed_sequences((16, 8), 0, 1, CPU)
    for layer in (ours, again):
        layer(hidden, None, packed_seq_params=packed)[0].square().sum().backward()

    for (name, mine), theirs in zip(ours.named_parameters(), again.parameters(), strict=True):
        assert torch.equal(mine.grad, theirs.grad), name
