import gzip
import json
from pathlib import Path

import pytest
import torch

from megatron_bapo.parallel import platform
from megatron_bapo.parallel.platform import SMALLEST_PIECE, host_buffers, profiled, set_host_threads


@pytest.mark.parametrize("num_bytes", [0, 1, 5000, SMALLEST_PIECE, SMALLEST_PIECE + 1, 13 * SMALLEST_PIECE + 17])
def test_host_buffers_are_powers_of_two_that_add_up_to_the_requested_size(num_bytes: int) -> None:
    pieces = host_buffers(num_bytes)
    assert sum(piece.nbytes for piece in pieces) == num_bytes
    assert all(piece.dtype == torch.uint8 for piece in pieces)
    # The allocator rounds up only the last buffer, which is small.
    assert all(piece.nbytes.bit_count() == 1 for piece in pieces[:-1])
    assert not pieces or pieces[-1].nbytes.bit_count() == 1 or pieces[-1].nbytes <= SMALLEST_PIECE


def test_a_profile_is_a_gzipped_chrome_trace_of_the_block(tmp_path: Path) -> None:
    file = tmp_path / "profile" / "step-2-rank-0.json.gz"
    with profiled(file):
        torch.ones(4, 4) @ torch.ones(4, 4)
    names = {event.get("name") for event in json.loads(gzip.decompress(file.read_bytes()))["traceEvents"]}
    assert "aten::mm" in names


@pytest.mark.parametrize(
    ("cpu_offload", "omp_num_threads", "expected"), [(True, "1", 12), (False, "1", 1), (True, "4", 1)]
)
def test_an_offloaded_optimizer_gets_the_ranks_share_of_the_cores(
    cpu_offload: bool, omp_num_threads: str, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(platform, "has_gpu", lambda: True)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(96)))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    monkeypatch.setenv("OMP_NUM_THREADS", omp_num_threads)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        set_host_threads(cpu_offload=cpu_offload)
        assert torch.get_num_threads() == expected
    finally:
        torch.set_num_threads(threads)
