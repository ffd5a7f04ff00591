import math

import pytest
import torch

from megatron_bapo.config.architecture import FAMILIES, Architecture
from megatron_bapo.config.schema import ParallelConfig
from megatron_bapo.model.architecture import transformer_config
from megatron_bapo.model.layer_specs import PackedAttention
from megatron_bapo.parallel.megatron import PackedSeqParams
from tests.tolerances import GRADIENT, LOG_PROB

# Megatron-Core 0.16 warns of its own default.
pytestmark = pytest.mark.filterwarnings("ignore:full scope is deprecated:UserWarning")
HEAD_DIM = 8


def attention(num_heads: int, num_groups: int, softmax_scale: float | None = None) -> PackedAttention:
    architecture = Architecture(
        family=FAMILIES["llama"],
        num_hidden_layers=1,
        hidden_size=16,
        intermediate_size=16,
        num_attention_heads=num_heads,
        num_key_value_heads=num_groups,
        head_dim=HEAD_DIM,
        vocab_size=16,
        max_position_embeddings=64,
        rms_norm_eps=1e-6,
        rope_theta=1e4,
        tie_word_embeddings=True,
    )
    config = transformer_config(architecture, ParallelConfig(), torch.float32, cpu_initialization=True)
    return PackedAttention(config, 1, softmax_scale=softmax_scale)


def packed(lengths: list[int]) -> PackedSeqParams:
    cu_seqlens_B = torch.tensor([0, *lengths]).cumsum(0).int()
    return PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=cu_seqlens_B,
        cu_seqlens_kv=cu_seqlens_B,
        max_seqlen_q=max(lengths),
        max_seqlen_kv=max(lengths),
    )


def reference(
    query_THD: torch.Tensor, key_TGD: torch.Tensor, value_TGD: torch.Tensor, lengths: list[int], scale: float
) -> torch.Tensor:
    """Token by token: each head attends to the tokens before it in its own sequence."""
    heads_per_group = query_THD.size(1) // key_TGD.size(1)
    out, start = [], 0
    for length in lengths:
        for t in range(start, start + length):
            heads = []
            for head in range(query_THD.size(1)):
                past = (slice(start, t + 1), head // heads_per_group)
                weights = torch.softmax(scale * (key_TGD[past] @ query_THD[t, head]), 0)
                heads.append(weights @ value_TGD[past])
            out.append(torch.cat(heads))
        start += length
    return torch.stack(out)


@pytest.mark.parametrize("lengths", [[7], [5, 1, 9, 3]], ids=["one sequence", "ragged sequences"])
@pytest.mark.parametrize("num_groups", [4, 2, 1])
def test_output_and_gradients_are_those_of_plain_attention_over_each_sequence(lengths, num_groups):
    generator = torch.Generator().manual_seed(0)
    shapes = [(sum(lengths), heads, HEAD_DIM) for heads in (4, num_groups, num_groups)]
    ours = [torch.randn(shape, generator=generator).requires_grad_() for shape in shapes]
    exact = [tensor.detach().double().requires_grad_() for tensor in ours]
    weights = torch.randn(sum(lengths), 4 * HEAD_DIM, generator=generator)

    out = attention(4, num_groups)(*ours, None, packed_seq_params=packed(lengths))
    expected = reference(*exact, lengths, 1 / math.sqrt(HEAD_DIM))
    (out * weights).sum().backward()
    (expected * weights).sum().backward()

    torch.testing.assert_close(out.double(), expected, atol=LOG_PROB, rtol=0.0)
    for mine, theirs in zip(ours, exact, strict=True):
        assert mine.grad is not None
        assert theirs.grad is not None
        assert (mine.grad - theirs.grad).abs().max() < GRADIENT * theirs.grad.abs().max()


def test_a_softmax_scale_of_the_model_replaces_the_usual_one():
    generator = torch.Generator().manual_seed(1)
    inputs = [torch.randn(6, 2, HEAD_DIM, generator=generator) for _ in range(3)]

    out = attention(2, 2, softmax_scale=0.9)(*inputs, None, packed_seq_params=packed([6]))

    expected = reference(*(x.double() for x in inputs), [6], 0.9)
    torch.testing.assert_close(out.double(), expected, atol=LOG_PROB, rtol=0.0)


def test_what_stands_in_one_sequence_does_not_reach_another():
    generator = torch.Generator().manual_seed(2)
    query, key, value = (torch.randn(8, 2, HEAD_DIM, generator=generator) for _ in range(3))
    core = attention(2, 2)
    before = core(query, key, value, None, packed_seq_params=packed([5, 3]))

    key[:5] = value[:5] = 1e3
    after = core(query, key, value, None, packed_seq_params=packed([5, 3]))

    assert torch.equal(before[5:], after[5:])
    assert not torch.equal(before[:5], after[:5])
