"""Values of tokens reach exactly the replicas that need them, unchanged, and no replica receives more than that."""

from __future__ import annotations

import multiprocessing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from megatron_bapo.parallel.groups import Axis
from megatron_bapo.trainer.token_values import for_own_trajectories

TRAJECTORIES_OF_A_REPLICA = 8
LIMIT_S = 120.0


def plans(size: int) -> tuple[np.ndarray, list[list[int]], list[list[int]]]:
    """Return the numbers of tokens, the trajectories that each replica scores, and those that it trains on.

    A tenth of the trajectories has two owners, one is trained on by none, and the last replica scores nothing.
    """
    rng, num = np.random.default_rng(0), TRAJECTORIES_OF_A_REPLICA * size
    lengths, scored = rng.integers(1, 500, num), rng.integers(0, max(1, size - 1), num)
    order = rng.permutation(num)[1:]
    own = [{*part.tolist()} for part in np.array_split(order, size)]
    for index in order[: num // 10].tolist():
        own[int(rng.integers(size))].add(index)
    return lengths, [np.flatnonzero(scored == rank).tolist() for rank in range(size)], [sorted(each) for each in own]


def values_of(index: int, length: int) -> np.ndarray:
    values = np.random.default_rng(index).standard_normal(length).astype(np.float32)
    values[0] = np.nan if index % 7 == 0 else values[0]
    return values


def run_rank(rank: int, size: int, meeting: Path, found: Any) -> None:
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=size)
    received = list[int]()
    original = dist.batch_isend_irecv

    def counted(operations: list[dist.P2POp]) -> Any:
        received.extend(each.tensor.nbytes for each in operations if each.op is dist.irecv)
        return original(operations)

    dist.batch_isend_irecv = counted
    lengths, scored, own = plans(size)
    mine = [values_of(i, int(lengths[i])) for i in scored[rank]]
    values_T = torch.from_numpy(np.concatenate([np.zeros(0, np.float32), *mine]))
    assert dist.group.WORLD is not None
    result = for_own_trajectories(values_T, scored, own[rank], lengths.tolist(), Axis(dist.group.WORLD, rank, size))
    found.put((rank, result.numpy().tobytes(), sum(received)))
    dist.barrier()
    dist.destroy_process_group()


def exchanged(size: int, meeting: Path) -> list[tuple[int, bytes, int]]:
    """Return (rank, bytes of its values, bytes that it received) for each rank."""
    context = multiprocessing.get_context("fork")
    found = context.Queue()
    ranks = [context.Process(target=run_rank, args=(rank, size, meeting, found)) for rank in range(size)]
    for rank in ranks:
        rank.start()
    results = sorted(found.get(timeout=LIMIT_S) for _ in ranks)
    for rank in ranks:
        rank.join(LIMIT_S)
        assert rank.exitcode == 0
    return results


@pytest.mark.parametrize("size", [1, 2, 4])
def test_each_replica_gets_the_values_of_its_own_trajectories_bit_by_bit(tmp_path: Path, size: int) -> None:
    lengths, scored, own = plans(size)
    for rank, values, num_received in exchanged(size, tmp_path / "ranks"):
        expected = [values_of(i, int(lengths[i])) for i in own[rank]]
        assert values == np.concatenate(expected).tobytes()
        from_others = [i for i in own[rank] if i not in scored[rank]]
        assert num_received == 4 * sum(int(lengths[i]) for i in from_others)
