"""Runs a list of cases on several ranks through a script that passes them to `run_cases`."""

import json
import os
import subprocess
import sys
from pathlib import Path

LIMIT_S = 2400
"""Time that the cases may take in all, which is several times what they take on two quiet cores."""
HERE = Path(__file__).parent
GPU_MEGATRON_SITE = HERE.parents[1] / "build" / "megatron-gpu-site"
"""Site folder with the Megatron-Core version of the GPU lock, created by the Makefile."""
PEFT_SITE = HERE.parents[1] / "build" / "peft-site"
"""Site folder with PEFT, which the tests of adapters compare with; created by the Makefile."""


def launch(script: str, cases: list[dict], root: Path, world_size: int, *, site: Path | None = None) -> None:
    """Run the cases with a script of this folder on `world_size` ranks; a failure shows the output of the ranks.

    Packages in the folder `site` take precedence over installed ones.
    """
    case_file = root / f"cases-{world_size}.json"
    case_file.write_text(json.dumps(cases))
    command = [sys.executable, str(HERE / script), str(case_file), str(root), str(world_size)]
    folders = [*([str(site)] if site else []), str(HERE.parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
    defaults = {"OMP_NUM_THREADS": "1", "PYTHONFAULTHANDLER": "1"}
    environment = defaults | os.environ | {"PYTHONPATH": os.pathsep.join(folders)}
    # On a GPU the output had bytes that are not UTF-8.
    done = subprocess.run(
        command, capture_output=True, text=True, errors="replace", timeout=LIMIT_S, check=False, env=environment
    )
    assert done.returncode == 0, done.stdout + done.stderr


def launch_all(script: str, cases: list[dict], root: Path) -> None:
    """Run the cases in two launches, of four and of eight ranks; cases of the same size keep their order."""
    cases = sorted(cases, key=lambda case: case["parallel"]["world_size"])
    for sizes in ((1, 2, 4), (8,)):
        launch(script, [case for case in cases if case["parallel"]["world_size"] in sizes], root, max(sizes))


def launch_with_gpu_megatron(script: str, cases: list[dict], results: Path, world_size: int) -> Path:
    """Run the cases with the Megatron-Core version of the GPU lock; return their folder, which is in `results`."""
    assert (GPU_MEGATRON_SITE / ".complete").is_file(), f"{GPU_MEGATRON_SITE} does not exist; `make test` creates it"
    root = results / "gpu-megatron"
    root.mkdir()
    launch(script, cases, root, world_size, site=GPU_MEGATRON_SITE)
    return root
