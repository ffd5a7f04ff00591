import json
import math
import os
import shutil
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM, dynamic_module_utils

from bench.allocated_bytes import peak_allocated_bytes
from megatron_bapo.config.architecture import read_architecture
from megatron_bapo.config.schema import Config, ParallelConfig
from megatron_bapo.model.build import PolicyModel, build_policy
from megatron_bapo.model.hf_export import own_shapes, save_hugging_face, stream_tensors, write_safetensors
from megatron_bapo.model.hf_import import SafetensorsFolder, load_hugging_face, load_tensors
from megatron_bapo.model.hf_mapping import entries, expected_shapes
from megatron_bapo.parallel.groups import ParallelGroups, create_groups
from megatron_bapo.parallel.megatron import parallel_state
from tests.unit.model.shards import architecture, empty_shard, groups_of

# Megatron-Core 0.16 warns about its own defaults.
pytestmark = [
    pytest.mark.filterwarnings("ignore:full scope is deprecated:UserWarning"),
    pytest.mark.filterwarnings("ignore:MLP requires ffn_hidden_size:DeprecationWarning"),
]


@pytest.fixture
def groups(tmp_path: Path) -> Iterator[ParallelGroups]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1)
    yield create_groups(ParallelConfig(), seed=0, timeout_s=60.0)
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()


