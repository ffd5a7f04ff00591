"""The arguments that reach Transformer Engine's functions in a forward pass, bound to the functions' own signatures."""

from collections import Counter
from typing import Any

import pytest
import torch

from megatron_bapo.model.packed_attention import packed_sequences
from tests.transformer_engine.device import Call, bound_kernels
from tests.transformer_engine.policies import built, make_config
from tests.transformer_engine.test_parameters import wide

LENGTHS = (64, 32, 32)
NUM_LAYERS, NUM_MOE_LAYERS = 4, 3
TP2 = {"world_size": 2, "tensor_model_parallel_size": 2, "sequence_parallel": True}
FULL = {"recompute_granularity": "full"}


def forward(family: str, fp8: dict[str, Any] | None = None, **parallel: Any) -> list[Call]:
    """Return the calls of a forward pass of a packed micro-batch."""
    config = make_config(fp8, **parallel)
    with built(config, wide(family)) as (model, groups), bound_kernels() as calls, torch.no_grad():
        context = groups.context
        packed = packed_sequences(LENGTHS, context.rank, context.size, torch.device("cpu"))
        tokens = torch.zeros(1, sum(LENGTHS) // context.size, dtype=torch.int64)
        hidden = model.chunks[0].ddp(tokens, packed.positions_T[None], None, packed_seq_params=packed)
        num_rows = tokens.numel() // groups.tensor.size  # sequence parallelism splits the hidden states
        assert hidden.shape == (1, num_rows, wide(family).hidden_size)
    return calls


def num_calls(calls: list[Call]) -> Counter[str]:
    return Counter(call.function for call in calls)


@pytest.mark.parametrize("fp8", [None, "tensorwise", "delayed", "blockwise"])
@pytest.mark.parametrize("layout", [{}, TP2, FULL], ids=str)
def test_a_dense_forward_pass_calls_each_kernel_once_per_layer(fp8: str | None, layout: dict[str, Any]) -> None:
    calls = forward("qwen3", {"recipe": fp8} if fp8 else None, **layout)
    assert num_calls(calls) == {
        "LayerNormLinear": 2 * NUM_LAYERS,
        "Linear": 2 * NUM_LAYERS,
        "RMSNorm": 2 * NUM_LAYERS + 1,
        "DotProductAttention": NUM_LAYERS,
        "apply_rotary_pos_emb": 2 * NUM_LAYERS,
    }


@pytest.mark.parametrize("family", ["qwen3_moe", "qwen2_moe", "glm4_moe"])
@pytest.mark.parametrize("fp8", [None, "blockwise"])
def test_experts_are_two_grouped_products_with_the_tokens_of_each_expert(fp8: str | None, family: str) -> None:
    calls = forward(family, {"recipe": fp8} if fp8 else None)
    assert num_calls(calls)["GroupedLinear"] == 2 * NUM_MOE_LAYERS
    assert num_calls(calls)["general_gemm"] == NUM_MOE_LAYERS
    for call in calls:
        if call.function == "GroupedLinear":
            splits = [int(split) for split in call.arguments["m_splits"]]
            assert len(splits) == wide(family).num_experts
            assert sum(splits) == wide(family).num_experts_per_tok * sum(LENGTHS)


@pytest.mark.parametrize("communication", ["p2p", "all_gather", "a2a"])
def test_attention_gets_the_boundaries_of_the_packed_sequences(communication: str) -> None:
    calls = forward("qwen3", world_size=2, context_parallel_size=2, cp_comm_type=communication)
    attention = [call.arguments for call in calls if call.function == "DotProductAttention"]
    assert len(attention) == NUM_LAYERS
    for arguments in attention:
        module = arguments["self"]
        assert (module.cp_comm_type, torch.distributed.is_initialized()) == (communication, False)
        assert module.cp_global_ranks == [0, 1]
        assert arguments["qkv_format"] == "thd"
        assert arguments["attn_mask_type"] == "padding_causal"
        assert arguments["pad_between_seqs"] is False
        for name in ("cu_seqlens_q", "cu_seqlens_kv", "cu_seqlens_q_padded", "cu_seqlens_kv_padded"):
            assert arguments[name].tolist() == [0, 64, 96, 128]
            assert arguments[name].dtype == torch.int32
        assert arguments["max_seqlen_q"] == arguments["max_seqlen_kv"] >= max(LENGTHS)
        assert arguments["query_layer"].shape == (sum(LENGTHS) // 2, 8, 32)
        assert arguments["key_layer"].shape == arguments["value_layer"].shape == (sum(LENGTHS) // 2, 4, 32)
        assert arguments.get("attention_mask") is None


def test_attention_has_sinks_and_every_second_layer_a_window() -> None:
    calls = forward("gpt_oss")
    attention = [call.arguments["self"] for call in calls if call.function == "DotProductAttention"]
    window = wide("gpt_oss").sliding_window
    assert [module.window_size for module in attention] == [(window - 1, 0), (-1, 0)] * (NUM_LAYERS // 2)
    assert {module.softmax_type for module in attention} == {"learnable"}
    assert {(module.softmax_offset.dtype, len(module.softmax_offset)) for module in attention} == {(torch.bfloat16, 8)}
    grouped = [call.arguments["self"] for call in calls if call.function == "GroupedLinear"]
    assert len(grouped) == 2 * NUM_LAYERS
    assert all(module.use_bias for module in grouped)
