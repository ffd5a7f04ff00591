"""Faults of whole clusters, one after another in runs that the same command continues.

`python -m pytest -m cluster_full tests/cluster/test_fault_table.py` prints the table of
docs/reliability/fault_tolerance.md.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from itertools import product
from typing import get_args

import pytest

from tests.cluster.cluster_runs import ClusterRun, SlurmRun, Way, cluster_run, is_launcher, is_raylet
from tests.cluster.conftest import ROW
from tests.cluster.launched import train_steps
from tests.cluster.two_hosts import TwoHosts
from tests.e2e.small_disk import fill, free

pytestmark = pytest.mark.cluster_full

FAULTS: dict[str, Callable[[ClusterRun], object]] = {
    "kill -9 of the launcher": lambda run: run.kill(0, is_launcher),
    "kill -9 of the raylet of the second host": lambda run: run.kill(1, is_raylet),
    "kill -9 of the head's raylet": lambda run: run.kill(0, is_raylet),
    "the disk is full": lambda run: fill(run.disk),
    "SIGTERM": lambda run: run.terminate(0),
    "SIGTERM on the second host": lambda run: run.terminate(1),
    "SIGTERM on both hosts": lambda run: [run.terminate(host) for host in (1, 0)],
    "`scontrol requeue`": lambda run: run.requeue() if isinstance(run, SlurmRun) else None,
}
ON_EVERY_HOST = ("SIGTERM on the second host", "SIGTERM on both hosts")
"""Faults of a way with a script on every host."""
TRAINING, STARTING = "while training", "while starting"


def applies(way: Way, fault: str, moment: str) -> bool:
    if moment == STARTING:
        return "raylet" in fault or "disk" in fault
    return "requeue" not in fault if way == "torchrun" else fault not in ON_EVERY_HOST


WAYS: tuple[Way, ...] = get_args(Way)
ROWS = [row for row in product(WAYS, (TRAINING, STARTING), FAULTS) if applies(row[0], row[2], row[1])]


@pytest.fixture(scope="module")
def run_of(hosts: TwoHosts, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[Way], ClusterRun]]:
    """Starts the run of a way and ends that of the way before it; the tests of one way share its run."""
    running: dict[Way, ClusterRun] = {}
    with ExitStack() as stack:

        def started(way: Way) -> ClusterRun:
            if way not in running:
                stack.close()
                running.clear()
                running[way] = stack.enter_context(cluster_run(way, hosts, tmp_path_factory.mktemp("run")))
            return running[way]

        yield started


@pytest.mark.parametrize(("way", "moment", "fault"), ROWS)
def test_after_a_fault_the_same_command_continues_the_run_without_a_gap(
    run_of: Callable[[Way], ClusterRun], way: Way, moment: str, fault: str, request: pytest.FixtureRequest
) -> None:
    run = run_of(way)
    if moment == STARTING:
        run.end_now()
        run.start()
        run.wait_for_agents()
    else:
        if run.exit_code() is not None:  # the fault before this one could not be recovered from
            run.start()
        run.wait_for_step(run.furthest_step() + 1)
    start_s = time.monotonic()
    FAULTS[fault](run)
    code = run.wait_for_end()
    row = {"way": way, "fault": f"{fault} {moment}", "s": time.monotonic() - start_s}
    furthest, saved = run.furthest_step(), run.saved_step()
    row |= {"code": code, "left": ", ".join(run.left()) or "nothing", "continues": "no"}
    request.node.user_properties.append((ROW, row))
    if "disk" in fault:
        free(run.disk)
    run.start()
    run.wait_for_step(furthest + 1)
    steps = train_steps(run.run_dir)
    row["continues"] = f"after step {furthest}, {furthest - saved} of them repeated"
    print(row)
    assert steps == list(range(1, len(steps) + 1))
