import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from megatron_bapo.model.packed_attention import (
    PackedAttention,
    PackedRotaryEmbedding,
    SharedTokens,
    longest_bound,
    packed_sequences,
)
from megatron_bapo.parallel.megatron import TransformerConfig
from tests.tolerances import GRADIENT, LOG_PROB

# Megatron-Core 0.16 warns about its own default.
pytestmark = pytest.mark.filterwarnings("ignore:full scope is deprecated:UserWarning")
HEAD_DIM = 8
CPU = torch.device("cpu")


def attention(
    num_heads: int, num_groups: int, softmax_scale: float | None = None, *, layer: int = 1, **settings: Any
) -> PackedAttention:
    config = TransformerConfig(
        num_layers=1, hidden_size=16, num_attention_heads=num_heads, num_query_groups=num_groups, kv_channels=HEAD_DIM,
        **settings,
    )  # fmt: skip
    one = SimpleNamespace(size=lambda: 1)
    groups = SimpleNamespace(cp=None, tp=one)
    return PackedAttention(config, layer, softmax_scale=softmax_scale, pg_collection=groups)


def attend(module: PackedAttention, inputs: list[torch.Tensor], lengths: list[int]) -> torch.Tensor:
    """Run attention with Megatron's shapes, which have a batch axis of 1."""
    batched = [x_TND[:, None] for x_TND in inputs]
    return module(*batched, None, packed_seq_params=packed_sequences(lengths, 0, 1, CPU)).squeeze(1)


