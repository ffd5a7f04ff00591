from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from megatron_bapo.config.architecture import FAMILIES, Architecture
from megatron_bapo.config.lora import LoraConfig
from megatron_bapo.config.schema import ParallelConfig
from megatron_bapo.model.hf_import import SafetensorsFolder, load_tensors
from megatron_bapo.model.hf_mapping import expected_shapes
from megatron_bapo.model.lora_mapping import sent_table
from megatron_bapo.model.weight_layouts import (
    EngineLayout,
    Placement,
    engine_shards,
    many_hosts,
    one_host,
    trainer_shards,
    weight_plan,
)
from megatron_bapo.model.weight_slices import LocalSlices
from megatron_bapo.weight_sync.plan import Box, Slice
from tests.unit.model.shards import architecture, empty_shard, groups_of


@st.composite
def layouts(draw: st.DrawFn) -> tuple[Architecture, ParallelConfig, EngineLayout, Placement, bool]:
    """A model, a trainer's mesh for it, engines, and hosts."""
    family = draw(st.sampled_from(list(FAMILIES)))
    num_layers = draw(st.sampled_from([4, 5]))
    arch = architecture(
        family,
        num_hidden_layers=num_layers,
        vocab_size=draw(st.sampled_from([22, 130])),
        num_key_value_heads=draw(st.sampled_from([1, 2, 4, 8])),
        tie_word_embeddings=draw(st.booleans()),
    )
    tp, pp, cp, dp = (draw(st.sampled_from(sizes)) for sizes in ([1, 2, 4, 8], [1, 2], [1, 2], [1, 2]))
    # Megatron splits the rows of queries, keys and values jointly.
    queries = arch.num_attention_heads * (1 + arch.family.output_gate)
    assume((queries + 2 * arch.num_key_value_heads) * arch.head_dim % tp == 0)
    stage = tp * cp * dp
    experts = FAMILIES[family].experts
    etp = draw(st.sampled_from([size for size in (1, 2, 4, 8) if stage % size == 0])) if experts else None
    ep = draw(st.sampled_from([size for size in (1, 2, 4) if stage % (size * etp) == 0])) if etp else 1
    parallel = ParallelConfig(
        world_size=stage * pp, tensor_model_parallel_size=tp, pipeline_model_parallel_size=pp,
        virtual_pipeline_model_parallel_size=draw(st.sampled_from([1, 2])) if pp > 1 else 1,
        pipeline_model_parallel_layout="auto" if num_layers % 2 else None,
        context_parallel_size=cp, expert_model_parallel_size=ep, expert_tensor_parallel_size=etp,
    )  # fmt: skip
    engine = EngineLayout(draw(st.sampled_from([1, 2, 4])), draw(st.sampled_from([1, 2, 3])), draw(st.booleans()))
    placement = draw(
        st.one_of(
            st.just(one_host(parallel, engine)),
            st.builds(
                lambda num, ranks, colocated: many_hosts(parallel, engine, num, ranks, colocated=colocated),
                st.integers(1, 3),
                st.sampled_from([1, 2, 4]),
                st.booleans(),
            ),
        )
    )
    return arch, parallel, engine, placement, draw(st.booleans())


def loaded_ranks(
    arch: Architecture, parallel: ParallelConfig, tensors: dict[str, torch.Tensor], *, transformer_engine: bool
) -> list[LocalSlices]:
    """Return the parameters of each rank after an import of the whole model."""
    ranks = []
    with TemporaryDirectory() as temporary:
        save_file(tensors, Path(temporary) / "model.safetensors")
        with SafetensorsFolder(Path(temporary)) as folder:
            for rank in range(parallel.world_size):
                shard, groups = empty_shard(arch, parallel, rank, transformer_engine=transformer_engine)
                load_tensors(shard, folder, groups)
                ranks.append(LocalSlices(shard, groups))
    return ranks


def region(box: Box) -> tuple[slice, ...]:
    return tuple(slice(a, b) for a, b in zip(box.start, box.stop, strict=True))


@pytest.mark.slow
@settings(max_examples=25, deadline=None)
@given(layouts())
def test_the_slices_of_all_senders_tile_each_hosts_needs_with_the_bits_of_the_whole_model(drawn: tuple):
    check_plan(*drawn)


@pytest.mark.parametrize("family", ["qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"])
@pytest.mark.parametrize(("tp", "engine"), [(2, EngineLayout(4)), (4, EngineLayout(2, 2))])
def test_an_engine_rank_gets_its_parts_of_a_gated_delta_net(family: str, tp: int, engine: EngineLayout):
    parallel = ParallelConfig(world_size=tp, tensor_model_parallel_size=tp)
    placement = many_hosts(parallel, engine, 1, 1, colocated=False)
    check_plan(architecture(family), parallel, engine, placement, transformer_engine=tp == 4)


