"""Plans and publications of a few tensors, without a model."""

from collections.abc import Mapping, Sequence

import torch

from megatron_bapo.weight_sync.plan import Box, Shard, Slice, WeightPlan, make_plan
from megatron_bapo.weight_sync.transport import WeightStore
from megatron_bapo.weight_sync.version_file import view_of

BUCKET_BYTES = 64 << 10


def whole_tensors(
    tensors: Mapping[str, torch.Tensor], bucket_bytes: int = BUCKET_BYTES, num_hosts: int = 1
) -> WeightPlan:
    """One trainer rank on host 0 gives everything to one-rank engines on every host."""
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    dtype = str(next(iter(tensors.values())).dtype).removeprefix("torch.")
    shards = {name: [Shard(Box.whole(shape), (0,))] for name, shape in shapes.items()}
    return make_plan(
        shapes,
        dtype,
        shards,
        shards,
        sender_hosts=[0],
        reader_hosts=[range(num_hosts)],
        reader_layout="tp1-pp1",
        bucket_bytes=bucket_bytes,
    )


def halves(
    shapes: Mapping[str, tuple[int, ...]],
    *,
    dim: int,
    reader_dim: int,
    sender_hosts: Sequence[int] = (0, 0),
    reader_hosts: Sequence[int] = (0, 0),
    bucket_bytes: int = 1 << 20,
) -> WeightPlan:
    """Two trainer ranks hold half of every float32 matrix each, and two engine ranks need half of each."""
    return make_plan(
        shapes,
        "float32",
        {name: _halves(shape, dim) for name, shape in shapes.items()},
        {name: _halves(shape, reader_dim) for name, shape in shapes.items()},
        sender_hosts=sender_hosts,
        reader_hosts=[[host] for host in reader_hosts],
        reader_layout="tp2-pp1",
        bucket_bytes=bucket_bytes,
    )


def _halves(shape: tuple[int, ...], dim: int) -> Sequence[Shard]:
    half = tuple(size // 2 if i == dim else size for i, size in enumerate(shape))
    starts = [tuple(rank * half[i] if i == dim else 0 for i in range(len(shape))) for rank in range(2)]
    return [Shard(Box(start, half), (rank,)) for rank, start in enumerate(starts)]


def reading(tensors: Mapping[str, torch.Tensor]):
    """What a trainer rank with these tensors gives for a slice."""

    def read(part: Slice) -> torch.Tensor:
        return view_of(tensors[part.name], part.box)

    return read


def publish(
    store: WeightStore, version: int, tensors: Mapping[str, torch.Tensor], bucket_bytes: int = BUCKET_BYTES
) -> WeightPlan:
    """Write and commit a version of whole tensors."""
    plan = whole_tensors(tensors, bucket_bytes)
    store.write(version, plan, 0, reading(tensors))
    store.commit(version, plan)
    return plan


def numbered(shapes: Mapping[str, tuple[int, ...]], version: int) -> dict[str, torch.Tensor]:
    """Every element of every tensor says which version it is of; a few say nothing new."""
    tensors = {name: torch.full(shape, float(version)) for name, shape in shapes.items()}
    for tensor in tensors.values():
        tensor.view(-1)[::3] = 0.0
    return tensors
