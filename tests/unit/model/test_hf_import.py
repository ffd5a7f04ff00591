import json
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file

from bench.allocated_bytes import peak_allocated_bytes
from megatron_bapo.config.architecture import FAMILIES
from megatron_bapo.config.model import ModelConfig
from megatron_bapo.config.schema import ParallelConfig
from megatron_bapo.errors import UserError
from megatron_bapo.model.architecture import transformer_config
from megatron_bapo.model.build import freeze_router_biases
from megatron_bapo.model.hf_import import SafetensorsFolder, check_tensors, check_tied_output_layer, load_tensors
from megatron_bapo.model.hf_mapping import expected_shapes, lookup
from megatron_bapo.model.layer_specs import block_spec
from megatron_bapo.parallel.groups import create_groups
from megatron_bapo.parallel.megatron import (
    GPTModel,
    parallel_state,
)
from tests.unit.model.shards import architecture, empty_shard, groups_of, parameter_shapes

LAYOUT = ParallelConfig(
    world_size=8,
    tensor_model_parallel_size=2,
    pipeline_model_parallel_size=2,
    virtual_pipeline_model_parallel_size=2,
    expert_model_parallel_size=2,
    expert_tensor_parallel_size=2,
)


@pytest.fixture
def one_process(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1)
    create_groups(ParallelConfig(), seed=0, timeout_s=60.0)
    yield
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()


def save_checkpoint(folder: Path, family: str, dtype: torch.dtype = torch.float32, **changes: Any) -> dict[str, Any]:
    """Write a checkpoint of `shards.architecture` with random weights in two files."""
    generator = torch.Generator().manual_seed(0)
    shapes = expected_shapes(architecture(family, **changes))
    tensors = {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in shapes.items()}
    names = sorted(tensors)
    for number, chosen in enumerate((names[::2], names[1::2])):
        save_file({name: tensors[name] for name in chosen}, folder / f"part-{number}.safetensors")
    return tensors


@pytest.mark.filterwarnings("ignore:full scope is deprecated:UserWarning")
@pytest.mark.filterwarnings("ignore:MLP requires ffn_hidden_size:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:Warning. tp_group is None:DeprecationWarning")  # of Megatron's own call
@pytest.mark.usefixtures("one_process")
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_table_has_every_parameter_of_megatrons_model_with_its_shape(family, tied):
    arch = architecture(family, tie_word_embeddings=tied)
    model = ModelConfig(path=Path("model"), dtype="float32")
    config = transformer_config(arch, model, ParallelConfig(), None, on_gpu=False)
    model = GPTModel(
        config,
        block_spec(config, arch, range(arch.num_hidden_layers)),
        arch.vocab_size,
        arch.max_position_embeddings,
        share_embeddings_and_output_weights=tied,
        position_embedding_type="rope",
    )
    freeze_router_biases(model)
    found = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}

    assert found == {name: lookup(name, arch).local_shape(arch, 1) for name in found}
    assert found == dict(parameter_shapes(arch, ParallelConfig(), groups_of(ParallelConfig(), 0)))


@pytest.mark.parametrize("transformer_engine", [False, True], ids=["local names", "Transformer Engine's names"])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_rank_of_a_layout_loads_its_part(tmp_path, family, transformer_engine):
    tensors = save_checkpoint(tmp_path, family)
    parallel = LAYOUT if FAMILIES[family].experts else LAYOUT.model_copy(update={"expert_model_parallel_size": 1})
    seen = dict.fromkeys(tensors, 0)
    for rank in range(parallel.world_size):
        shard, groups = empty_shard(architecture(family), parallel, rank, transformer_engine=transformer_engine)
        with SafetensorsFolder(tmp_path) as folder:
            load_tensors(shard, folder, groups)
        for name, parameter in shard.named_parameters():
            entry = lookup(name, shard.architecture)
            assert not parameter.isnan().any(), name
            for hf_name in entry.names:
                # All random numbers differ, so the values identify the part that was read.
                seen[hf_name] += int(torch.isin(parameter, tensors[hf_name]).sum())

    ranks_per_copy = {
        name: parallel.world_size // parallel.pipeline_model_parallel_size / _num_shards(name, parallel)
        for name in tensors
    }
    assert seen == {name: ranks_per_copy[name] * tensors[name].numel() for name in tensors}


def _num_shards(hf_name: str, parallel: ParallelConfig) -> int:
    """Return the ranks of a stage that together have one copy of a tensor."""
    whole = ("layernorm", "_norm.", "model.norm.", ".mlp.gate.", "shared_expert_gate", ".q_a_proj.", ".kv_a_proj")
    whole += (".mlp.router.", ".o_proj.bias", ".linear_attn.norm.")
    if any(part in hf_name for part in whole):
        return 1
    if ".down_proj.bias" in hf_name:  # every rank that has a part of the expert has the whole bias
        return parallel.expert_model_parallel_size
    return 4 if ".experts." in hf_name else parallel.tensor_model_parallel_size