def check_plan(
    arch: Architecture,
    parallel: ParallelConfig,
    engine: EngineLayout,
    placement: Placement,
    transformer_engine: bool,
) -> None:
    """Check that each host receives every element that its engine ranks need once, and no other."""
    generator = torch.Generator().manual_seed(0)
    tensors = {name: torch.randn(shape, generator=generator) for name, shape in expected_shapes(arch).items()}
    ranks = loaded_ranks(arch, parallel, tensors, transformer_engine=transformer_engine)
    plan = weight_plan(arch, parallel, engine, placement, dtype="float32", bucket_bytes=2048)
    needed = engine_shards(arch, engine)
    for host in sorted({host for hosts in placement.reader_hosts for host in hosts}):
        got = {name: torch.full_like(tensor, torch.nan) for name, tensor in tensors.items()}
        for number in plan.needed_on(host):
            bucket = plan.buckets[number]
            for part in bucket.slices:
                target = got[part.name][region(part.box)]
                assert target.isnan().all(), "an element came twice"
                target.copy_(ranks[bucket.sender](part))
        for name, shards in needed.items():
            wanted = torch.full_like(tensors[name], torch.nan)
            for shard in shards:
                if any(host in placement.reader_hosts[rank] for rank in shard.ranks):
                    wanted[region(shard.box)] = tensors[name][region(shard.box)]
            assert got[name].view(torch.int32).equal(wanted.view(torch.int32)), name


@pytest.mark.slow
@pytest.mark.parametrize("lora", [None, LoraConfig(rank=3), LoraConfig(rank=3, target_modules=("v_proj", "up_proj"))])
@settings(max_examples=25, deadline=None)
@given(drawn=layouts())
def test_the_ranks_of_an_engine_need_every_element(drawn: tuple, lora: LoraConfig | None):
    arch, _, engine, _, _ = drawn
    table = sent_table(lora)
    for name, shards in engine_shards(arch, engine, table).items():
        covered = torch.zeros(expected_shapes(arch, table)[name], dtype=torch.bool)
        for shard in shards:
            covered[region(shard.box)] = True
        assert covered.all(), name


@settings(max_examples=25, deadline=None)
@given(layouts())
def test_the_trainers_shards_agree_with_its_parallel_groups(drawn: tuple):
    """Compare closed-form ranks with Megatron's rank generator."""
    arch, parallel, _, _, transformer_engine = drawn
    held = trainer_shards(arch, parallel)
    for rank in range(parallel.world_size):
        shard, groups = empty_shard(arch, parallel, rank, transformer_engine=transformer_engine)
        assert groups == groups_of(parallel, rank)
        local = LocalSlices(shard, groups)
        for name, shards in held.items():
            for part in shards:
                if rank in part.ranks:
                    assert local(Slice(name, part.box)).shape == part.box.shape


@settings(max_examples=25, deadline=None)
@given(layouts())
def test_ranks_have_the_halves_of_adapters_of_the_weights_that_they_have(drawn: tuple):
    """One half is split as the weight is, and all ranks with a part of the weight have the other half."""
    arch, parallel, _, _, _ = drawn
    weights, adapters = trainer_shards(arch, parallel), trainer_shards(arch, parallel, sent_table(LoraConfig(rank=3)))
    split = 0
    for name, shards in adapters.items():
        module, _, half = name.removesuffix(".weight").rpartition(".")
        of_weight = weights[f"{module}.weight"]
        dim, other = (1, 0) if half == "lora_A" else (0, 1)
        if len({part.box for part in shards}) > 1:
            spans = [(part.box.start[dim], part.box.shape[dim], part.ranks) for part in shards]
            assert spans == [(part.box.start[dim], part.box.shape[dim], part.ranks) for part in of_weight]
            split += 1
        else:
            (whole,) = shards
            assert whole.box.start == (0, 0)
            holders = {rank for part in of_weight for rank in part.ranks}
            assert holders == {*whole.ranks} if ".experts." in name else holders <= {*whole.ranks}
        assert {part.box.shape[other] for part in shards} == {3}
    assert split or parallel.tensor_model_parallel_size == 1


