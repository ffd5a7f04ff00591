"""Runs a list of cases on several ranks through a script that passes them to `run_cases`."""

import json
import os
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent


def launch(script: str, cases: list[dict], root: Path, world_size: int, *, site: Path | None = None) -> None:
    """Run the cases with a script of this folder on `world_size` ranks; a failure shows the output of the ranks.

    Packages in the folder `site` take precedence over installed ones.
    """
    case_file = root / f"cases-{world_size}.json"
    case_file.write_text(json.dumps(cases))
    command = [sys.executable, str(HERE / script), str(case_file), str(root), str(world_size)]
    folders = [*([str(site)] if site else []), str(HERE.parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {"OMP_NUM_THREADS": "1", **os.environ, "PYTHONPATH": os.pathsep.join(folders)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
