import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_bapo.errors import RunError
from megatron_bapo.weight_sync.buckets import buckets


@given(sizes=st.lists(st.integers(0, 40), max_size=30), limit=st.integers(1, 64))
def test_every_tensor_comes_once_and_in_order_and_only_a_lone_tensor_exceeds_the_limit(sizes: list[int], limit: int):
    named = [(f"t{index}", torch.empty(size, dtype=torch.uint8)) for index, size in enumerate(sizes)]
    names = []
    for bucket in buckets(named, limit):
        assert bucket
        assert len(bucket) == 1 or sum(tensor.nbytes for tensor in bucket.values()) <= limit
        names += bucket
    assert names == [name for name, _ in named]


def test_a_bucket_is_released_before_the_next_one_is_filled():
    seen: list[dict[str, torch.Tensor]] = []

    def export():
        for index in range(4):
            assert all(not bucket or f"t{index - 1}" in bucket for bucket in seen)
            yield f"t{index}", torch.zeros(10)

    for bucket in buckets(export(), 40):
        seen.append(bucket)
        assert len(bucket) == 1


def test_a_name_that_comes_twice_in_one_bucket_is_refused():
    with pytest.raises(RunError, match="tensor norm is exported twice"):
        list(buckets([("norm", torch.ones(1)), ("norm", torch.ones(1))], 1024))
