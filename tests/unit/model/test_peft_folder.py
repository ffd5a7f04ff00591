import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from megatron_bapo.config.lora import LoraConfig
from megatron_bapo.errors import UserError
from megatron_bapo.model.hf_export import merge
from megatron_bapo.model.hf_import import SafetensorsFolder, local_tensor
from megatron_bapo.model.hf_mapping import entries, expected_shapes
from megatron_bapo.model.lora_mapping import PEFT_PREFIX, adapter_table
from megatron_bapo.model.peft_folder import (
    ADAPTER_CONFIG,
    MergedTensors,
    check_adapters,
    read_adapter_config,
    write_adapter_config,
)
from megatron_bapo.planning.parameters import num_trained_parameters
from tests.unit.model.shards import architecture

LORA = LoraConfig(rank=3, alpha=6)


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "qwen3_moe"])
@pytest.mark.parametrize("targets", [LORA.target_modules, ("k_proj",), ("q_proj", "v_proj", "up_proj", "o_proj")])
@pytest.mark.parametrize("num_ranks", [1, 2, 8])
def test_adapters_are_split_and_merged_without_change(family: str, targets: tuple, num_ranks: int) -> None:
    """With 8 ranks, some have rows of the queries only and none of the keys."""
    arch, table = architecture(family), adapter_table(LoraConfig(rank=3, target_modules=targets))
    generator = torch.Generator().manual_seed(0)
    tensors = {n: torch.randn(s, generator=generator) for n, s in expected_shapes(arch, table).items()}
    assert {name.split(".")[-3] for name in tensors} == set(targets)
    for entry in entries(arch, table):
        whole = [tensors[name] for name in entry.names]
        shards = [local_tensor(entry, arch, whole, rank, num_ranks) for rank in range(num_ranks)]
        if entry.row.layout is not None:
            assert {tuple(shard.shape) for shard in shards} == {entry.local_shape(arch, num_ranks)}
        merged = merge(entry, arch, shards, num_ranks)
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(merged, whole, strict=True))


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "qwen3_moe"])
def test_planned_adapters_have_as_many_parameters_as_the_files(family: str) -> None:
    arch = architecture(family)
    shapes = expected_shapes(arch, adapter_table(LORA))
    assert num_trained_parameters(arch, LORA) == sum(torch.Size(shape).numel() for shape in shapes.values())


def test_the_config_of_a_folder_is_read_as_it_was_written(tmp_path: Path) -> None:
    lora = LoraConfig(rank=8, alpha=4, dropout=0.1, target_modules=("k_proj", "q_proj"))
    write_adapter_config(tmp_path, lora, Path("models/base"))
    assert read_adapter_config(tmp_path) == lora


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"use_dora": True}, "use_dora is True"),
        ({"peft_type": "IA3"}, "peft_type is 'IA3'"),
        ({"target_modules": ["embed_tokens"]}, "does not describe supported adapters"),
        ({"target_modules": "all-linear"}, "does not describe supported adapters"),
        ({"rank_pattern": {"q_proj": 4}}, "rank_pattern is"),
        ({"alora_invocation_tokens": [1, 2]}, "alora_invocation_tokens is"),
        ({"layer_replication": [[0, 2], [1, 3]]}, "layer_replication is"),
        ({"init_lora_weights": "pissa_niter_16"}, "init_lora_weights is 'pissa_niter_16', so these adapters belong to"),
        ({"init_lora_weights": "olora"}, "init_lora_weights is 'olora'"),
    ],
)
def test_adapters_of_another_kind_are_refused(tmp_path: Path, fields: dict, expected: str) -> None:
    write_adapter_config(tmp_path, LORA, Path("models/base"))
    path = tmp_path / ADAPTER_CONFIG
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))
    with pytest.raises(UserError, match=expected):
        read_adapter_config(tmp_path)


def test_a_folder_of_another_rank_is_refused_with_the_first_difference(tmp_path: Path) -> None:
    arch = architecture("qwen3")
    found = {PEFT_PREFIX + n: s for n, s in expected_shapes(arch, adapter_table(LoraConfig(rank=2))).items()}
    expected = expected_shapes(arch, adapter_table(LORA))
    with pytest.raises(
        UserError, match=r"the folder has \[2, .*configuration needs \[3, .*set rank and target_modules"
    ):
        check_adapters(found, expected, tmp_path)


def test_merged_tensors_are_the_base_models_plus_the_scaled_product(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    weight, a, b = (torch.randn(shape, generator=generator) for shape in ((6, 4), (3, 4), (6, 3)))
    for name in ("base", "adapter"):
        (tmp_path / name).mkdir()
    save_file({"m.q_proj.weight": weight, "m.norm.weight": weight[0].clone()}, tmp_path / "base" / "x.safetensors")
    save_file({"m.q_proj.lora_A.weight": a, "m.q_proj.lora_B.weight": b}, tmp_path / "adapter" / "x.safetensors")
    with SafetensorsFolder(tmp_path / "base") as base, SafetensorsFolder(tmp_path / "adapter") as adapters:
        merged = MergedTensors(base, adapters, LORA)
        assert torch.allclose(merged.slice("m.q_proj.weight"), weight + 2.0 * b @ a, atol=1e-6)
        assert torch.equal(merged.slice("m.norm.weight"), weight[0])
