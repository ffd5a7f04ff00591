from pathlib import Path
from typing import Any, get_args

import pytest
from pydantic import ValidationError

from megatron_bapo.config.architecture import FAMILIES
from megatron_bapo.config.checks import check_config
from megatron_bapo.config.colocation_checks import layer_problems
from megatron_bapo.config.foreign_keys import find
from megatron_bapo.config.lora import LoraConfig, TargetModule
from megatron_bapo.config.lora_checks import lora_shape_problems, lora_transfer_problems, modules_of
from megatron_bapo.config.lora_transfer import engine_rank, reason_to_merge, sent_adapters
from megatron_bapo.planning.parameters import num_trained_parameters
from tests.unit.config.examples import config, problems
from tests.unit.config.test_model_checks import LATENT, hf_folder
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
        (
            {"weight_sync__transport": "cuda_ipc", "weight_sync__lora": "merged"},
            ["transport=cuda_ipc with weight_sync.lora=merged", "not merged; set transport=store or nccl"],
        ),
        (
            {"weight_sync__transport": "cuda_ipc"},
            ["cuda_ipc with adapters that are merged because of model.dtype=float32", "set transport=store or nccl"],
        ),
        ({"fp8": {}}, ["model.lora with fp8.recipe=blockwise", "remove the section fp8"]),
        ({"model__freeze_router": True}, ["model.freeze_router=true with model.lora", "remove freeze_router"]),
        (
            lora(dropout=0.1) | {"algorithm__clip_bounds": {"method": "speculate"}},
            ["model.lora.dropout=0.1 with algorithm.clip_bounds.method=speculate", "set method=score"],
        ),
        (
            lora(dropout=0.1) | {"logging__entropy_clip_rule": True},
            ["model.lora.dropout=0.1 with logging.entropy_clip_rule=true", "set entropy_clip_rule=false, or dropout=0"],
        ),
    ],
)
def test_a_combination_that_is_not_supported_is_refused_with_the_way_out(
    values: dict[str, Any], expected: list[str]
) -> None:
    found = "\n".join(problems(config(**lora() | values)))
    assert all(text in found for text in expected), found


BF16 = {"model__dtype": "bfloat16"}
OBSTACLES = [
    (lora(rank=513), "llama", "model.lora.rank=513: vLLM allows at most 512; lower the rank"),
    (lora(target_modules=("q_proj",)), "qwen3_moe", "a model with experts"),
    (lora() | {"rollout__sleep_level": 2}, "llama", "rollout.sleep_level=2"),
    (lora() | {"rollout__quantization": "fp8_per_block"}, "llama", "rollout.quantization=fp8_per_block"),
]


@pytest.mark.parametrize(("values", "family", "reason"), OBSTACLES)
def test_adapters_that_vllm_cannot_serve_are_merged_unless_they_are_asked_for(
    values: dict[str, Any], family: str, reason: str
) -> None:
    arch, default = architecture(family), config(**BF16 | values)
    assert sent_adapters(default, arch) is None
    assert list(lora_transfer_problems(default, arch)) == []
    obstacle = reason_to_merge(default, arch)
    assert obstacle is not None
    assert f"{obstacle.reason}; {obstacle.way_out}".startswith(reason)
    (problem,) = lora_transfer_problems(config(**BF16 | values, weight_sync__lora="adapters"), arch)
    assert problem.startswith(f"weight_sync.lora=adapters with {reason}")
    assert problem.endswith("or set weight_sync.lora=merged")


def test_adapters_alone_are_sent_in_bfloat16_or_if_they_are_asked_for() -> None:
    attention, arch = lora(target_modules=("q_proj", "o_proj")), architecture("llama")
    default = config(**BF16 | attention, weight_sync__transport="cuda_ipc")
    assert sent_adapters(default, arch) == default.model.lora is not None
    assert list(lora_transfer_problems(default, arch)) == []
    assert sent_adapters(config(**BF16 | attention, weight_sync__lora="merged"), arch) is None
    assert sent_adapters(config(**attention), arch) is None
    asked = config(**attention, weight_sync__lora="adapters")
    assert sent_adapters(asked, arch) == asked.model.lora
    assert list(lora_transfer_problems(asked, arch)) == []
    assert [*layer_problems(asked, None, False)] == []
    (problem,) = layer_problems(asked, (9, 0), False)
    assert problem.startswith("weight_sync.lora=adapters with model.dtype=float32 on GPUs")
    assert sent_adapters(config(**BF16), arch) is None


def test_a_warning_says_that_adapters_are_merged_and_why() -> None:
    """The rules and the warnings are those that a run and `plan` print."""
    (warning,) = check_config(config(**lora()))
    assert warning.startswith("each weight update sends all weights with the adapters merged, not the adapters alone")
    assert "because of model.dtype=float32" in warning
    assert check_config(config(**BF16 | lora())) == []
    assert check_config(config(**lora(), weight_sync__lora="merged")) == []
    (idle,) = check_config(config(weight_sync__lora="merged"))
    assert idle == "weight_sync.lora=merged has no effect without model.lora; set that, or remove it"


def test_engines_allocate_the_next_rank_that_vllm_allows() -> None:
    assert [engine_rank(LoraConfig(rank=rank)) for rank in (1, 2, 8, 9, 500)] == [1, 8, 8, 16, 512]


def test_tensor_parallel_experts_must_divide_the_tensor_parallel_size() -> None:
    refused, accepted = (
        config(**lora(), parallel__tensor_model_parallel_size=2, parallel__expert_tensor_parallel_size=size)
        for size in (4, 1)
    )
    arch = architecture("qwen3_moe")
    assert "choose a divisor" in next(lora_shape_problems(refused, arch, "config.json"))
    assert list(lora_shape_problems(accepted, arch, "config.json")) == []


@pytest.mark.parametrize("family", FAMILIES)
def test_the_linear_layers_of_a_model_are_those_that_may_have_adapters(family: str) -> None:
    arch, names = architecture(family), get_args(TargetModule)
    trained = {name for name in names if num_trained_parameters(arch, LoraConfig(target_modules=(name,)))}
    assert trained == set(modules_of(arch))


def test_target_modules_of_which_the_model_has_none_are_refused() -> None:
    (problem,) = problems(config(**lora(target_modules=("q_a_proj", "kv_b_proj"))))
    assert "target_modules=[q_a_proj, kv_b_proj] names no linear layer of the model (model.create)" in problem
    assert problem.endswith("choose from q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj, down_proj")


def test_target_modules_that_the_model_does_not_have_are_warned_about() -> None:
    (warning,) = check_config(config(**BF16 | lora(target_modules=("q_a_proj", "q_proj", "kv_b_proj"))))
    assert warning.startswith("model.lora.target_modules has q_a_proj, kv_b_proj, without effect on this model")


def test_a_teacher_has_no_adapters(tmp_path: Path) -> None:
    teacher = hf_folder(tmp_path / "teacher", **LATENT, first_k_dense_replace=1, vocab_size=512)
    distillation = {"objective": "distill", "distillation": {"teacher": teacher}}
    assert check_config(config(**BF16 | lora(target_modules=("k_proj",)), algorithm=distillation)) == []


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
