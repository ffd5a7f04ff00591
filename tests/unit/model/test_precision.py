import pytest
import torch

from megatron_bapo.config.fp8 import Fp8Config, Fp8Recipe
from megatron_bapo.model.precision import fp8_settings, set_values, values_of
from megatron_bapo.parallel.megatron import TransformerConfig

# Megatron-Core 0.16 warns about its own default.
pytestmark = pytest.mark.filterwarnings("ignore:full scope is deprecated:UserWarning")
SHAPE = {"num_layers": 8, "hidden_size": 16, "num_attention_heads": 2}


@pytest.mark.parametrize("recipe", ["delayed", "tensorwise", "blockwise", "mxfp8"])
def test_megatron_accepts_every_recipe(recipe: Fp8Recipe) -> None:
    config = TransformerConfig(**SHAPE, bf16=True, **fp8_settings(Fp8Config(recipe=recipe)))
    assert (config.fp8_recipe, config.fp8_param) == (recipe, False)
    assert config.fp8 == ("hybrid" if recipe in ("delayed", "tensorwise") else "e4m3")
    assert not config.first_last_layers_bf16


def test_counts_of_layers_in_bfloat16_reach_megatron() -> None:
    fp8 = Fp8Config(first_last_layers_bf16=True, num_layers_at_start_in_bf16=3, num_layers_at_end_in_bf16=0)
    config = TransformerConfig(**SHAPE, bf16=True, **fp8_settings(fp8))
    assert config.first_last_layers_bf16
    assert (config.num_layers_at_start_in_bf16, config.num_layers_at_end_in_bf16) == (3, 0)


def test_megatron_and_the_configuration_reject_the_same_settings_for_delayed_scales() -> None:
    with pytest.raises(ValueError, match="Delayed scaling does not support first / last layer"):
        TransformerConfig(**SHAPE, bf16=True, **fp8_settings(Fp8Config(recipe="delayed", first_last_layers_bf16=True)))


def test_without_fp8_no_settings_are_passed_to_megatron() -> None:
    assert fp8_settings(None) == {}


def test_values_of_a_plain_parameter_share_its_memory() -> None:
    parameter = torch.nn.Parameter(torch.zeros(2, 3, dtype=torch.bfloat16))
    with torch.no_grad():
        set_values(parameter, torch.ones(2, 3))
    assert values_of(parameter).data_ptr() == parameter.data_ptr()
    assert not values_of(parameter).requires_grad
    assert torch.equal(values_of(parameter), torch.ones(2, 3, dtype=torch.bfloat16))
