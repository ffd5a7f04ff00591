"""Slices that travel along chains of ranks. Every rank is a thread with a gloo process group of its own."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import combinations
from typing import Any

import pytest
import torch
from torch import distributed as dist

from bench.live_bytes import count_live_bytes
from megatron_bapo.errors import RunError
from megatron_bapo.parallel.platform import DeviceStreams, transfer_group
from megatron_bapo.weight_sync.host_chain import Chain, Group
from megatron_bapo.weight_sync.plan import FINGERPRINT_WORDS, WeightPlan
from megatron_bapo.weight_sync.slice_stream import (
    PIECE_BYTES,
    message_bytes,
    pack,
    receive_slices,
    send_slices,
    unpack,
)
from megatron_bapo.weight_sync.version_file import view_of
from megatron_bapo.weight_sync.whole_tensors import fingerprint, whole_tensors
from tests.unit.weight_sync.examples import halves, reading
from tests.unit.weight_sync.layouts import LAYOUTS, Layout

SHAPES = {"a": (4, 6), "b": (2, 2), "c": (8, 4), "d": (6, 2)}
CPU = torch.device("cpu")
VERSION = 3


def tensors(shapes: Mapping[str, tuple[int, ...]] = SHAPES) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


class Counted:
    """A process group that counts the bytes that its rank sends and receives."""

    def __init__(self, group: Group) -> None:
        self.group, self.num_sent, self.num_received = group, 0, 0

    def send(self, tensors: list[torch.Tensor], dst: int, tag: int, /) -> Any:
        self.num_sent += tensors[0].nbytes
        return self.group.send(tensors, dst, tag)

    def recv(self, tensors: list[torch.Tensor], src: int, tag: int, /) -> Any:
        self.num_received += tensors[0].nbytes
        return self.group.recv(tensors, src, tag)


def transfer(plan: WeightPlan, content: Mapping[str, torch.Tensor], places: Sequence[int]) -> dict[int, Any]:
    """Transfer a version to the engine ranks among `places`; return each rank's result and its group."""
    store = dist.HashStore()

    def take_part(place: int) -> Any:
        connected = transfer_group(store, places.index(place), len(places), "127.0.0.1", timeout_s=60.0)
        group = Counted(connected)
        chain = Chain(group, {place: rank for rank, place in enumerate(places)}, tuple(places))
        streams = DeviceStreams(CPU)
        if place < plan.num_senders:
            return send_slices(plan, VERSION, place, reading(content), chain, streams), group
        slices = receive_slices(plan, VERSION, place, chain, streams, set())
        return dict(whole_tensors(plan, plan.needed_on(place), slices, CPU)), group

    with ThreadPoolExecutor(len(places)) as executor:
        return dict(zip(places, executor.map(take_part, places), strict=True))


@pytest.mark.parametrize(("dim", "reader_dim"), [(0, 1), (1, 0), (0, 0)])
def test_two_ranks_send_to_two_engine_ranks_what_each_needs(dim: int, reader_dim: int) -> None:
    """Use buckets of one or two slices, which both sides must process in the same order."""
    content = tensors()
    plan = halves(SHAPES, dim=dim, reader_dim=reader_dim, sender_hosts=(0, 1), reader_hosts=(2, 3), bucket_bytes=40)
    results = transfer(plan, content, range(4))
    assert [results[rank][0] for rank in (0, 1)] == [plan.num_bytes(plan.sent_by(rank)) for rank in (0, 1)]
    for name, tensor in content.items():
        for reader, place in enumerate((2, 3)):
            ours, theirs = (value.chunk(2, reader_dim)[reader] for value in (results[place][0][name], tensor))
            assert torch.equal(ours, theirs)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_every_slice_leaves_the_trainer_once_and_reaches_each_rank_once(layout: Layout) -> None:
    """Count the bytes of messages on every rank; the slices have the trainer's bits on every rank of every engine."""
    plan, content = layout.plan(bucket_bytes=4096), tensors(layout.plan(bucket_bytes=4096).shapes)
    places = range(layout.num_senders + layout.num_engines * layout.engine.num_ranks)
    results = transfer(plan, content, places)
    messages = sum(map(message_bytes, plan.buckets))
    assert sum(results[place][1].num_sent for place in places[: layout.num_senders]) == messages
    assert all(results[place][1].num_received == 0 for place in places[: layout.num_senders])
    for place in places[layout.num_senders :]:
        received, group = results[place]
        needed = [plan.buckets[number] for number in plan.needed_on(place)]
        assert group.num_received == sum(map(message_bytes, needed))
        assert group.num_sent <= group.num_received, "no rank sends more than it receives"
        for part in (part for bucket in needed for part in bucket.slices):
            assert torch.equal(view_of(received[part.name], part.box), view_of(content[part.name], part.box))


