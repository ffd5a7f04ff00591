"""Groups a stream of named tensors into transfer units of bounded size."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from torch import Tensor

from megatron_bapo.errors import RunError


def buckets(named_tensors: Iterable[tuple[str, Tensor]], bucket_bytes: int) -> Iterator[dict[str, Tensor]]:
    """Consecutive tensors of at most `bucket_bytes` together; a larger tensor is a bucket of its own.

    A bucket is emptied when the next one is asked for, so that no two are in memory. Raises RunError when one would
    hold two tensors of the same name.
    """
    bucket: dict[str, Tensor] = {}
    num_bytes = 0
    for name, tensor in named_tensors:
        if bucket and num_bytes + tensor.nbytes > bucket_bytes:
            yield bucket
            bucket.clear()
            num_bytes = 0
        if name in bucket:
            raise RunError(f"tensor {name} is exported twice; every name belongs to one tensor")
        bucket[name] = tensor
        num_bytes += tensor.nbytes
    if bucket:
        yield bucket
