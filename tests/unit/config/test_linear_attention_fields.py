"""Fields of config.json of models with Gated DeltaNets."""

import pytest
from transformers import Qwen3_5MoeTextConfig, Qwen3_5TextConfig, Qwen3NextConfig

from megatron_bapo.errors import UserError
from tests.unit.config.test_architecture import CONFIGS, read

NEXT, DENSE, MOE = (CONFIGS[name] for name in ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"))


@pytest.mark.parametrize("config", [NEXT, DENSE, MOE])
def test_the_widths_of_transformers_and_its_layers_are_read(tmp_path, config):
    found = read(tmp_path, config)

    assert (found.linear_num_key_heads, found.linear_num_value_heads, found.linear_conv_kernel_dim) == (2, 4, 4)
    assert (found.linear_key_width, found.linear_value_width) == (2 * 128, 4 * 128)
    assert found.linear_layers == {0, 1, 2, 4, 5}
    assert found.rotary_dim == 4
    # Published configurations of Qwen3-Next have the interval, and no layer_types.
    assert read(tmp_path, config, absent=("layer_types",)) == found
    every_second = read(tmp_path, config, absent=("layer_types",), full_attention_interval=2)
    assert every_second.linear_layers == {0, 2, 4}
    assert found.attended(1.0, 12.0) == 2.0  # one of six layers attends
    assert every_second.attended(1.0, 12.0) == 6.0


@pytest.mark.parametrize("config_class", [Qwen3NextConfig, Qwen3_5TextConfig, Qwen3_5MoeTextConfig])
def test_the_layers_of_transformers_defaults_are_read(tmp_path, config_class):
    config = config_class(num_hidden_layers=13)
    linear = {i for i, kind in enumerate(config.layer_types) if kind == "linear_attention"}
    assert read(tmp_path, config).linear_layers == linear
    assert linear == {0, 1, 2, 4, 5, 6, 8, 9, 10, 12}


def test_every_layer_of_qwen3_5_with_experts_has_them_and_no_width_of_an_mlp_is_needed(tmp_path):
    found = read(tmp_path, MOE, absent=("intermediate_size",), mlp_only_layers=[1], decoder_sparse_step=2)
    assert found.moe_layers == frozenset(range(6))
    assert read(tmp_path, NEXT, mlp_only_layers=[1]).moe_layers == {0, 2, 3, 4, 5}


def test_multimodal_rope_is_plain_rope_for_text(tmp_path):
    rope = {"rope_type": "default", "rope_theta": 1e7, "mrope_interleaved": True, "mrope_section": [1, 1, 0]}
    found = read(tmp_path, DENSE, rope_parameters=rope | {"partial_rotary_factor": 0.25})
    assert (found.rope_theta, found.rope_scaling, found.rotary_dim) == (1e7, {}, 4)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"linear_num_value_heads": 3}, "linear_num_value_heads is 3; it must be a multiple of linear_num_key_heads=2"),
        ({"linear_key_head_dim": 0}, "linear_key_head_dim is 0; it must be a positive whole number"),
        ({"linear_conv_kernel_dim": None}, "linear_conv_kernel_dim is missing; use the checkpoint's original"),
        ({"full_attention_interval": -1}, "full_attention_interval is -1; it must be a positive whole number"),
        ({"layer_types": ["linear_attention"] * 6}, "layer_types has no 'full_attention'"),
        ({"layer_types": ["full_attention"] * 5}, "layer_types has 5 layers; it must have num_hidden_layers=6"),
        ({"layer_types": ["sliding_attention"] * 6}, "layer_types has 'sliding_attention', which the trainer does not"),
        ({"attn_output_gate": False}, "attn_output_gate is False, which the trainer does not support; it must be True"),
        ({"output_gate_type": "sigmoid"}, "output_gate_type is 'sigmoid', which the trainer does not support"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e7}}, "rope_parameters has the type 'yarn'"),
        ({"attention_bias": True}, "attention_bias is True, which the trainer does not support"),
    ],
)
def test_what_differs_from_the_supported_models_is_refused(tmp_path, changes, message):
    with pytest.raises(UserError, match=message):
        read(tmp_path, NEXT, **changes)


def test_other_families_have_no_gated_delta_nets(tmp_path):
    with pytest.raises(UserError, match="layer_types has 'linear_attention', which the trainer does not support"):
        read(tmp_path, CONFIGS["qwen3"], layer_types=["linear_attention", *["full_attention"] * 5])
