import itertools
import json
import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_bapo.weight_sync.plan import Box, Shard, WeightPlan, make_plan
from megatron_bapo.weight_sync.plan_figures import Bandwidth, plan_figures

BUCKET_BYTES = 100
"""Less than a row of `wide`."""
SHAPES = {"matrix": (12, 10), "wide": (3, 40), "vector": (7,), "scalar": ()}


def split(shape: tuple[int, ...], cuts: list[list[int]], rank_sets: list[list[int]]) -> list[Shard]:
    """A grid over the tensor; its cells get the rank sets in turn."""
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
    held = {name: split(shape, draw(CUTS), draw(RANK_SETS)) for name, shape in SHAPES.items()}
    needed = {name: split(shape, draw(CUTS), draw(RANK_SETS)) for name, shape in SHAPES.items()}
    sender_hosts = draw(st.lists(st.integers(0, 2), min_size=6, max_size=6))
    reader_hosts = draw(
        st.lists(st.lists(st.integers(0, 4), min_size=1, max_size=3, unique=True), min_size=6, max_size=6)
    )
    plan = make_plan(
        SHAPES, "float32", held, needed, sender_hosts=sender_hosts, reader_hosts=reader_hosts,
        reader_layout="", bucket_bytes=BUCKET_BYTES,
    )  # fmt: skip
    return plan, held, needed, reader_hosts


def region(box: Box) -> tuple[slice, ...]:
    return tuple(slice(a, b) for a, b in zip(box.start, box.stop, strict=True))


@settings(max_examples=40, deadline=None)
@given(plans())
def test_every_host_gets_each_element_that_it_needs_once_and_no_other(drawn: tuple):
    plan, held, needed, reader_hosts = drawn
    for host in range(5):
        got = {name: np.zeros(shape, int) for name, shape in SHAPES.items()}
        wanted = {name: np.zeros(shape, bool) for name, shape in SHAPES.items()}
        for name, shards in needed.items():
            for shard in shards:
                if any(host in reader_hosts[rank] for rank in shard.ranks):
                    wanted[name][region(shard.box)] = True
        for number in plan.needed_on(host):
            bucket = plan.buckets[number]
            for part in bucket.slices:
                got[part.name][region(part.box)] += 1
                assert any(bucket.sender in s.ranks and s.box.covers(part.box) for s in held[part.name])
        for name in SHAPES:
            np.testing.assert_array_equal(got[name], wanted[name].astype(int))


@settings(max_examples=40, deadline=None)
@given(plans())
def test_every_reader_finds_each_element_that_it_needs_and_no_other_in_its_buckets(drawn: tuple):
    plan, _, needed, reader_hosts = drawn
    for reader, hosts in enumerate(reader_hosts):
        for host in hosts:
            got = {name: np.zeros(shape, int) for name, shape in SHAPES.items()}
            for number in plan.read_by(reader, host):
                for part in plan.buckets[number].slices:
                    got[part.name][region(part.box)] += 1
            for name, shape in SHAPES.items():
                wanted = np.zeros(shape, int)
                for shard in needed[name]:
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
    held = {name: whole(shape, 0, 1, 2, 3) for name, shape in shapes.items()}
    needed = {name: whole(shape, 0) for name, shape in shapes.items()}
    plan = make_plan(
        shapes,
        "float32",
        held,
        needed,
        sender_hosts=[0, 0, 1, 1],
        reader_hosts=[[0, 1]],
        reader_layout="",
        bucket_bytes=1 << 20,
    )
    figures = plan_figures(plan, held, [[0, 1]], Bandwidth(network=1.0, memory=1e9))
    assert figures.network_bytes == 0
    assert {(plan.sender_hosts[rank], host) for rank, host in figures.links} == {(0, 0), (1, 1)}


def test_hosts_without_a_replica_are_served_evenly_by_all_that_have_one():
    shapes = {f"t{i}": (10, 10) for i in range(8)}
    held = {name: whole(shape, 0, 1) for name, shape in shapes.items()}
    needed = {name: whole(shape, 0) for name, shape in shapes.items()}
    plan = make_plan(
        shapes,
        "float32",
        held,
        needed,
        sender_hosts=[0, 1],
        reader_hosts=[[2, 3]],
        reader_layout="",
        bucket_bytes=1 << 20,
    )
    figures = plan_figures(plan, held, [[2, 3]], Bandwidth(network=400.0, memory=3200.0))
    by_sender = [sum(size for (rank, _), size in figures.links.items() if rank == sender) for sender in (0, 1)]
    assert by_sender == [8 * 400] * 2
    assert figures.network_bytes == 2 * 8 * 400
    written = max(plan.num_bytes(plan.sent_by(rank)) for rank in (0, 1))
    assert figures.seconds == pytest.approx(written / 3200.0 + 8 * 400 / 400.0)


def test_memory_is_the_parameters_and_two_buckets_at_a_time():
    shapes = {f"t{i}": (10, 10) for i in range(8)}
    held = {name: whole(shape, 0) for name, shape in shapes.items()}
    plan = make_plan(
        shapes, "float32", held, held, sender_hosts=[0], reader_hosts=[[0]], reader_layout="", bucket_bytes=1000
    )
    figures = plan_figures(plan, held, [[0]], Bandwidth(1.0, 1.0))
    assert figures.peak_bytes == (8 * 400 + 2 * 2 * 400,)


def test_a_tensor_larger_than_a_bucket_is_cut_into_rows():
    shapes = {"large": (100, 10)}
    held = {"large": whole((100, 10), 0)}
    plan = make_plan(
        shapes, "float32", held, held, sender_hosts=[0], reader_hosts=[[0]], reader_layout="", bucket_bytes=1000
    )
    assert [bucket.slices[0].box.shape for bucket in plan.buckets] == [(25, 10)] * 4
