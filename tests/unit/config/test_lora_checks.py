from typing import Any

import pytest
from pydantic import ValidationError

from megatron_bapo.config.checks import check_config
from megatron_bapo.config.foreign_keys import find
from megatron_bapo.config.lora import LoraConfig
from megatron_bapo.config.lora_checks import lora_shape_problems
from tests.unit.config.examples import config, problems
from tests.unit.model.shards import architecture


def lora(**values: Any) -> dict[str, Any]:
    return {"model__lora": values}


def test_the_default_adapters_are_accepted_on_every_linear_layer() -> None:
    checked = config(**lora())
    check_config(checked)
    assert checked.model.lora is not None
    assert (checked.model.lora.scale, len(checked.model.lora.target_modules)) == (2.0, 7)


@pytest.mark.parametrize("names", [(), ("q_proj", "q_proj"), ("embed_tokens",)])
def test_target_modules_are_linear_layers_each_named_once(names: tuple[Any, ...]) -> None:
    with pytest.raises(ValidationError):
        LoraConfig(target_modules=names)


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"weight_sync__transport": "cuda_ipc"}, ["transport=cuda_ipc", "not merged", "set transport=store or nccl"]),
        ({"fp8": {}}, ["model.lora with fp8.recipe=blockwise", "remove the section fp8"]),
        (
            lora(dropout=0.1) | {"algorithm__clip_bounds": {"method": "speculate"}},
            ["model.lora.dropout=0.1 with algorithm.clip_bounds.method=speculate", "set method=score"],
        ),
    ],
)
def test_a_combination_that_is_not_supported_is_refused_with_the_way_out(
    values: dict[str, Any], expected: list[str]
) -> None:
    found = "\n".join(problems(config(**lora() | values)))
    assert all(text in found for text in expected), found


def test_tensor_parallel_experts_must_divide_the_tensor_parallel_size() -> None:
    refused, accepted = (
        config(**lora(), parallel__tensor_model_parallel_size=2, parallel__expert_tensor_parallel_size=size)
        for size in (4, 1)
    )
    arch = architecture("qwen3_moe")
    assert "choose a divisor" in next(lora_shape_problems(refused, arch))
    assert list(lora_shape_problems(accepted, arch)) == []


def test_a_reference_copy_is_needed_only_if_the_adapters_do_not_start_at_zero() -> None:
    kl = {"algorithm__kl_loss_coef": 0.1}
    assert config(**kl).has_reference_copy
    assert not config(**kl, **lora()).has_reference_copy
    assert config(**kl, **lora(path="an/adapter")).has_reference_copy
    assert not config(**lora(path="an/adapter")).has_reference_copy


def test_megatrons_fused_layers_are_translated_to_their_parts() -> None:
    row = find("nemo-rl", "policy.megatron_cfg.peft.target_modules")
    assert row is not None
    found = row.converted(["linear_qkv", "linear_fc1"], lambda _: None, None).values
    assert found == {"model.lora.target_modules": ["q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"]}
