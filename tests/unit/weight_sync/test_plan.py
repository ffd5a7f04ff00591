import itertools
import json
import math
import re
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.weight_sync_on_paper import LAYOUTS, MODELS
from megatron_bapo.config.schema import ParallelConfig
from megatron_bapo.model.weight_layouts import EngineLayout, Placement, many_hosts, trainer_shards, weight_plan
from megatron_bapo.planning.weight_transfer import Traffic
from megatron_bapo.weight_sync.plan import Box, Shard, Slice, WeightPlan, make_plan
from megatron_bapo.weight_sync.plan_figures import direct_figures, store_figures

BUCKET_BYTES = 100
"""Bucket size smaller than a row of `wide`."""
SHAPES = {"matrix": (12, 10), "wide": (3, 40), "vector": (7,), "scalar": ()}


def split(shape: tuple[int, ...], cuts: list[list[int]], rank_sets: list[list[int]]) -> list[Shard]:
    """Split the tensor by a grid and assign the rank sets to its cells in turn."""
    spans = [
        list(itertools.pairwise(sorted({0, size, *(cut for cut in dim if 0 < cut < size)})))
        for size, dim in zip(shape, cuts, strict=False)
    ]
    return [
        Shard(Box(tuple(a for a, _ in cell), tuple(b - a for a, b in cell)), tuple(rank_sets[i % len(rank_sets)]))
        for i, cell in enumerate(itertools.product(*spans))
    ]


CUTS = st.lists(st.lists(st.integers(1, 39), max_size=3), min_size=2, max_size=2)
RANK_SETS = st.lists(st.lists(st.integers(0, 5), min_size=1, max_size=4, unique=True), min_size=1, max_size=4)


@st.composite
def plans(draw: st.DrawFn) -> tuple[WeightPlan, dict, dict, list[list[int]]]:
    trainer_shards = {name: split(shape, draw(CUTS), draw(RANK_SETS)) for name, shape in SHAPES.items()}
    engine_shards = {name: split(shape, draw(CUTS), draw(RANK_SETS)) for name, shape in SHAPES.items()}
    sender_hosts = draw(st.lists(st.integers(0, 2), min_size=6, max_size=6))
    reader_hosts = draw(
        st.lists(st.lists(st.integers(0, 4), min_size=1, max_size=3, unique=True), min_size=6, max_size=6)
    )
    plan = make_plan(
        SHAPES, "float32", trainer_shards, engine_shards, sender_hosts=sender_hosts, reader_hosts=reader_hosts,
        reader_layout="", bucket_bytes=BUCKET_BYTES,
    )  # fmt: skip
    return plan, trainer_shards, engine_shards, reader_hosts


def region(box: Box) -> tuple[slice, ...]:
    return tuple(slice(a, b) for a, b in zip(box.start, box.stop, strict=True))


@settings(max_examples=40, deadline=None)
@given(plans())
def test_every_host_gets_each_element_that_it_needs_once_and_no_other(drawn: tuple):
    plan, trainer_shards, engine_shards, reader_hosts = drawn
    for host in range(5):
        got = {name: np.zeros(shape, int) for name, shape in SHAPES.items()}
        wanted = {name: np.zeros(shape, bool) for name, shape in SHAPES.items()}
        for name, shards in engine_shards.items():
            for shard in shards:
                if any(host in reader_hosts[rank] for rank in shard.ranks):
                    wanted[name][region(shard.box)] = True
        for number in plan.needed_on(host):
            bucket = plan.buckets[number]
            for part in bucket.slices:
                got[part.name][region(part.box)] += 1
                assert any(bucket.sender in s.ranks and s.box.covers(part.box) for s in trainer_shards[part.name])
        for name in SHAPES:
            np.testing.assert_array_equal(got[name], wanted[name].astype(int))


@settings(max_examples=40, deadline=None)
@given(plans())
def test_every_reader_finds_each_element_that_it_needs_and_no_other_in_its_buckets(drawn: tuple):
    plan, _, engine_shards, reader_hosts = drawn
    for reader, hosts in enumerate(reader_hosts):
        for host in hosts:
            got = {name: np.zeros(shape, int) for name, shape in SHAPES.items()}
            for number in plan.read_by(reader, host):
                for part in plan.buckets[number].slices:
                    got[part.name][region(part.box)] += 1
            for name, shape in SHAPES.items():
                wanted = np.zeros(shape, int)
                for shard in engine_shards[name]:
                    if reader in shard.ranks:
                        wanted[region(shard.box)] = 1
                np.testing.assert_array_equal(got[name], wanted)


