"""Run by `launch`: all ranks wait for a call of the main rank that takes longer than a collective may.

A case is {"name", "parallel", "call_s"}. `out/NAME/seen.json` gets, by rank, what it has got
and the seconds that it has waited.
"""

import json
import time
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist
from running import TIMEOUT_S, run_cases

from megatron_bapo.parallel.collectives import gather_by_rank, on_main
from megatron_bapo.parallel.groups import ParallelGroups

COLLECTIVE_S = 1


def wait(case: dict, out: Path, groups: ParallelGroups) -> None:
    limit_collectives(groups, COLLECTIVE_S)

    def slow_answer() -> str:
        time.sleep(case["call_s"])
        return "answer"

    start_s = time.monotonic()
    answers = [on_main(slow_answer if groups.is_main else None, groups), on_main(None, groups)]
    waited_s = time.monotonic() - start_s
    limit_collectives(groups, TIMEOUT_S)
    seen = gather_by_rank((answers, waited_s), groups)  # the mesh still works
    if groups.is_main:
        (out / "seen.json").write_text(json.dumps(seen))


def limit_collectives(groups: ParallelGroups, seconds: float) -> None:
    for axis in (groups.pipeline, groups.data_context, groups.tensor):
        dist.distributed_c10d._set_pg_timeout(timedelta(seconds=seconds), axis.group)


if __name__ == "__main__":
    run_cases(wait)
