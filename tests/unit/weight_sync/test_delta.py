import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from megatron_bapo.weight_sync.delta import BLOCK, decode, encode

INTEGERS = {2: np.uint16, 4: np.uint32}


def parts(elements: np.ndarray, cut: int = 0) -> list[memoryview]:
    return [part.data.cast("B") for part in (elements[:cut], elements[cut:])]


def brought(new: np.ndarray, old: np.ndarray, cut: int = 0) -> tuple[bytes, np.ndarray]:
    """Return the message and the elements that it restores; without a message, no bytes and the new elements.

    The elements are in two parts, the first of which has `cut` elements.
    """
    message = encode(parts(new, cut), parts(old, cut), new.itemsize)
    if message is None:
        return b"", new
    result = old.copy()
    decode(message.data, parts(result, cut))
    return message.tobytes(), result


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
    message, result = brought(new, old, data.draw(st.integers(0, size)))
    np.testing.assert_array_equal(result, new)
    assert len(message) < max(1, new.nbytes)


@settings(deadline=None)
@given(st.sets(st.integers(0, 299_999), max_size=20))
def test_changes_at_any_position_are_restored(positions: set[int]):
    old = np.zeros(300_000, np.uint16)
    new = old.copy()
    new[list(positions)] = 7
    np.testing.assert_array_equal(brought(new, old)[1], new)


@pytest.mark.parametrize("size", [BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK, 2 * BLOCK + 4])
@pytest.mark.parametrize("dtype", [np.uint16, np.uint32])
def test_changes_around_the_border_of_a_block_are_restored(size: int, dtype: type):
    old = np.zeros(size, dtype)
    new = old.copy()
    new[[0, 3, BLOCK - 2, *range(BLOCK, size), size - 1]] = 1
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


def test_each_block_has_the_smaller_encoding_of_its_positions():
    """In the first block 1 % has changed and takes 2 bytes per position; in the second 30 %, which takes 1 bit."""
    (few, old), (many, _) = changed(BLOCK, 0.01), changed(BLOCK, 0.3)
    new, old = np.concatenate([few, many]), np.concatenate([old, old])
    num_few, num_many = (few != old[:BLOCK]).sum(), (many != old[:BLOCK]).sum()
    message, result = brought(new, old)
    assert len(message) == 9 + 2 * 4 + 2 * num_few + BLOCK // 8 + 2 * (num_few + num_many)
    np.testing.assert_array_equal(result, new)


@pytest.mark.parametrize("share", [0.0, 0.001, 0.01, 0.03, 0.1, 0.5, 1.0])
def test_a_message_grows_with_the_changes_and_never_exceeds_the_whole_bucket(share: float):
    """Compare with the entropy of the positions: log2 of the number of possible choices."""
    new, old = changed(200_000, share)
    message, _ = brought(new, old)
    p = (new != old).mean()
    entropy = 0.0 if p in (0.0, 1.0) else -p * np.log2(p) - (1 - p) * np.log2(1 - p)
    least = p * new.nbytes + entropy * len(new) / 8
    assert len(message) <= min(1.6 * least + 30, new.nbytes)


@pytest.mark.parametrize("size", [0, 10, 200_000])
def test_there_is_no_message_when_almost_everything_changed(size: int):
    new, old = changed(size, 0.97)
    assert encode(parts(new), parts(old), 2) is None


def test_a_message_that_does_not_fit_is_refused():
    new, old = changed(1000, 0.01)
    message, _ = brought(new, old)
    beyond = np.zeros(BLOCK + 100, np.uint16)
    late, _ = brought(np.where(np.arange(len(beyond)) == len(beyond) - 1, 1, 0).astype(np.uint16), beyond)
    for broken, base in (
        (message, old[:0]),
        (message[:-1], old),
        (message, new[:10].repeat(8000)),
        (late, beyond[:-1]),
    ):
        with pytest.raises(ValueError, match="the message does not fit the old bytes"):
            decode(memoryview(broken), parts(base.copy()))