LAYOUTS = {
    "tp2-pp2-ep2": {
        "tensor_model_parallel_size": 2,
        "pipeline_model_parallel_size": 2,
        "expert_model_parallel_size": 2,
    },
    "tp4-etp1-ep4-cp2": {
        "tensor_model_parallel_size": 4,
        "context_parallel_size": 2,
        "expert_tensor_parallel_size": 1,
        "expert_model_parallel_size": 4,
    },
    "pp4-vpp1-ep2": {"pipeline_model_parallel_size": 4, "expert_model_parallel_size": 2},
    "pp2-vpp2-etp2": {
        "pipeline_model_parallel_size": 2,
        "virtual_pipeline_model_parallel_size": 2,
        "expert_tensor_parallel_size": 2,
    },
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_own_shapes_of_all_ranks_list_every_tensor_once(layout):
    parallel = ParallelConfig(world_size=16, **LAYOUTS[layout])
    arch = architecture("qwen3_moe")
    announced = []
    for rank in range(parallel.world_size):
        announced += own_shapes(*empty_shard(arch, parallel, rank)).items()

    assert sorted(announced) == sorted(expected_shapes(arch).items())


@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_loads_of_the_ranks_of_a_stage_differ_by_at_most_its_largest_parameter(layout, family):
    """Compare the ranks of each expert rank, because only they have its experts; without experts compare all ranks."""
    arch = architecture(family, num_hidden_layers=32)
    experts = {} if arch.num_experts else {"expert_model_parallel_size": 1, "expert_tensor_parallel_size": None}
    parallel = ParallelConfig(world_size=16, **LAYOUTS[layout] | experts)
    written, largest = defaultdict(list), max(sum(map(math.prod, entry.shapes(arch))) for entry in entries(arch))
    for rank in range(parallel.world_size):
        shard, groups = empty_shard(arch, parallel, rank)
        num_elements = sum(map(math.prod, own_shapes(shard, groups).values()))
        written[groups.pipeline.rank, groups.expert.rank].append(num_elements)

    assert min(map(min, written.values())) > 2 * largest
    assert all(max(sizes) - min(sizes) <= largest for sizes in written.values())


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_stage_rank_is_consistent_with_the_expert_axes(layout):
    parallel = ParallelConfig(world_size=16, **LAYOUTS[layout])
    for rank in range(parallel.world_size):
        groups = groups_of(parallel, rank)
        expert_rank = groups.expert_data.rank * groups.expert.size + groups.expert.rank
        assert groups.stage_rank == expert_rank * groups.expert_tensor.size + groups.expert_tensor.rank


def test_one_rank_streams_what_it_loaded_in_the_order_of_own_shapes(tmp_path):
    arch = architecture("qwen3_moe", vocab_size=7)
    generator = torch.Generator().manual_seed(0)
    tensors = {name: torch.randn(shape, generator=generator) for name, shape in expected_shapes(arch).items()}
    save_file(tensors, tmp_path / "model.safetensors")
    shard, groups = empty_shard(arch, ParallelConfig(), rank=0)
    with SafetensorsFolder(tmp_path) as folder:
        load_tensors(shard, folder, groups)

    streamed = [(name, tensor.clone()) for name, tensor in stream_tensors(shard, groups)]

    assert [(name, tuple(tensor.shape)) for name, tensor in streamed] == list(own_shapes(shard, groups).items())
    assert len(streamed) == len(tensors)
    assert all(torch.equal(tensor, tensors[name]) for name, tensor in streamed)


def test_the_stream_contains_what_the_read_function_returns():
    shard, groups = empty_shard(architecture("llama"), ParallelConfig(), rank=0)
    numbers = {parameter: float(i) for i, (_, parameter) in enumerate(shard.named_parameters())}

    streamed = dict(
        stream_tensors(shard, groups, read=lambda parameter, *, to: torch.full_like(parameter, numbers[parameter]))
    )

    assert streamed["model.embed_tokens.weight"].unique().item() == 0.0
    assert streamed["lm_head.weight"].unique().item() == len(numbers) - 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_stream_is_written_as_a_safetensors_file(tmp_path, dtype):
    tensors = {"b": torch.randn(3, 4).to(dtype), "a": torch.randn(5).to(dtype), "t": torch.randn(4, 3).to(dtype).T}
    file = tmp_path / "model.safetensors"

    write_safetensors(file, {name: tuple(tensor.shape) for name, tensor in tensors.items()}, tensors.items())

    read = load_file(file)
    assert read.keys() == tensors.keys()
    assert all(torch.equal(read[name], tensors[name]) for name in tensors)
    with safe_open(file, "pt") as opened:
        assert opened.metadata() == {"format": "pt"}


@pytest.mark.parametrize(
    ("announced", "message"),
    [
        ({"a": (2,), "c": (3,)}, r"expected c \[3\] torch.float32, got b \[3\] torch.float32"),
        ({"a": (2,), "b": (4,)}, r"expected b \[4\] .*, got b \[3\] .*"),
        ({"a": (2,), "b": (3,), "c": (1,)}, "1 of 3 tensors are missing from the stream, first c"),
        ({"a": (2,)}, r"expected None .*, got b \[3\]"),
    ],
)
def test_a_stream_that_differs_from_the_given_shapes_is_an_error(tmp_path, announced, message):
    with pytest.raises(AssertionError, match=message):
        write_safetensors(tmp_path / "x", announced, [("a", torch.zeros(2)), ("b", torch.zeros(3))])


def test_a_stream_of_two_dtypes_is_an_error(tmp_path):
    with pytest.raises(AssertionError, match=r"expected b \[3\] torch.float32, got b \[3\] torch.bfloat16"):
        write_safetensors(
            tmp_path / "x", {"a": (2,), "b": (3,)}, [("a", torch.zeros(2)), ("b", torch.zeros(3).bfloat16())]
        )


def test_writing_a_stream_needs_the_memory_of_one_tensor(tmp_path):
    shapes = {str(i): (64, 1024) for i in range(10)}
    stream = ((name, torch.ones(shape)) for name, shape in shapes.items())

    peak = peak_allocated_bytes(lambda: write_safetensors(tmp_path / "x", shapes, stream))

    assert peak == 64 * 1024 * 4


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    folder = tmp_path / "source"
    config = Qwen3Config(
        vocab_size=18,
        hidden_size=8,
        intermediate_size=8,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=4,
        tie_word_embeddings=True,
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)
    fields = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(fields | {"torch_dtype": "float32"}))
    (folder / "tokenizer.json").write_text("{}")
    return folder


