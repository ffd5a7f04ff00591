"""Fields of config.json that decide how a router weights the selected experts."""

import pytest
import torch
from transformers.models.qwen3_5_moe.modeling_qwen3_5_moe import Qwen3_5MoeTopKRouter

from megatron_bapo.errors import UserError
from tests.unit.config.test_architecture import CONFIGS, read


@pytest.mark.parametrize("name", ["qwen3_moe", "qwen2_moe", "qwen3_next", "deepseek_v3", "glm4_moe"])
def test_a_missing_norm_topk_prob_has_the_value_of_transformers(tmp_path, name):
    selected = {"num_experts_per_tok": 4}
    assert read(tmp_path, CONFIGS[name], absent=("norm_topk_prob",), **selected).norm_topk_prob == (
        type(CONFIGS[name])().norm_topk_prob
    )


def test_qwen35s_router_always_divides_weights_by_their_sum(tmp_path):
    """The published models do not have the field, and transformers' model does not read it."""
    config = CONFIGS["qwen3_5_moe_text"]
    torch.manual_seed(1)
    router = Qwen3_5MoeTopKRouter(config)
    torch.nn.init.normal_(router.weight)
    _, weights, _ = router(torch.randn(5, config.hidden_size))
    torch.testing.assert_close(weights.sum(-1), torch.ones(5))
    assert read(tmp_path, config, absent=("norm_topk_prob",)).norm_topk_prob
    assert read(tmp_path, config, norm_topk_prob=True).norm_topk_prob
    for value in (False, None):
        with pytest.raises(UserError, match=f"norm_topk_prob is {value}, .* it must be True"):
            read(tmp_path, config, norm_topk_prob=value)
