import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from megatron_bapo.weight_sync.delta import Kind, decode, encode

INTEGERS = {2: np.uint16, 4: np.uint32}


def brought(new: np.ndarray, old: np.ndarray) -> tuple[bytes, np.ndarray]:
    """Return the message and the elements that it restores; without a message, no bytes and the new elements."""
    message = encode(new.data.cast("B"), old.data.cast("B"), new.itemsize)
    if message is None:
        return b"", new
    return message, np.frombuffer(decode(message, old.copy().data.cast("B")), new.dtype)


def changed(size: int, share: float, dtype: type = np.uint16) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    old = rng.integers(0, 1000, size).astype(dtype)
    new = np.where(rng.random(size) < share, old + 1, old).astype(dtype)
    return new, old


@settings(deadline=None)
@given(data=st.data(), item_bytes=st.sampled_from([2, 4]))
def test_any_buffer_is_restored_bit_for_bit_from_another_of_the_same_size(data: st.DataObject, item_bytes: int):
    dtype, size = INTEGERS[item_bytes], data.draw(st.integers(0, 700))
    old = data.draw(hnp.arrays(dtype, size, elements=st.integers(0, 3)))
    new = data.draw(hnp.arrays(dtype, size, elements=st.integers(0, 3), fill=st.just(0)))
    message, result = brought(new, old)
    np.testing.assert_array_equal(result, new)
    assert len(message) < max(1, new.nbytes)


@settings(deadline=None)
@given(st.sets(st.integers(0, 299_999), max_size=20))
def test_changes_at_any_position_are_restored(positions: set[int]):
    """Include gaps around 255 and 65,535, which are the largest values of the codes."""
    old = np.zeros(300_000, np.uint16)
    new = old.copy()
    new[list(positions)] = 7
    np.testing.assert_array_equal(brought(new, old)[1], new)


@pytest.mark.parametrize("gap", [0, 253, 254, 255, 256, 509, 510, 511, 65_533, 65_534, 65_535, 65_536, 131_070])
def test_a_change_after_each_gap_length_is_restored(gap: int):
    old = np.zeros(gap + 2, np.uint16)
    new = old.copy()
    new[gap:] = 1
    np.testing.assert_array_equal(brought(new, old)[1], new)


def test_nan_its_payload_and_the_sign_of_zero_are_preserved():
    old = torch.zeros(100)
    new = old.clone()
    new.view(torch.int32)[:4] = torch.tensor([0x7FC00001, 0x7F800001, -(1 << 31), 1], dtype=torch.int32)
    message, result = brought(
        new.view(torch.int32).numpy().view(np.uint32), old.view(torch.int32).numpy().view(np.uint32)
    )
    assert message
    assert torch.from_numpy(result.view(np.int32).copy()).equal(new.view(torch.int32))


@pytest.mark.parametrize(("share", "kind"), [(0.0005, Kind.GAPS_16), (0.01, Kind.GAPS_8), (0.3, Kind.MASK)])
def test_the_encoding_follows_the_share_of_changes(share: float, kind: Kind):
    message, _ = brought(*changed(200_000, share))
    assert message[0] == kind


@pytest.mark.parametrize("share", [0.0, 0.001, 0.01, 0.03, 0.1, 0.5, 1.0])
def test_a_message_grows_with_the_changes_and_never_exceeds_the_whole_bucket(share: float):
    """Compare with the entropy of the positions: log2 of the number of possible choices."""
    new, old = changed(200_000, share)
    message, _ = brought(new, old)
    p = (new != old).mean()
    entropy = 0.0 if p in (0.0, 1.0) else -p * np.log2(p) - (1 - p) * np.log2(1 - p)
    least = p * new.nbytes + entropy * len(new) / 8
    assert len(message) <= min(1.6 * least + 18, new.nbytes)


@pytest.mark.parametrize("size", [0, 10, 200_000])
def test_there_is_no_message_when_almost_everything_changed(size: int):
    new, old = changed(size, 0.97)
    assert encode(new.data.cast("B"), old.data.cast("B"), 2) is None


def test_a_message_that_does_not_fit_is_refused():
    new, old = changed(1000, 0.01)
    message, _ = brought(new, old)
    for broken, base in ((message, old[:0]), (message, old[:-1]), (message[:-1], old)):
        with pytest.raises(ValueError, match="the message does not fit the old bytes"):
            decode(broken, base.data.cast("B"))
