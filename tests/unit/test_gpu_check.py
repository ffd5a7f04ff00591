import os
import subprocess
import sys

import pytest


@pytest.mark.parametrize("accepted", [False, True])
@pytest.mark.slow
def test_without_a_gpu_the_gpu_checks_say_so_and_succeed_only_when_that_is_fine(accepted: bool) -> None:
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "NO_GPU_IS_FINE": str(int(accepted))}
    command = [sys.executable, "-m", "pytest", "tests/gpu", "-p", "no:cacheprovider"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert "no GPU found: none of the GPU checks ran" in done.stdout + done.stderr
    assert (done.returncode == 0) == accepted
