import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("kernels_for_gpus.py")
REGISTERS, SHARED_BYTES = 255, 48 << 10
"""Limits of a thread, and of a block without opting in to more."""


@pytest.mark.slow
def test_every_variant_of_the_kernels_compiles_for_ampere_hopper_and_blackwell_without_a_gpu(tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path)
    done = subprocess.run(
        [sys.executable, str(SCRIPT)], env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert len(found) == 3 * (2 * 3 + 12)
    for name, usage in found.items():
        print(f"{name}: {usage['registers']} registers, {usage['shared']} bytes of shared memory")
        assert 0 < usage["registers"] <= REGISTERS, name
        assert usage["spilled"] == 0, name
        assert usage["shared"] <= SHARED_BYTES, name
        # 65,536 tokens x 152,064 rows are more logits than 32 bits count.
        assert usage["offsets_64_bit"] or "loss" in name, name
