"""Parameters of Transformer Engine's own modules: names, shapes and FP8 classes against the table of the mapping."""

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformer_engine.pytorch.tensor import Float8BlockwiseQTensor, Float8Tensor, MXFP8Tensor

from megatron_bapo.config.architecture import FAMILIES, Architecture
from megatron_bapo.config.schema import Config
from megatron_bapo.model.hf_mapping import entries, expected_shapes, lookup
from megatron_bapo.parallel.groups import ParallelGroups
from megatron_bapo.parallel.megatron import is_float8tensor
from megatron_bapo.planning.known_models import architecture_of, known_models
from megatron_bapo.planning.precision import quantised_elements
from tests.transformer_engine.policies import built, make_config
from tests.unit.model.shards import architecture

RECORD = Path(__file__).parents[1] / "unit" / "model" / "transformer_engine_parameters.json"
LAYOUTS: dict[str, dict[str, Any]] = {
    "one rank": {},
    "tp2": {"world_size": 2, "tensor_model_parallel_size": 2, "sequence_parallel": True},
    "pp2": {"world_size": 2, "pipeline_model_parallel_size": 2},
}
EXPERT_LAYOUTS: dict[str, dict[str, Any]] = {
    "ep2": {"world_size": 2, "expert_model_parallel_size": 2},
    "tp2 ep2": LAYOUTS["tp2"] | {"expert_model_parallel_size": 2, "expert_tensor_parallel_size": 1},
    "etp2": LAYOUTS["tp2"] | {"expert_tensor_parallel_size": 2},
}
CASES = [
    (family, name)
    for family, traits in FAMILIES.items()
    for name in (LAYOUTS | EXPERT_LAYOUTS if traits.experts else LAYOUTS)
    if not traits.linear_biases or name not in ("tp2", "etp2")  # their experts are not split
]
WIDE = {"hidden_size": 256, "intermediate_size": 768, "head_dim": 32, "vocab_size": 250}
"""Widths that every FP8 recipe divides, also over two ranks."""
FP8_CLASSES = {
    "delayed": Float8Tensor,
    "tensorwise": Float8Tensor,
    "blockwise": Float8BlockwiseQTensor,
    "mxfp8": MXFP8Tensor,
}
FP8_CASES = [(recipe, num) for recipe in FP8_CLASSES for num in (0, 1) if (recipe, num) != ("delayed", 1)]
"""Recipes and numbers of first and last layers in bfloat16; `delayed` refuses such layers."""


def wide(family: str) -> Architecture:
    traits = FAMILIES[family]
    experts = {"moe_intermediate_size": 128} if traits.experts else {}
    shared = {"shared_expert_intermediate_size": 128} if traits.shared_expert else {}
    return architecture(family, **WIDE, **experts, **shared)


def check_parameters(config: Config, arch: Architecture, rank: int, *, has_values: bool = True) -> set[str]:
    """Compare a rank's parameters with the table; return the Hugging Face tensors that they have a part of."""
    with built(config, arch, rank, frozen=True, has_values=has_values) as (model, groups):
        found = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
        rows = {name: lookup(name, arch) for name in found}
        assert found == {name: row.local_shape(arch, num_ranks(groups, row.row.axis)) for name, row in rows.items()}
    return {name for row in rows.values() for name in row.names}


def num_ranks(groups: ParallelGroups, axis: str) -> int:
    return groups.expert_tensor.size if axis == "expert_tensor" else groups.tensor.size


def test_no_driver_is_loaded() -> None:
    assert "transformer_engine_torch" in sys.modules
    assert not torch.cuda.is_available()
    assert "libcuda.so" not in Path("/proc/self/maps").read_text()


@pytest.mark.parametrize(("family", "layout"), CASES)
def test_the_parameters_of_every_rank_are_those_of_the_table(family: str, layout: str) -> None:
    config, arch = make_config(**(LAYOUTS | EXPERT_LAYOUTS)[layout]), architecture(family)
    ranks = range(config.parallel.world_size)
    assert set.union(*(check_parameters(config, arch, rank) for rank in ranks)) == set(expected_shapes(arch))


@pytest.mark.parametrize("name", known_models())
def test_published_models_have_the_parameters_of_the_table(name: str) -> None:
    """Their layers have full size, without values; layers of a kind are alike, so each kind is built once."""
    config = make_config()
    arch, _ = architecture_of(config.model.model_copy(update={"path": Path(name)}))
    for has_experts in {layer in arch.moe_layers for layer in range(arch.num_hidden_layers)}:
        one = replace(arch, num_hidden_layers=1, moe_layers=frozenset({0} if has_experts else ()))
        found = check_parameters(config, one, rank=0, has_values=False)
        assert found == {name for entry in entries(one) for name in entry.names}


@pytest.mark.parametrize("family", FAMILIES)
def test_the_record_of_the_unit_tests_has_the_parameters(family: str) -> None:
    with built(make_config(), architecture(family), frozen=True) as (model, _):
        found = {name: list(parameter.shape) for name, parameter in model.named_parameters()}
    assert found == json.loads(RECORD.read_text())[family]


@pytest.mark.parametrize("family", ["qwen2", "qwen3_moe", "qwen2_moe", "glm4_moe"])
@pytest.mark.parametrize(("recipe", "bf16_layers"), FP8_CASES)
def test_with_fp8_param_exactly_the_planned_weights_have_the_recipes_class(
    family: str, recipe: str, bf16_layers: int
) -> None:
    ends = {"num_layers_at_start_in_bf16": bf16_layers, "num_layers_at_end_in_bf16": bf16_layers}
    fp8 = {"recipe": recipe, "param": True, "first_last_layers_bf16": bool(bf16_layers)} | (ends if bf16_layers else {})
    config, arch = make_config(fp8), wide(family)
    with built(config, arch, frozen=True) as (model, _):
        in_fp8 = {name: parameter for name, parameter in model.named_parameters() if is_float8tensor(parameter)}
        assert {type(parameter) for parameter in in_fp8.values()} == {FP8_CLASSES[recipe]}
        assert sum(parameter.numel() for parameter in in_fp8.values()) == quantised_elements(config, arch, 0)
        assert {tuple(p.shape) for p in in_fp8.values()} == {lookup(name, arch).local_shape(arch, 1) for name in in_fp8}
