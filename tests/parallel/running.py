"""Runs the cases of a script that `launch` has started, each on separate rank processes."""

import gc
import json
import multiprocessing
import os
import sys
from collections.abc import Callable, Iterable
from itertools import groupby
from multiprocessing.connection import wait
from operator import itemgetter
from pathlib import Path
from tempfile import TemporaryDirectory

# Torch's optimizers and scaled rope types import these when they are made: once here instead of in every forked rank.
import torch._dynamo  # noqa: F401
import torch.distributed as dist
import transformers.modeling_rope_utils  # noqa: F401
from transformers import PreTrainedConfig  # noqa: F401

from megatron_bapo.cluster.interrupts import end_with_parent
from megatron_bapo.config.schema import ParallelConfig
from megatron_bapo.parallel.groups import ParallelGroups, create_groups
from megatron_bapo.parallel.megatron import parallel_state
from megatron_bapo.parallel.platform import has_gpu, start_distributed
from tests.parallel.one_gpu import rank_environment

TIMEOUT_S = 1800
"""Timeout of a collective; also limits how long ranks wait for a case while smaller cases run."""
RunCase = Callable[[dict, Path, ParallelGroups], None]


def run_cases(run_case: RunCase) -> None:
    """Call `run_case(case, out / name, groups)` for each case on as many ranks as its layout needs.

    A case's "parallel" is that section of the configuration; neighbours of one layout share its process groups. Rank 0
    takes part in every case, so a case finds the files of those above it complete.
    """
    gc.collect()
    gc.freeze()  # imports create half a million objects, which the collection of each case would visit
    # Forked processes import nothing again, but a GPU that is in use does not survive a fork.
    context = multiprocessing.get_context("spawn" if has_gpu() else "fork")
    with TemporaryDirectory() as meeting:
        ranks = [
            context.Process(target=_run_rank, args=(run_case, rank, Path(meeting))) for rank in range(int(sys.argv[3]))
        ]
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


def _run_rank(run_case: RunCase, rank: int, meeting: Path) -> None:
    end_with_parent()
    cases, out = json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2])
    os.environ |= rank_environment(rank, int(sys.argv[3]))
    for number, (parallel, same_layout) in enumerate(groupby(cases, itemgetter("parallel"))):
        layout = ParallelConfig.model_validate(parallel)
        if rank < layout.world_size:
            os.environ["WORLD_SIZE"] = str(layout.world_size)
            start_distributed(TIMEOUT_S, store_file=meeting / str(number))
            _run_layout(layout, same_layout, out, run_case)
            parallel_state.destroy_model_parallel()
            dist.destroy_process_group()


def _run_layout(layout: ParallelConfig, cases: Iterable[dict], out: Path, run_case: RunCase) -> None:
    groups = create_groups(layout, seed=0, timeout_s=TIMEOUT_S)
    for case in cases:
        folder = out / case["name"]
        folder.mkdir(exist_ok=True)
        run_case(case, folder, groups)
    _release_models()


def _release_models() -> None:
    """Free what the cases of a layout built: the threads of process groups that models keep alive would accumulate."""
    for dispatcher in [thing for thing in gc.get_objects() if type(thing).__name__ == "MoEAlltoAllTokenDispatcher"]:
        # It keeps the graph of its last micro-batch, whose hooks keep the model: a cycle through C++ that gc misses.
        vars(dispatcher).clear()
    gc.collect()