def loaded(checkpoint: Path, dtype: str, groups: ParallelGroups) -> PolicyModel:
    config = Config.model_validate(
        {
            "run_dir": checkpoint.parent,
            "model": {"path": checkpoint, "dtype": dtype},
            "data": {"train": {"path": "unused.jsonl"}},
            "trainer": {"total_steps": 1, "train_batch_size": 8, "ppo_mini_batch_size": 8},
        }
    )
    model = build_policy(config, read_architecture(checkpoint), groups)
    load_hugging_face(model, checkpoint, groups)
    return model


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_export_is_a_complete_checkpoint_that_states_its_dtype(checkpoint, tmp_path, groups, dtype):
    save_hugging_face(loaded(checkpoint, dtype, groups), groups, checkpoint, tmp_path / "hf")

    original, written = (AutoModelForCausalLM.from_pretrained(f, dtype="auto") for f in (checkpoint, tmp_path / "hf"))
    kind, before, after = getattr(torch, dtype), original.state_dict(), written.state_dict()
    assert written.dtype == kind
    assert after.keys() == before.keys()
    assert all(torch.equal(after[name], before[name].to(kind)) for name in before)
    fields = json.loads((tmp_path / "hf" / "config.json").read_text())
    assert fields["dtype"] == fields["torch_dtype"] == dtype
    index = json.loads((tmp_path / "hf" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == kind.itemsize * sum(p.numel() for p in original.parameters())
    assert (tmp_path / "hf" / "tokenizer.json").read_text() == "{}"


def test_an_export_has_the_classes_that_its_config_names(checkpoint, tmp_path, groups, monkeypatch):
    """Moonlight and Kimi K2 have configurations and tokenizers of their own, which `trust_remote_code` imports."""
    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    fields = json.loads((checkpoint / "config.json").read_text())
    own = {"model_type": "own", "auto_map": {"AutoConfig": "configuration_own.OwnConfig"}}
    (checkpoint / "configuration_own.py").write_text(
        "from transformers import Qwen3Config\n\n\nclass OwnConfig(Qwen3Config):\n    model_type = 'own'\n"
    )
    (checkpoint / "tiktoken.model").write_text("IQ== 0")
    model = loaded(checkpoint, "float32", groups)
    (checkpoint / "config.json").write_text(json.dumps(fields | own))
    save_hugging_face(model, groups, checkpoint, tmp_path / "hf")

    assert AutoConfig.from_pretrained(tmp_path / "hf", trust_remote_code=True).hidden_size == 8
    assert (tmp_path / "hf" / "tiktoken.model").read_text() == "IQ== 0"


def test_an_incomplete_export_never_gets_the_final_name(checkpoint, tmp_path, groups):
    model = loaded(checkpoint, "float32", groups)
    model.chunks[0].gpt.decoder.layers[1].self_attention.q_layernorm = torch.nn.Identity()

    with pytest.raises(AssertionError, match=r"1 of \d+ exported tensors are wrong, first .*1\.self_attn\.q_norm"):
        save_hugging_face(model, groups, checkpoint, tmp_path / "hf")

    assert not (tmp_path / "hf").exists()


def test_every_file_of_an_export_is_flushed_once_before_its_folder_gets_the_final_name(
    checkpoint, tmp_path, groups, monkeypatch
):
    target, flushed, fsync = tmp_path / "hf", [], os.fsync

    def flush(descriptor: int) -> None:
        path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        flushed.append((path.name, None if path.is_dir() else path.stat().st_size))
        assert not target.exists()
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", flush)
    save_hugging_face(loaded(checkpoint, "float32", groups), groups, checkpoint, target)

    assert sorted(flushed[:-1]) == sorted((path.name, path.stat().st_size) for path in target.iterdir())
    assert flushed[-1] == ("hf.partial", None)


def test_an_export_that_is_killed_while_it_deletes_the_one_before_it_is_complete(
    checkpoint, tmp_path, groups, monkeypatch
):
    model, target = loaded(checkpoint, "float32", groups), tmp_path / "hf"
    save_hugging_face(model, groups, checkpoint, target)
    names = {path.name for path in target.iterdir()}

    def killed(folder: Path, *, ignore_errors: bool = False) -> None:
        if not folder.exists() or not any(path.suffix == ".safetensors" for path in folder.iterdir()):
            return
        next(folder.iterdir()).unlink()
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", killed)
        with pytest.raises(KeyboardInterrupt):
            save_hugging_face(model, groups, checkpoint, target)

    assert {path.name for path in target.iterdir()} == names
    save_hugging_face(model, groups, checkpoint, target)
    assert sorted(tmp_path.glob("hf*")) == [target]