def test_a_tied_output_layer_on_the_last_stage_is_loaded_from_the_embedding(tmp_path):
    tensors = save_checkpoint(tmp_path, "qwen2", tie_word_embeddings=True)
    parallel = ParallelConfig(world_size=2, pipeline_model_parallel_size=2)
    shard, groups = empty_shard(architecture("qwen2", tie_word_embeddings=True), parallel, rank=1)

    with SafetensorsFolder(tmp_path) as folder:
        load_tensors(shard, folder, groups)

    assert torch.equal(shard.parameters["output_layer.weight"], tensors["model.embed_tokens.weight"])


def test_the_write_function_gets_the_dtype_of_the_file(tmp_path):
    save_checkpoint(tmp_path, "qwen3", torch.bfloat16)
    shard, groups = empty_shard(architecture("qwen3"), ParallelConfig(), rank=0)
    dtypes = set()

    with SafetensorsFolder(tmp_path) as folder:
        load_tensors(shard, folder, groups, write=lambda _, tensor: dtypes.add(tensor.dtype))

    assert dtypes == {torch.bfloat16}


@pytest.mark.parametrize("rank", [0, 3, 7])
@pytest.mark.parametrize("family", ["qwen2", "qwen3_moe"])
def test_loading_needs_the_memory_of_the_shard_and_at_most_one_of_its_tensors(tmp_path, family, rank):
    shape = {"hidden_size": 64, "intermediate_size": 256, "vocab_size": 1001}
    shape |= {"moe_intermediate_size": 128} if family == "qwen3_moe" else {}
    save_checkpoint(tmp_path, family, **shape)
    parallel = LAYOUT if family == "qwen3_moe" else LAYOUT.model_copy(update={"expert_model_parallel_size": 1})
    shard, groups = empty_shard(architecture(family, **shape), parallel, rank)
    largest = max(parameter.numel() * 4 for parameter in shard.parameters.values())

    def load() -> None:
        with SafetensorsFolder(tmp_path) as folder:
            load_tensors(shard, folder, groups)

    assert 0 < peak_allocated_bytes(load, tmp_path.glob("*.safetensors")) <= largest
    # The measurement detects a rank that copies whole tensors.
    whole = load_file(tmp_path / "part-0.safetensors").values()
    assert peak_allocated_bytes(lambda: [tensor.clone() for tensor in whole]) > 2 * largest


def test_a_missing_a_surplus_and_a_misshapen_tensor_are_each_refused_by_name(tmp_path):
    arch = architecture("qwen3_moe")
    found = expected_shapes(arch)
    name = "model.layers.2.mlp.experts.3.up_proj.weight"

    with pytest.raises(UserError, match=rf"lacks 1 tensors that config.json requires, first {name}"):
        check_tensors({n: shape for n, shape in found.items() if n != name}, arch, tmp_path)
    with pytest.raises(UserError, match=r"contains 1 tensors that the architecture does not have, first score\.weight"):
        check_tensors(found | {"score.weight": (1,)}, arch, tmp_path)
    with pytest.raises(UserError, match=rf"{name} has the shape \[16, 8\], but config.json requires \[8, 16\]"):
        check_tensors(found | {name: (16, 8)}, arch, tmp_path)


def test_redundant_tensors_of_old_exports_are_ignored(tmp_path):
    arch = architecture("llama", tie_word_embeddings=True)
    repeated = {"model.layers.0.self_attn.rotary_emb.inv_freq": (3,), "lm_head.weight": (22, 16)}

    check_tensors(expected_shapes(arch) | repeated, arch, tmp_path)


def test_an_output_layer_that_is_not_the_embedding_it_is_tied_to_is_refused(tmp_path):
    embedding = torch.randn(10_000, 2)
    for output in (embedding, embedding + 1e-3 * (torch.arange(10_000) == 9_999)[:, None]):
        tensors = {"model.embed_tokens.weight": embedding, "lm_head.weight": output.clone()}
        save_file(tensors, tmp_path / "model.safetensors")
        expected = nullcontext() if output is embedding else pytest.raises(UserError, match="tie_word_embeddings=false")
        with SafetensorsFolder(tmp_path) as folder, expected:
            check_tied_output_layer(folder, tmp_path)


def test_a_tensor_in_two_files_is_refused_and_an_index_says_which_file_counts(tmp_path):
    save_file({"a": torch.zeros(1)}, tmp_path / "consolidated.safetensors")
    save_file({"a": torch.ones(1)}, tmp_path / "model-00001-of-00001.safetensors")
    with pytest.raises(
        UserError, match=r"both consolidated.safetensors and model-00001-of-00001.safetensors contain a"
    ):
        SafetensorsFolder(tmp_path).__enter__()

    index = {"weight_map": {"a": "model-00001-of-00001.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with SafetensorsFolder(tmp_path) as folder:
        assert folder.slice("a")[:].item() == 1.0


@pytest.mark.parametrize("damage", [b"", b"\x10\0\0\0\0\0\0\0not json at all "])
def test_a_damaged_file_is_named(tmp_path, damage):
    (tmp_path / "model.safetensors").write_bytes(damage)

    with pytest.raises(
        UserError, match=r"model\.safetensors is not a readable safetensors file .*download or write it"
    ):
        SafetensorsFolder(tmp_path).__enter__()