def reference(
    query_THD: torch.Tensor,
    key_TGD: torch.Tensor,
    value_TGD: torch.Tensor,
    lengths: list[int],
    scale: float,
    *,
    sink_H: torch.Tensor | None = None,
    window: int = 1 << 30,
) -> torch.Tensor:
    """Compute attention token by token: each head attends to the earlier tokens of the same sequence.

    It attends to the last `window` ones, and to a sink without a value.
    """
    heads_per_group = query_THD.size(1) // key_TGD.size(1)
    out, start = [], 0
    for length in lengths:
        for t in range(start, start + length):
            heads = []
            for head in range(query_THD.size(1)):
                past = (slice(max(start, t + 1 - window), t + 1), head // heads_per_group)
                scores = scale * (key_TGD[past] @ query_THD[t, head])
                if sink_H is None:
                    weights = torch.softmax(scores, 0)
                else:
                    weights = torch.softmax(torch.cat([scores, sink_H[head, None]]), 0)[:-1]
                heads.append(weights @ value_TGD[past])
            out.append(torch.cat(heads))
        start += length
    return torch.stack(out)


def test_transformer_engine_gets_the_boundaries_of_the_sequences_of_all_ranks():
    of_ranks = [packed_sequences([16, 8, 8], rank, 2, CPU) for rank in range(2)]
    for packed in of_ranks:
        thd = packed.thd
        assert thd.qkv_format == "thd"
        assert thd.cu_seqlens_q.tolist() == thd.cu_seqlens_kv_padded.tolist() == [0, 16, 24, 32]
        assert thd.cu_seqlens_q.dtype == torch.int32
        assert (thd.max_seqlen_q, thd.max_seqlen_kv) == (128, 128)
        assert getattr(thd, "pad_between_seqs", False) is False  # with None, Transformer Engine would read the device
    positions = torch.cat([packed.positions_T for packed in of_ranks])
    assert positions.numel() == 32


@pytest.mark.parametrize(
    "lengths",
    [[7], [4, 4, 4], [9, 8, 7, 3, 1], [5, 1, 9, 3]],
    ids=["one sequence", "equal lengths", "falling lengths", "any order"],
)
@pytest.mark.parametrize("num_groups", [4, 2, 1])
def test_output_and_gradients_match_plain_attention_over_each_sequence(lengths, num_groups):
    generator = torch.Generator().manual_seed(0)
    shapes = [(sum(lengths), heads, HEAD_DIM) for heads in (4, num_groups, num_groups)]
    ours = [torch.randn(shape, generator=generator).requires_grad_() for shape in shapes]
    exact = [tensor.detach().double().requires_grad_() for tensor in ours]
    weights = torch.randn(sum(lengths), 4 * HEAD_DIM, generator=generator)

    out = attend(attention(4, num_groups), ours, lengths)
    expected = reference(*exact, lengths, 1 / math.sqrt(HEAD_DIM))
    (out * weights).sum().backward()
    (expected * weights).sum().backward()

    torch.testing.assert_close(out.double(), expected, atol=LOG_PROB, rtol=0.0)
    for mine, theirs in zip(ours, exact, strict=True):
        assert mine.grad is not None
        assert theirs.grad is not None
        assert (mine.grad - theirs.grad).abs().max() < GRADIENT * theirs.grad.abs().max()


@pytest.mark.parametrize("lengths", [[7], [4, 4, 4], [9, 8, 7, 3, 1]])
@pytest.mark.parametrize(("sinks", "window"), [(True, None), (False, 3), (True, 3), (True, 1)])
def test_sinks_and_windows_match_plain_attention_with_their_gradients(lengths, sinks, window):
    generator = torch.Generator().manual_seed(0)
    ours = [torch.randn(sum(lengths), heads, HEAD_DIM, generator=generator).requires_grad_() for heads in (4, 2, 2)]
    sink_H = torch.randn(4, generator=generator)
    weights = torch.randn(sum(lengths), 4 * HEAD_DIM, generator=generator)
    settings: dict[str, Any] = {"softmax_type": "learnable"} if sinks else {}
    if window is not None:
        settings |= {"window_size": (window - 1, 0), "window_attn_skip_freq": [1, 0]}
    exact = [tensor.detach().double().requires_grad_() for tensor in (*ours, sink_H)]

    core = attention(4, 2, softmax_scale=0.3, **settings)
    if core.softmax_offset is not None:
        core.softmax_offset.data.copy_(sink_H)
        ours.append(core.softmax_offset)
    out = attend(core, ours[:3], lengths)
    keywords = {"sink_H": exact[3]} if sinks else {}
    expected = reference(*exact[:3], lengths, 0.3, window=window or 1 << 30, **keywords)
    (out * weights).sum().backward()
    (expected * weights).sum().backward()

    torch.testing.assert_close(out.double(), expected, atol=LOG_PROB, rtol=0.0)
    assert len(ours) == 3 + sinks
    for mine, theirs in zip(ours, exact, strict=False):
        assert mine.grad is not None
        assert theirs.grad is not None
        assert (mine.grad - theirs.grad).abs().max() < GRADIENT * theirs.grad.abs().max()
    assert attention(4, 2, layer=2, **settings).window is None


def test_sinks_of_a_bfloat16_model_are_not_rounded_by_the_softmax_scale():
    """One bfloat16 number for sink / scale would change a sink of 20 by up to 0.04."""
    generator = torch.Generator().manual_seed(0)
    inputs = [torch.zeros(6, 2, HEAD_DIM), torch.zeros(6, 2, HEAD_DIM), torch.ones(6, 2, HEAD_DIM)]
    core = attention(2, 2, softmax_scale=0.3, softmax_type="learnable", params_dtype=torch.bfloat16)
    assert core.softmax_offset is not None
    core.softmax_offset.data.copy_(torch.tensor([20.125, -19.875]))
    inputs[1][..., 0] = 20 + torch.rand(6, 2, generator=generator)
    inputs[0][..., 0] = 3.25
    rounded = [tensor.bfloat16() for tensor in inputs]

    out = attend(core, rounded, [6])

    sink_H = core.softmax_offset.detach().double()
    expected = reference(*(tensor.double() for tensor in rounded), [6], 0.3, sink_H=sink_H)
    torch.testing.assert_close(out.double(), expected, atol=4e-3, rtol=0.0)


def test_sequences_that_share_their_first_tokens_match_sequences_that_repeat_them():
    token_U = np.array([0, 1, 2, 3, 4, 0, 1, 5, 6, 7])  # lengths 5, 4 and 1; the first two share 0 and 1
    lengths, generator = [5, 4, 1], torch.Generator().manual_seed(3)
    shared = [torch.randn(8, heads, HEAD_DIM, generator=generator).requires_grad_() for heads in (4, 2, 2)]
    repeated = [tensor.detach().double()[token_U].requires_grad_() for tensor in shared]
    weights = torch.randn(8, 4 * HEAD_DIM, generator=generator)
    packed = packed_sequences(lengths, 0, 1, CPU, SharedTokens.of(token_U, CPU))

    out = attention(4, 2)(*(x[:, None] for x in shared), None, packed_seq_params=packed).squeeze(1)
    expected = reference(*repeated, lengths, 1 / math.sqrt(HEAD_DIM))[[0, 1, 2, 3, 4, 7, 8, 9]]
    (out * weights).sum().backward()
    (expected * weights).sum().backward()

    assert packed.positions_T.tolist() == [0, 1, 2, 3, 4, 2, 3, 0]
    torch.testing.assert_close(out.double(), expected, atol=LOG_PROB, rtol=0.0)
    for mine, theirs in zip(shared, repeated, strict=True):
        assert mine.grad is not None
        assert theirs.grad is not None
        summed = torch.zeros_like(mine, dtype=torch.float64).index_add(0, torch.from_numpy(token_U), theirs.grad)
        assert (mine.grad - summed).abs().max() < GRADIENT * summed.abs().max()


def test_a_softmax_scale_of_the_model_replaces_the_usual_one():
    generator = torch.Generator().manual_seed(1)
    inputs = [torch.randn(6, 2, HEAD_DIM, generator=generator) for _ in range(3)]

    out = attend(attention(2, 2, softmax_scale=0.9), inputs, [6])

    expected = reference(*(x.double() for x in inputs), [6], 0.9)
    torch.testing.assert_close(out.double(), expected, atol=LOG_PROB, rtol=0.0)


def test_the_content_of_one_sequence_does_not_affect_another():
    generator = torch.Generator().manual_seed(2)
    query, key, value = (torch.randn(8, 2, HEAD_DIM, generator=generator) for _ in range(3))
    core = attention(2, 2)
    before = attend(core, [query, key, value], [5, 3])

    key[:5] = value[:5] = 1e3
    after = attend(core, [query, key, value], [5, 3])

    assert torch.equal(before[5:], after[5:])
    assert not torch.equal(before[:5], after[:5])


def test_context_parallel_ranks_see_the_keys_up_to_each_of_their_tokens():
    lengths, size = [16, 12, 12, 4], 2
    parts = [packed_sequences(lengths, rank, size, CPU) for rank in range(size)]

    batches = list(zip(*(part.batches for part in parts), strict=True))
    assert [batch.num_sequences for batch, _ in batches] == [3, 1]
    for of_ranks in batches:
        for part, batch in zip(parts, of_ranks, strict=True):
            positions = part.positions_T[batch.tokens]
            slots = torch.arange(positions.numel()) if batch.query_slots is None else batch.query_slots
            visible = batch.visible_B1QL(CPU, None, sinks=False)
            assert visible is not None
            assert torch.equal(visible.sum(-1).flatten()[slots], positions + 1)
        assert batch.key_slots is not None
        assert batch.key_slots.unique().numel() == batch.key_slots.numel() == 2 * positions.numel()


def test_rotary_angles_follow_the_positions_in_float32_even_in_a_bfloat16_model():
    frequencies = torch.tensor([1.0, 0.3])
    packed = packed_sequences([3, 2], 0, 1, CPU)

    angles = PackedRotaryEmbedding(frequencies).bfloat16()(packed.positions_T)

    assert angles.dtype == torch.float32
    expected = np.outer([0, 1, 2, 0, 1], frequencies.double().repeat(2))
    torch.testing.assert_close(angles.squeeze().double(), torch.from_numpy(expected))


@pytest.mark.parametrize("size", [1, 3, 8])
def test_the_bound_of_the_longest_sequence_takes_few_values(size: int) -> None:
    """Transformer Engine chooses its attention kernel anew for each value."""
    bounds = {longest: longest_bound(longest, size) for longest in range(1, 65_537, 7)}
    assert all(longest <= bound <= max(1.25 * longest, longest + 128) + 2 * size for longest, bound in bounds.items())
    assert all(bound % (2 * size) == 0 for bound in bounds.values())
    assert len(set(bounds.values())) <= 4 * 16 + 4
