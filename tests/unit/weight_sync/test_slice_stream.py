from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from megatron_bapo.errors import RunError
from megatron_bapo.parallel.platform import transfer_group
from megatron_bapo.weight_sync.slice_stream import message_bytes, pack, receive_slices, send_slices, unpack
from megatron_bapo.weight_sync.whole_tensors import fingerprint, whole_tensors
from tests.unit.weight_sync.examples import halves, reading

SHAPES = {"a": (4, 6), "b": (2, 2), "c": (8, 4), "d": (6, 2)}
CPU = torch.device("cpu")


def tensors() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


@pytest.mark.parametrize(("dim", "reader_dim"), [(0, 1), (1, 0), (0, 0)])
def test_two_ranks_send_to_two_engine_ranks_what_each_needs(tmp_path: Path, dim: int, reader_dim: int) -> None:
    """Use buckets of one or two slices, which both sides must process in the same order."""
    content = tensors()
    plan = halves(SHAPES, dim=dim, reader_dim=reader_dim, sender_hosts=(0, 1), reader_hosts=(2, 3), bucket_bytes=40)

    def take_part(rank: int) -> int | dict[str, torch.Tensor]:
        group = transfer_group(f"file://{tmp_path / 'group'}", rank, 4, timeout_s=20.0)
        if rank < 2:
            return send_slices(plan, rank, reading(content), group, CPU)
        return dict(whole_tensors(plan, plan.needed_on(rank), receive_slices(plan, rank, group, CPU), CPU))

    with ThreadPoolExecutor(4) as executor:
        *sent, first, second = executor.map(take_part, range(4))
    assert sent == [plan.num_bytes(plan.sent_by(rank)) for rank in (0, 1)]
    assert isinstance(first, dict)
    assert isinstance(second, dict)
    for name, tensor in content.items():
        for reader, received in enumerate((first, second)):
            ours, theirs = (value.chunk(2, reader_dim)[reader] for value in (received[name], tensor))
            assert torch.equal(ours, theirs)


def test_a_message_contains_the_concatenated_slices_and_a_checksum_of_their_bytes() -> None:
    content = tensors()
    plan = halves(SHAPES, dim=0, reader_dim=0)
    (bucket, *_) = plan.buckets
    message = pack(plan, bucket, reading(content), CPU)
    expected = b"".join(reading(content)(part).contiguous().numpy().tobytes() for part in bucket.slices)
    assert message.numpy().tobytes()[: bucket.num_bytes] == expected
    assert len(message) == message_bytes(bucket)
    found = dict(unpack(plan, bucket, message))
    assert all(torch.equal(found[part], reading(content)(part)) for part in bucket.slices)


def test_the_error_for_a_message_that_changed_in_transit_names_its_sender() -> None:
    plan = halves(SHAPES, dim=0, reader_dim=0)
    bucket = plan.buckets[0]
    message = pack(plan, bucket, reading(tensors()), CPU)
    message[5] += 1
    with pytest.raises(RunError, match=r"from trainer rank 0 \(a, ...\) arrived damaged: expected checksum"):
        dict(unpack(plan, bucket, message))


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