@pytest.mark.parametrize("layout", [layout for layout in LAYOUTS if layout.num_engines > 1], ids=str)
def test_an_engine_that_takes_no_part_is_left_out_of_the_chains(layout: Layout) -> None:
    plan = layout.plan(bucket_bytes=4096)
    content, num = tensors(plan.shapes), layout.engine.num_ranks
    absent = range(layout.num_senders, layout.num_senders + num)  # the first engine, which the trainer sends to
    places = [place for place in range(layout.num_senders + layout.num_engines * num) if place not in absent]
    results = transfer(plan, content, places)
    for place in places[layout.num_senders :]:
        parts = [part for number in plan.needed_on(place) for part in plan.buckets[number].slices]
        for part in parts:
            assert torch.equal(view_of(results[place][0][part.name], part.box), view_of(content[part.name], part.box))


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_two_ranks_begin_their_messages_in_the_same_order(layout: Layout) -> None:
    """NCCL has no tags: the n-th message that one rank sends to another must be the n-th that the other expects."""
    plan = layout.plan(bucket_bytes=2048)
    places = tuple(range(layout.num_senders + layout.num_engines * layout.engine.num_ranks))
    chain = Chain(_NoGroup(), {place: place for place in places}, places)
    links = {place: list(chain.links(plan, place)) for place in places}
    for one, other in combinations(places, 2):
        for source, target in ((one, other), (other, one)):
            sent = [link.number for link in links[source] if link.destination == target]
            assert sent == [link.number for link in links[target] if link.source == source]
    expected = {(number, place) for number, bucket in enumerate(plan.buckets) for place in bucket.hosts}
    assert {(link.number, place) for place in places for link in links[place] if link.source is not None} == expected


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_no_rank_waits_for_a_later_bucket_even_if_every_message_waits_for_its_receiver(layout: Layout) -> None:
    """Run the order with messages that are begun only when both sides have reached them, as NCCL's first ones are."""
    plan = layout.plan(bucket_bytes=2048)
    places = tuple(range(layout.num_senders + layout.num_engines * layout.engine.num_ranks))
    chain = Chain(_NoGroup(), {place: place for place in places}, places)
    steps = {place: _steps(chain, plan, place) for place in places}
    while any(steps.values()):
        meeting = [
            (place, other)
            for place, own in steps.items()
            if own and own[0][0] == "send" and steps[other := own[0][2]][:1] == [("receive", own[0][1], place)]
        ]
        assert meeting, f"deadlock: { ({place: own[0] for place, own in steps.items() if own}) }"
        for pair in meeting:
            for place in pair:
                steps[place].pop(0)


def test_a_rank_finds_its_links_with_one_pass_over_the_receivers() -> None:
    """Engines stop while every rank finds its links, and a large run has 27,000 buckets and hundreds of receivers."""
    plan = LAYOUTS[2].plan(bucket_bytes=2048)
    receivers = _Receivers(range(plan.num_senders, plan.num_senders + 4))
    chain = Chain(_NoGroup(), {place: place for place in range(plan.num_senders + 4)}, receivers)
    assert len(list(chain.links(plan, receivers[0]))) > 10
    assert receivers.num_passes == 1


class _Receivers(tuple[int, ...]):
    """Receivers that count how often they are read."""

    num_passes = 0

    def __iter__(self) -> Iterator[int]:
        self.num_passes += 1
        return super().__iter__()


def _steps(chain: Chain, plan: WeightPlan, place: int) -> list[tuple[str, int, int]]:
    """Return what a rank does with whole buckets, one after another: kind, bucket and the other rank."""
    steps = []
    for link in chain.links(plan, place):
        if link.source is not None:
            steps.append(("receive", link.number, link.source))
        if link.destination is not None:
            steps.append(("send", link.number, link.destination))
    return steps


class _NoGroup:
    def send(self, tensors: list[torch.Tensor], dst: int, tag: int, /) -> Any:
        raise AssertionError

    recv = send


