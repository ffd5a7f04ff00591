"""Run by `launch`: all ranks wait for a call of the main rank, which takes long, or whose process is stopped.

A case is {"name", "parallel", "limit_s", "call_s", "is_stopped"}. `out/NAME/seen.json` gets, by rank, what it has got
and the seconds that it has waited.
"""

import json
import os
import signal
import time
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist
from running import TIMEOUT_S, run_cases

from megatron_bapo.errors import RunError
from megatron_bapo.parallel.collectives import barrier, gather_by_rank, on_main
from megatron_bapo.parallel.groups import ParallelGroups


def wait(case: dict, out: Path, groups: ParallelGroups) -> None:
    groups.main_calls._limit_s = case["limit_s"]
    main_process = out / "main"
    if groups.is_main:
        main_process.write_text(str(os.getpid()))
    barrier(groups)
    limit_collectives(groups, 1)

    def slow_answer() -> str:
        if case["is_stopped"]:
            os.kill(os.getpid(), signal.SIGSTOP)
        time.sleep(case["call_s"])
        return "answer"

    start_s, failure = time.monotonic(), ""
    try:
        answers = [on_main(slow_answer if groups.is_main else None, groups), on_main(None, groups)]
    except RunError as error:
        answers, failure = [], str(error)
        (out / f"gave-up-{groups.global_rank}").touch()
        while len(list(out.glob("gave-up-*"))) < case["parallel"]["world_size"] - 1:
            time.sleep(0.05)
        os.kill(int(main_process.read_text()), signal.SIGCONT)
    waited_s = time.monotonic() - start_s
    limit_collectives(groups, TIMEOUT_S)
    seen = gather_by_rank((answers, waited_s, failure), groups)  # the mesh still works
    if groups.is_main:
        (out / "seen.json").write_text(json.dumps(seen))


def limit_collectives(groups: ParallelGroups, seconds: float) -> None:
    for axis in (groups.pipeline, groups.data_context, groups.tensor):
        dist.distributed_c10d._set_pg_timeout(timedelta(seconds=seconds), axis.group)


if __name__ == "__main__":
    run_cases(wait)
