"""Ends a rank at every stage of an asynchronous write, then resumes: python killed_checkpoint_ranks.py MODEL OUT

Two ranks save after the first update and begin to save after the second; a fault ends the write of one of them. Two new
ranks load the newest checkpoint and train on. `OUT/facts.json` has for each fault the exit codes of both ranks, the
messages of the ranks that were left, and the checkpoints; `OUT/FAULT/` has the run's files. `none` is without a fault.
"""

import gc
import json
import multiprocessing
import os
import resource
import signal
import sys
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path
from tempfile import TemporaryDirectory

import torch._dynamo  # noqa: F401  (once here instead of in every forked rank)
from examples import LEARNING_RATE, make_config, make_examples

from megatron_bapo.cluster.interrupts import end_with_parent
from megatron_bapo.errors import RunError
from megatron_bapo.parallel.groups import create_groups
from megatron_bapo.parallel.platform import start_distributed
from megatron_bapo.trainer.checkpoint import checkpoints, load_checkpoint
from megatron_bapo.trainer.checkpoint_writer import CheckpointWriter
from megatron_bapo.trainer.policy_update import update_policy
from megatron_bapo.trainer.worker import Worker, create_worker

TIMEOUT_S = 120.0
NUM_UPDATES = 4
FILE_LIMIT = 20_000
"""Size at which a file cannot grow, which is in the middle of each rank's tensors."""
PARALLEL = {"world_size": 2, "use_distributed_optimizer": True}


def killed_at(event: str, name: str) -> Callable[[], None]:
    """Return a function after whose call this process kills itself at Python's audit event on a path with `name`."""

    def watch(found: str, arguments: tuple) -> None:
        if found == event and arguments and name in str(arguments[0]):
            os.kill(os.getpid(), signal.SIGKILL)

    return lambda: sys.addaudithook(watch)


def limited_files(handler: signal.Handlers) -> Callable[[], None]:
    """Return a function after whose call files stop growing: a write is an error or, by default, ends the process."""

    def limit() -> None:
        signal.signal(signal.SIGXFSZ, handler)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_FSIZE, (FILE_LIMIT, FILE_LIMIT))

    return limit


FAULTS: dict[str, tuple[int, Callable[[], None]]] = {
    "none": (0, lambda: None),
    "killed-before-the-first-file": (1, killed_at("open", "step-00000002.partial/weights")),
    "killed-within-a-file": (1, limited_files(signal.SIG_DFL)),
    "killed-between-two-states": (0, killed_at("open", "step-00000002.partial/exp_avg_sq")),
    "killed-before-the-state": (0, killed_at("open", "step-00000002.partial/state.json")),
    "killed-before-the-rename": (0, killed_at("os.rename", "step-00000002.partial")),
    "killed-before-old-ones-are-deleted": (0, killed_at("shutil.rmtree", "step-00000001")),
    "killed-while-old-ones-are-deleted": (0, killed_at("os.rmdir", "weights")),
    "cannot-write": (1, limited_files(signal.SIG_IGN)),
}


def start_rank(rank: int, model: Path, out: Path, meeting: Path) -> Worker:
    end_with_parent()
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}
    start_distributed(TIMEOUT_S, store_file=meeting / "ranks")
    config = make_config(model, out / "run", PARALLEL, "float32", packing=True)
    settings = config.checkpoint.model_copy(update={"keep": 1})
    config = config.model_copy(update={"checkpoint": settings})
    return create_worker(config, model, create_groups(config.parallel, seed=0, timeout_s=TIMEOUT_S))


def update(worker: Worker) -> None:
    update_policy(worker, make_examples(worker.model.architecture.vocab_size), lr=LEARNING_RATE, on_policy=False)


def interrupted(rank: int, model: Path, out: Path, meeting: Path, fault: str) -> None:
    """Save twice; the fault meets the second write of its rank, during whose time the ranks would train on."""
    worker = start_rank(rank, model, out, meeting)
    writer = CheckpointWriter(worker, out / "checkpoints")
    update(worker)
    writer.save(1, {"number": 1})
    writer.finish()
    update(worker)
    faulty_rank, cause = FAULTS[fault]
    if rank == faulty_rank:
        cause()
    writer.save(2, {"number": 2})
    try:
        writer.finish()
    except RunError as failure:
        (out / f"failure-{rank}").write_text(str(failure))


def resumed(rank: int, model: Path, out: Path, meeting: Path, fault: str) -> None:
    worker = start_rank(rank, model, out, meeting)
    number = load_checkpoint(worker, checkpoints(out / "checkpoints")[-1])["number"]
    writer = CheckpointWriter(worker, out / "checkpoints")
    for _ in range(number, NUM_UPDATES):
        update(worker)
    writer.save(NUM_UPDATES, {"number": NUM_UPDATES})
    writer.close()


def run_ranks(target: Callable[..., None], model: Path, out: Path, fault: str) -> list[int | None]:
    """Run two ranks and return their exit codes, negative for a signal."""
    with TemporaryDirectory() as meeting:
        context = multiprocessing.get_context("fork")
        ranks: list[BaseProcess] = [
            context.Process(target=target, args=(rank, model, out, Path(meeting), fault)) for rank in range(2)
        ]
        for rank in ranks:
            rank.start()
        for rank in ranks:
            rank.join()
        return [rank.exitcode for rank in ranks]


def main() -> None:
    model, root, facts = Path(sys.argv[1]), Path(sys.argv[2]), {}
    gc.collect()
    gc.freeze()
    for fault in FAULTS:
        out = root / fault
        (out / "checkpoints").mkdir(parents=True)
        exit_codes = run_ranks(interrupted, model, out, fault)
        left = {path.name: path.read_text() for path in out.glob("failure-*")}
        complete = [path.name for path in checkpoints(out / "checkpoints")]
        ended = run_ranks(resumed, model, out, fault)
        facts[fault] = {"exit_codes": exit_codes, "failures": left, "complete": complete, "resumed": ended}
    (root / "facts.json").write_text(json.dumps(facts))


if __name__ == "__main__":
    main()
