"""Transfer plans and versions of a few tensors, without a model."""

import gc
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import distributed as dist

from megatron_bapo.errors import RunError
from megatron_bapo.parallel.platform import host_group
from megatron_bapo.weight_sync.host_chain import Chain, Group, receive, send
from megatron_bapo.weight_sync.plan import Box, Shard, Slice, WeightPlan, make_plan
from megatron_bapo.weight_sync.transport import WeightStore
from megatron_bapo.weight_sync.version_file import view_of

BUCKET_BYTES = 64 << 10


def whole_tensors(
    tensors: Mapping[str, torch.Tensor], bucket_bytes: int = BUCKET_BYTES, hosts: Sequence[int] = (0,)
) -> WeightPlan:
    """Return the plan in which one trainer rank on host 0 sends everything to one-rank engines on these hosts."""
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    dtype = str(next(iter(tensors.values())).dtype).removeprefix("torch.")
    shards = {name: [Shard(Box.whole(shape), (0,))] for name, shape in shapes.items()}
    return make_plan(
        shapes,
        dtype,
        shards,
        shards,
        sender_hosts=[0],
        reader_hosts=[hosts],
        reader_layout="tp1-pp1",
        bucket_bytes=bucket_bytes,
    )


def halves(
    shapes: Mapping[str, tuple[int, ...]],
    *,
    dim: int,
    reader_dim: int,
    sender_hosts: Sequence[int] = (0, 0),
    reader_hosts: Sequence[int | Sequence[int]] = (0, 0),
    bucket_bytes: int = 1 << 20,
) -> WeightPlan:
    """Return the plan in which two trainer ranks have, and two engine ranks need, half of every float32 matrix each."""
    return make_plan(
        shapes,
        "float32",
        {name: _halves(shape, dim) for name, shape in shapes.items()},
        {name: _halves(shape, reader_dim) for name, shape in shapes.items()},
        sender_hosts=sender_hosts,
        reader_hosts=[[hosts] if isinstance(hosts, int) else hosts for hosts in reader_hosts],
        reader_layout="tp2-pp1",
        bucket_bytes=bucket_bytes,
    )


def _halves(shape: tuple[int, ...], dim: int) -> Sequence[Shard]:
    half = tuple(size // 2 if i == dim else size for i, size in enumerate(shape))
    starts = [tuple(rank * half[i] if i == dim else 0 for i in range(len(shape))) for rank in range(2)]
    return [Shard(Box(start, half), (rank,)) for rank, start in enumerate(starts)]


def reading(tensors: Mapping[str, torch.Tensor]):
    """Return the read function of a trainer rank with these tensors."""

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
    """Return tensors whose elements are the version number, except for a third that is 0 in every version."""
    tensors = {name: torch.full(shape, float(version)) for name, shape in shapes.items()}
    for tensor in tensors.values():
        tensor.view(-1)[::3] = 0.0
    return tensors


def transfer(
    stores: Mapping[int, WeightStore],
    version: int,
    base: int | None = None,
    *,
    num_senders: int = 1,
    wrap: Callable[[int, Group], Group] = lambda host, group: group,
) -> list[int]:
    """Transfer a version from the first hosts' stores to the others', in a thread and with gloo for each host.

    Returns the bytes that each sender sent. `wrap` may replace the process group of a host.
    """
    rendezvous, hosts = dist.HashStore(), sorted(stores)
    ranks = {host: rank for rank, host in enumerate(hosts)}
    plan = stores[hosts[0]].plan(version)

    def take_part(host: int) -> int | None:
        group = host_group(rendezvous, ranks[host], len(hosts), "127.0.0.1", timeout_s=60.0)
        chain = Chain(wrap(host, group), ranks, tuple(hosts[num_senders:]))
        if host in hosts[:num_senders]:
            return send(stores[host], version, host, chain, base)
        return receive(stores[host], version, plan, host, chain, base)

    def failing_fast(host: int) -> int | None:
        """Drop the failed group together with the error's frames, which closes its connections."""
        try:
            return take_part(host)
        except RunError as error:
            message = str(error)
        gc.collect()
        raise RunError(message)

    with ThreadPoolExecutor(len(hosts)) as executor:
        parts = [executor.submit(failing_fast, host) for host in hosts]
    for part in reversed(parts):  # the error of a receiver says more than that of the host that sent to it
        part.result()
    return [result for part in parts if (result := part.result()) is not None]