@settings(max_examples=40, deadline=None)
@given(plans())
def test_buckets_hold_no_more_than_the_limit_or_a_row_and_say_their_size(drawn: tuple):
    plan = drawn[0]
    for bucket in plan.buckets:
        assert bucket.num_bytes == 4 * sum(math.prod(part.box.shape) for part in bucket.slices)
        assert bucket.num_bytes <= BUCKET_BYTES or [part.box.shape[0] for part in bucket.slices] == [1]


@settings(max_examples=40, deadline=None)
@given(plans())
def test_a_plan_survives_json_and_other_plans_have_another_digest(drawn: tuple):
    plan = drawn[0]
    again = WeightPlan.from_json(json.loads(json.dumps(plan.to_json())))
    assert again == plan
    assert again.digest == plan.digest
    fewer = replace(plan, buckets=plan.buckets[1:])
    assert fewer.digest != plan.digest


def whole(shape: tuple[int, ...], *ranks: int) -> list[Shard]:
    return [Shard(Box.whole(shape), ranks)]


def test_replicas_share_the_sending_evenly():
    shapes = {f"t{i}": (10, 10) for i in range(40)}
    shards = {name: whole(shape, 0, 1, 2, 3) for name, shape in shapes.items()}
    plan = make_plan(
        shapes, "bfloat16", shards, {name: whole(shape, 0) for name, shape in shapes.items()},
        sender_hosts=[0] * 4, reader_hosts=[[0]], reader_layout="", bucket_bytes=1 << 20,
    )  # fmt: skip
    assert [plan.num_bytes(plan.sent_by(rank)) for rank in range(4)] == [10 * 200] * 4


def test_a_replica_on_the_destination_host_is_preferred_and_nothing_crosses_the_network():
    shapes = {f"t{i}": (10, 10) for i in range(7)}
    trainer_shards = {name: whole(shape, 0, 1, 2, 3) for name, shape in shapes.items()}
    engine_shards = {name: whole(shape, 0) for name, shape in shapes.items()}
    plan = make_plan(
        shapes,
        "float32",
        trainer_shards,
        engine_shards,
        sender_hosts=[0, 0, 1, 1],
        reader_hosts=[[0, 1]],
        reader_layout="",
        bucket_bytes=1 << 20,
    )
    figures = store_figures(plan, trainer_shards, [[0, 1]])
    assert figures.network_bytes == 0
    assert {(plan.sender_hosts[rank], host) for rank, host in figures.links} == {(0, 0), (1, 1)}


def test_hosts_without_a_replica_are_served_evenly_by_all_that_have_one():
    shapes = {f"t{i}": (10, 10) for i in range(8)}
    trainer_shards = {name: whole(shape, 0, 1) for name, shape in shapes.items()}
    engine_shards = {name: whole(shape, 0) for name, shape in shapes.items()}
    plan = make_plan(
        shapes,
        "float32",
        trainer_shards,
        engine_shards,
        sender_hosts=[0, 1],
        reader_hosts=[[2, 3]],
        reader_layout="",
        bucket_bytes=1 << 20,
    )
    figures = store_figures(plan, trainer_shards, [[2, 3]])
    by_sender = [sum(size for (rank, _), size in figures.links.items() if rank == sender) for sender in (0, 1)]
    assert by_sender == [8 * 400] * 2
    assert figures.network_bytes == 2 * 8 * 400
    written = max(plan.num_bytes(plan.sent_by(rank)) for rank in (0, 1))
    assert figures.traffic == Traffic(written, crossing=8 * 400, loaded=8 * 400)


def test_hosts_pass_on_about_as_many_bytes_as_they_receive():
    """Four pipeline stages on eight hosts, all of which need everything: a host receives 3/4 of the model."""
    architecture, parallel = MODELS["Qwen2.5-7B"], ParallelConfig(world_size=64, pipeline_model_parallel_size=4)
    placement = many_hosts(parallel, EngineLayout(), 64, 8, colocated=True)
    plan = weight_plan(architecture, parallel, EngineLayout(), placement, dtype="bfloat16", bucket_bytes=256 << 20)
    figures = store_figures(plan, trainer_shards(architecture, parallel), placement.reader_hosts)
    assert figures.traffic.crossing < 1.1 * 3 / 4 * plan.total_bytes


