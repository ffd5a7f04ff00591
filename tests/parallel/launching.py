"""How a test runs a list of cases on several ranks: `launch` in the test, `run_cases` in the script that it starts."""

import gc
import json
import multiprocessing
import os
import subprocess
import sys
from collections.abc import Callable
from multiprocessing.connection import wait
from pathlib import Path

import torch._dynamo  # noqa: F401  (torch's optimizers import it, here before the fork)
import torch.distributed as dist

from megatron_bapo.controller.interrupts import end_with_parent
from megatron_bapo.parallel.platform import has_gpu, start_distributed

HERE = Path(__file__).parent
TIMEOUT_S = 300
"""Of a collective; also how long ranks may wait for a case while smaller ones run."""
RunCase = Callable[[dict, Path], None]


def launch(script: str, cases: list[dict], root: Path, world_size: int, *, site: Path | None = None) -> None:
    """Run the cases by a script of this folder on `world_size` ranks; a failure shows the ranks' own output.

    Packages in the folder `site` come before those that are installed.
    """
    case_file = root / f"cases-{world_size}.json"
    case_file.write_text(json.dumps(cases))
    command = [sys.executable, str(HERE / script), str(case_file), str(root), str(world_size)]
    folders = [*([str(site)] if site else []), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {"OMP_NUM_THREADS": "1", **os.environ, "PYTHONPATH": os.pathsep.join(folders)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr


def run_cases(run_case: RunCase) -> None:
    """`run_case(case, out / name)` for each case of the file that `launch` passes on, by its first `world_size` ranks.

    Rank 0 takes part in every case, so a case finds the files of those above it complete.
    """
    gc.collect()
    gc.freeze()  # half a million objects of imports, which every case's collection would walk
    # Forks import nothing again; a GPU does not survive one.
    context = multiprocessing.get_context("spawn" if has_gpu() else "fork")
    ranks = [context.Process(target=_run_rank, args=(run_case, rank)) for rank in range(int(sys.argv[3]))]
    for rank in ranks:
        rank.start()
    running = {rank.sentinel: rank for rank in ranks}
    while running:
        for sentinel in wait(running):
            (rank := running.pop(sentinel)).join()
            if rank.exitcode != 0:
                for other in running.values():
                    other.kill()
                sys.exit(1)


def _run_rank(run_case: RunCase, rank: int) -> None:
    end_with_parent()
    cases, out = json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2])
    os.environ["RANK"] = os.environ["LOCAL_RANK"] = str(rank)
    for case in cases:
        if rank < case["world_size"]:
            os.environ["WORLD_SIZE"] = str(case["world_size"])
            start_distributed(TIMEOUT_S, store_file=out / f"rendezvous-{case['name']}")
            folder = out / case["name"]
            folder.mkdir(exist_ok=True)
            run_case(case, folder)
            release_models()
            dist.destroy_process_group()


def release_models() -> None:
    """Free what a case built: the threads of process groups that live on in models would pile up over the cases."""
    for dispatcher in [thing for thing in gc.get_objects() if type(thing).__name__ == "MoEAlltoAllTokenDispatcher"]:
        # It keeps its last micro-batch's graph, whose hooks keep the model: a circle through C++ that gc does not see.
        vars(dispatcher).clear()
    gc.collect()