def test_the_adapters_of_qwen25_05b_have_less_than_two_percent_of_the_bytes_of_its_weights():
    """The guide has these numbers. Shapes: https://huggingface.co/Qwen/Qwen2.5-0.5B/blob/main/config.json"""
    arch = architecture(
        "qwen2", num_hidden_layers=24, hidden_size=896, intermediate_size=4864, num_attention_heads=14,
        num_key_value_heads=2, head_dim=64, vocab_size=151936, tie_word_embeddings=True,
    )  # fmt: skip
    parallel, engine = ParallelConfig(world_size=2, tensor_model_parallel_size=2), EngineLayout(2)
    full, adapters = (
        weight_plan(
            arch, parallel, engine, one_host(parallel, engine), dtype="bfloat16", bucket_bytes=1 << 28, lora=lora
        ).total_bytes
        for lora in (None, LoraConfig(rank=16))
    )
    assert full == 2 * 494_032_768
    assert adapters == 2 * 24 * 16 * (4 * 896 + 896 + 2 * 128 + 896 + 3 * 896 + 3 * 4864)
    assert adapters < 0.02 * full
    guide = (Path(__file__).parents[3] / "docs" / "guides" / "lora.md").read_text()
    assert f"{adapters / 2**20:.1f} MiB instead of {full / 2**20:.0f} MiB" in guide


def test_a_slice_that_a_rank_does_not_have_fails_an_assertion():
    arch, parallel = architecture("llama"), ParallelConfig(world_size=2, tensor_model_parallel_size=2)
    local = LocalSlices(*empty_shard(arch, parallel, 0))
    with pytest.raises(AssertionError, match="this rank does not have"):
        local(Slice("model.layers.0.mlp.up_proj.weight", Box((20, 0), (4, 16))))


def test_slices_are_views_of_a_ranks_parameters():
    shard, groups = empty_shard(architecture("qwen3"), ParallelConfig(), 0)
    held = {parameter.untyped_storage().data_ptr() for parameter in shard.parameters.values()}
    local = LocalSlices(shard, groups)
    for name, shards in trainer_shards(shard.architecture, ParallelConfig()).items():
        for part in shards:
            assert local(Slice(name, part.box)).untyped_storage().data_ptr() in held


def test_engines_fill_the_hosts_after_the_trainers_or_share_them():
    parallel, engine = ParallelConfig(world_size=6), EngineLayout(tensor_parallel_size=2)
    behind = many_hosts(parallel, engine, 3, 4, colocated=False)
    assert behind == Placement((0, 0, 0, 0, 1, 1), ((2, 3), (2, 3)))
    assert many_hosts(parallel, engine, 3, 4, colocated=True).reader_hosts == ((0, 1), (0, 1))
    assert many_hosts(parallel, EngineLayout(8), 1, 4, colocated=False).reader_hosts == ((2,),) * 4 + ((3,),) * 4


def test_key_value_heads_are_repeated_on_more_ranks_than_heads():
    arch = architecture("llama", num_key_value_heads=2)
    shards = engine_shards(arch, EngineLayout(4))["model.layers.0.self_attn.k_proj.weight"]
    assert [(part.box.start[0], part.box.shape[0], part.ranks) for part in shards] == [
        (0, 6, (0,)), (0, 6, (1,)), (6, 6, (2,)), (6, 6, (3,)),
    ]  # fmt: skip


def test_layers_embedding_and_output_layer_are_on_vllms_stages():
    """Check get_pp_indices of vllm/distributed/utils.py: 2, 3, 3 and 2 of ten layers on four stages."""
    arch = architecture("llama", num_hidden_layers=10, tie_word_embeddings=True)
    shards = engine_shards(arch, EngineLayout(1, 4))
    stages = [shards[f"model.layers.{layer}.input_layernorm.weight"][0].ranks[0] for layer in range(10)]
    assert stages == [0, 0, 1, 1, 1, 2, 2, 2, 3, 3]
    assert [part.ranks for part in shards["model.embed_tokens.weight"]] == [(0,), (3,)]
    assert [part.ranks for part in shards["model.norm.weight"]] == [(3,)]


def test_a_rank_needs_its_rows_of_queries_keys_and_values_of_a_gated_delta_net():
    """Queries are rows 0 to 23 (8 heads of width 3), keys 24 to 47, and values 48 to 79 (16 heads of width 2)."""
    shards = engine_shards(architecture("qwen3_5_text"), EngineLayout(4))
    for name, others in (("in_proj_qkv", (16,)), ("conv1d", (1, 4))):
        of_second = [part for part in shards[f"model.layers.0.linear_attn.{name}.weight"] if part.ranks == (1,)]
        assert [part.box for part in of_second] == [
            Box((start, *(0 for _ in others)), (rows, *others)) for start, rows in ((6, 6), (30, 6), (56, 8))
        ]