@pytest.mark.parametrize(("tensor", "stages", "engine_tensor"), [(4, 2, 4), (8, 1, 4), (2, 2, 1), (1, 1, 4), (2, 1, 8)])
def test_a_rank_of_the_first_engine_receives_from_one_replica_of_each_shard(
    tensor: int, stages: int, engine_tensor: int
):
    """NCCL has a communicator for every pair, so each of eight replicas in turn would be eight times as many."""
    architecture = replace(MODELS["Qwen2.5-32B"], num_hidden_layers=2 * stages)
    parallel = ParallelConfig(
        world_size=8 * tensor * stages, tensor_model_parallel_size=tensor, pipeline_model_parallel_size=stages
    )
    engine = EngineLayout(engine_tensor)
    placement = replace(many_hosts(parallel, engine, 4, 1, colocated=False), one_sender=True)
    plan = weight_plan(architecture, parallel, engine, placement, dtype="bfloat16", bucket_bytes=256 << 20)
    pairs = {(bucket.sender, bucket.hosts[0]) for bucket in plan.buckets}
    shards_per_rank = max(1, tensor // engine_tensor) * stages
    assert Counter(first for _, first in pairs) == dict.fromkeys(
        range(parallel.world_size, parallel.world_size + engine_tensor), shards_per_rank
    )
    assert len({sender for sender, _ in pairs}) == len(pairs), "a trainer rank sends to one engine rank"
    received = [plan.num_bytes(plan.needed_on(hosts[0])) for hosts in placement.reader_hosts]
    assert max(plan.num_bytes(plan.sent_by(rank)) for rank in range(parallel.world_size)) <= max(received)


def on_one_host(shapes: dict[str, tuple[int, ...]], trainer_shards: dict[str, list[Shard]]) -> WeightPlan:
    """Return the plan of one trainer rank and one reader, with buckets of 1000 bytes."""
    return make_plan(
        shapes,
        "float32",
        trainer_shards,
        trainer_shards,
        sender_hosts=[0],
        reader_hosts=[[0]],
        reader_layout="",
        bucket_bytes=1000,
    )


def test_memory_is_the_parameters_and_two_buckets_at_a_time():
    shapes = {f"t{i}": (10, 10) for i in range(8)}
    trainer_shards = {name: whole(shape, 0) for name, shape in shapes.items()}
    plan = on_one_host(shapes, trainer_shards)
    figures = store_figures(plan, trainer_shards, [[0]])
    assert figures.peak_bytes == (8 * 400 + 2 * 2 * 400,)


@pytest.mark.parametrize(("passes_on", "num_buckets"), [(True, 2), (False, 0)])
def test_memory_without_a_store_includes_a_fingerprint(passes_on: bool, num_buckets: int):
    shapes = {"t": (1 << 13, 1 << 12)}  # 128 MiB in float32, of which a fingerprint sums 16 MiB at a time
    shards = {"t": whole(shapes["t"], 0)}
    plan = make_plan(
        shapes, "float32", shards, shards,
        sender_hosts=[0], reader_hosts=[[1]], reader_layout="", bucket_bytes=256 << 20,
    )  # fmt: skip
    figures = direct_figures(plan, shards, 8, passes_on=passes_on)
    assert figures.peak_bytes == ((1 + num_buckets) * (128 << 20) + (64 << 20),)


def test_a_tensor_larger_than_a_bucket_is_cut_into_rows():
    shapes = {"large": (100, 10)}
    plan = on_one_host(shapes, {"large": whole((100, 10), 0)})
    assert [bucket.slices[0].box.shape for bucket in plan.buckets] == [(25, 10)] * 4


@pytest.mark.parametrize(("model", "world_size"), [("Qwen2.5-32B", 64), ("Qwen3-235B-A22B", 64)])
@pytest.mark.parametrize("placement", ["hosts", "ranks"])
def test_buckets_follow_the_layers_so_that_an_engine_keeps_one_incomplete_layer(
    model: str, world_size: int, placement: str
):
    """Follow the buckets of published models in the order in which an engine rank receives them."""
    layout, engine = LAYOUTS[model]
    architecture = replace(MODELS[model], num_hidden_layers=8, moe_layers=frozenset(range(8 if "A22B" in model else 0)))
    parallel = ParallelConfig(world_size=world_size, **layout)
    hosts = many_hosts(parallel, engine, num_engines=2, ranks_per_host=8, colocated=False)
    if placement == "ranks":
        ranks = range(world_size)
        hosts = Placement(tuple(ranks), tuple((world_size + rank,) for rank in range(engine.num_ranks)))
    plan = weight_plan(architecture, parallel, engine, hosts, dtype="bfloat16", bucket_bytes=256 << 20)
    missing = Counter(layer_of(part) for bucket in plan.buckets for part in bucket.slices)
    begun: set[str] = set()
    for bucket in plan.buckets:
        for part in bucket.slices:
            missing[layer_of(part)] -= 1
            (begun.add if missing[layer_of(part)] else begun.discard)(layer_of(part))
        assert len(begun) <= 1
    assert missing.total() == 0


def layer_of(part: Slice) -> str:
    found = re.search(r"layers\.\d+\.", part.name)
    return "" if found is None else found[0]
