import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from megatron_bapo.weight_sync.delta import Kind, decode, encode, is_whole

INTEGERS = {2: np.uint16, 4: np.uint32}


def brought(new: np.ndarray, old: np.ndarray) -> tuple[bytes, np.ndarray]:
    message = encode(new.data.cast("B"), old.data.cast("B"), new.itemsize)
    return message, np.frombuffer(decode(message, old.copy().data.cast("B")), new.dtype)


def changed(size: int, share: float, dtype: type = np.uint16) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    old = rng.integers(0, 1000, size).astype(dtype)
    new = np.where(rng.random(size) < share, old + 1, old).astype(dtype)
    return new, old


@settings(deadline=None)
@given(data=st.data(), item_bytes=st.sampled_from([2, 4]))
def test_any_two_buffers_of_a_size_are_turned_into_each_other_bit_for_bit(data: st.DataObject, item_bytes: int):
    dtype, size = INTEGERS[item_bytes], data.draw(st.integers(0, 700))
    old = data.draw(hnp.arrays(dtype, size, elements=st.integers(0, 3)))
    new = data.draw(hnp.arrays(dtype, size, elements=st.integers(0, 3), fill=st.just(0)))
    message, result = brought(new, old)
    np.testing.assert_array_equal(result, new)
    assert len(message) <= 18 + new.nbytes


@settings(deadline=None)
@given(st.sets(st.integers(0, 299_999), max_size=20))
def test_changes_wherever_they_lie_are_found_again(positions: set[int]):
    """Gaps around 255 and 65,535, which are the codes' largest values, among them."""
    old = np.zeros(300_000, np.uint16)
    new = old.copy()
    new[list(positions)] = 7
    np.testing.assert_array_equal(brought(new, old)[1], new)


@pytest.mark.parametrize("gap", [0, 253, 254, 255, 256, 509, 510, 511, 65_533, 65_534, 65_535, 65_536, 131_070])
def test_a_change_behind_each_gap_is_found_again(gap: int):
    old = np.zeros(gap + 2, np.uint16)
    new = old.copy()
    new[gap:] = 1
    np.testing.assert_array_equal(brought(new, old)[1], new)


def test_not_a_number_its_payload_and_the_sign_of_zero_come_through():
    old = torch.zeros(100)
    new = old.clone()
    new.view(torch.int32)[:4] = torch.tensor([0x7FC00001, 0x7F800001, -(1 << 31), 1], dtype=torch.int32)
    message, result = brought(
        new.view(torch.int32).numpy().view(np.uint32), old.view(torch.int32).numpy().view(np.uint32)
    )
    assert not is_whole(message)
    assert torch.from_numpy(result.view(np.int32).copy()).equal(new.view(torch.int32))


@pytest.mark.parametrize(
    ("share", "kind"), [(0.0005, Kind.GAPS_16), (0.01, Kind.GAPS_8), (0.3, Kind.MASK), (0.97, Kind.WHOLE)]
)
def test_the_encoding_follows_the_share_of_changes(share: float, kind: Kind):
    message, _ = brought(*changed(200_000, share))
    assert message[0] == kind


@pytest.mark.parametrize("share", [0.0, 0.001, 0.01, 0.03, 0.1, 0.5, 1.0])
def test_a_message_is_about_the_changes_and_never_more_than_the_whole(share: float):
    """Against the entropy of the positions: log2 of the number of ways to choose them."""
    new, old = changed(200_000, share)
    message, _ = brought(new, old)
    p = (new != old).mean()
    entropy = 0.0 if p in (0.0, 1.0) else -p * np.log2(p) - (1 - p) * np.log2(1 - p)
    least = p * new.nbytes + entropy * len(new) / 8
    assert len(message) <= min(1.6 * least, new.nbytes) + 18


def test_without_old_bytes_the_whole_travels():
    new = np.arange(10, dtype=np.uint16)
    message = encode(new.data.cast("B"), None, 2)
    assert is_whole(message)
    np.testing.assert_array_equal(np.frombuffer(decode(message, None), np.uint16), new)


def test_a_message_that_does_not_fit_is_refused():
    new, old = changed(1000, 0.01)
    message, _ = brought(new, old)
    whole = encode(new.data.cast("B"), None, 2)
    for broken, base in ((message, None), (message, old[:-1]), (message[:-1], old), (whole[:-1], old)):
        with pytest.raises(ValueError, match="not a message for these bytes"):
            decode(broken, None if base is None else base.data.cast("B"))