def test_messages_longer_than_a_piece_are_passed_on_in_pieces() -> None:
    content = {"a": torch.arange(PIECE_BYTES // 2, dtype=torch.float32).view(2, -1)}  # two pieces
    shapes = {"a": tuple(content["a"].shape)}
    plan = halves(shapes, dim=0, reader_dim=0, sender_hosts=(0, 1), reader_hosts=((2, 3), (2, 3)), bucket_bytes=1 << 30)
    results = transfer(plan, content, range(4))
    assert all(torch.equal(results[place][0]["a"], content["a"]) for place in (2, 3))


def test_a_message_contains_the_concatenated_slices_and_a_checksum_of_their_bytes() -> None:
    content = tensors()
    plan = halves(SHAPES, dim=0, reader_dim=0)
    (bucket, *_) = plan.buckets
    message = pack(plan, VERSION, bucket, reading(content), CPU)
    expected = b"".join(reading(content)(part).contiguous().numpy().tobytes() for part in bucket.slices)
    assert message.numpy().tobytes()[: bucket.num_bytes] == expected
    assert len(message) == message_bytes(bucket)
    found = dict(unpack(plan, VERSION, bucket, message))
    assert all(torch.equal(found[part], reading(content)(part)) for part in bucket.slices)


def test_the_error_for_a_message_that_changed_in_transit_names_its_sender() -> None:
    plan = halves(SHAPES, dim=0, reader_dim=0)
    bucket = plan.buckets[0]
    message = pack(plan, VERSION, bucket, reading(tensors()), CPU)
    message[5] += 1
    with pytest.raises(RunError, match=r"from trainer rank 0 \(a, ...\) arrived damaged: expected policy version 3"):
        dict(unpack(plan, VERSION, bucket, message))


def test_a_message_of_another_version_is_refused() -> None:
    plan = halves(SHAPES, dim=0, reader_dim=0)
    bucket = plan.buckets[0]
    message = pack(plan, VERSION, bucket, reading(tensors()), CPU)
    with pytest.raises(RunError, match=r"expected policy version 4 with checksum .* found 3"):
        dict(unpack(plan, VERSION + 1, bucket, message))


def _flip(words: torch.Tensor) -> None:
    words[7] ^= 1 << 20


def _swap(words: torch.Tensor) -> None:
    words[[3, 9]] = words[[9, 3]]


def _balance(words: torch.Tensor) -> None:
    words[1] += 1
    words[2] -= 1


@pytest.mark.parametrize("change", [_flip, _swap, _balance])
def test_a_fingerprint_depends_on_the_words_and_their_positions(change: Callable[[torch.Tensor], None]) -> None:
    words = torch.arange(100, 133, dtype=torch.int32)
    literal = [sum(words.tolist()), sum((index + 1) * word for index, word in enumerate(words.tolist()))]
    assert fingerprint(words).tolist() == literal
    changed = words.clone()
    change(changed)
    assert fingerprint(changed).tolist() != literal


def test_a_fingerprint_covers_every_byte_and_does_not_depend_on_the_location_of_a_slice() -> None:
    matrix = torch.randn(5, 7).bfloat16()
    assert torch.equal(fingerprint(matrix[1:4, 2:5]), fingerprint(matrix[1:4, 2:5].clone()))
    odd = torch.zeros(5, dtype=torch.uint8)
    odd[4] = 1
    assert fingerprint(odd).tolist() == [1, 2]


@pytest.mark.parametrize("num_words", [1, 8, 33, 64])
def test_a_fingerprint_is_the_same_for_any_number_of_words_at_a_time(
    num_words: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = torch.randint(-(1 << 31), 1 << 31, (33,), generator=torch.Generator().manual_seed(0)).to(torch.int32)
    whole = fingerprint(words)
    monkeypatch.setattr("megatron_bapo.weight_sync.whole_tensors.FINGERPRINT_WORDS", num_words)
    assert torch.equal(fingerprint(words), whole)


def test_the_fingerprint_of_a_large_bucket_needs_no_more_memory_than_the_plan_counts() -> None:
    bucket = torch.empty(256 << 20, dtype=torch.uint8, device="meta")
    assert count_live_bytes(lambda: fingerprint(bucket)).peak == pytest.approx(16 * FINGERPRINT_WORDS, rel=1e-4)
