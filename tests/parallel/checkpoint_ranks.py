"""Run by `launch`: saves two states in a row with and without `async_save`, training in between, and resumes.

A case is {"name", "model", "parallel", "dtype", "optimizer"}, and may have "timeout_s". `out/NAME/sync` and
`out/NAME/async` get the checkpoints, `continued` the parameters after a third update, and `resumed` those after the
same update from the second asynchronous checkpoint. `slow` gets a checkpoint whose commit takes twice the timeout of
collectives, `timeout_s`.
"""

import json
import time
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

from examples import LEARNING_RATE, make_config, make_examples
from optimizer_ranks import on_all_ranks, same_bits
from running import run_cases

from megatron_bapo.metrics.values import scalars
from megatron_bapo.model.hf_export import save_hugging_face
from megatron_bapo.parallel.groups import ParallelGroups, through
from megatron_bapo.parallel.platform import host_process_group
from megatron_bapo.planning.model_state import model_state
from megatron_bapo.trainer.checkpoint import checkpoints, load_checkpoint
from megatron_bapo.trainer.checkpoint_writer import CheckpointWriter
from megatron_bapo.trainer.optimizer import STATES
from megatron_bapo.trainer.policy_update import update_policy
from megatron_bapo.trainer.snapshot import Snapshot
from megatron_bapo.trainer.worker import Worker, create_worker


def update(worker: Worker) -> None:
    update_policy(worker, make_examples(worker.model.architecture.vocab_size), lr=LEARNING_RATE, on_policy=False)


def with_async_save(worker: Worker, value: bool) -> Worker:
    settings = worker.config.checkpoint.model_copy(update={"async_save": value})
    return Worker(
        worker.config.model_copy(update={"checkpoint": settings}), worker.groups, worker.model, worker.optimizer
    )


class SlowRollouts:
    """Rollouts without files, which are complete after twice the timeout of a collective."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s

    def begin_saving(self, folder: Path) -> dict[str, Any]:
        return {"folder": folder.name}

    def finish_saving(self) -> None:
        time.sleep(2 * self._timeout_s)


def save_slowly(worker: Worker, folder: Path, timeout_s: float) -> None:
    settings = worker.config.trainer.model_copy(update={"collective_timeout_s": timeout_s})
    limited = replace(worker, config=worker.config.model_copy(update={"trainer": settings}))
    writer = CheckpointWriter(limited, folder, SlowRollouts(timeout_s))
    writer.save(1, {})
    writer.finish()


def snapshot_keeps_its_values(worker: Worker) -> bool:
    """Update with a snapshot at hand, and return whether it still has every state from before the update."""
    snapshot = Snapshot(worker.optimizer, through(host_process_group(60.0), worker.groups))
    parameters = [parameter for _, parameter in worker.model.named_parameters()]
    before = [
        None if tensor is None else tensor.clone()
        for parameter, state in product(parameters, STATES)
        for tensor in [worker.optimizer.read(parameter, state)]
    ]
    snapshot.take(STATES)
    update(worker)
    kept = [snapshot.read(parameter, state) for parameter, state in product(parameters, STATES)]
    now = [worker.optimizer.read(parameter, state) for parameter, state in product(parameters, STATES)]
    return on_all_ranks(same_bits(before, kept)) and not on_all_ranks(same_bits(before, now))


def copy_is_as_planned(worker: Worker) -> bool:
    """Return whether the copy of the state takes the bytes that the planner counts, but for alignment."""
    groups, num_pieces = worker.groups, len([*worker.optimizer.states()])
    ranks = groups.pipeline.rank, groups.data_context.rank, groups.expert_data.rank
    planned = 12 * model_state(worker.config, worker.model.architecture, *ranks).updated
    allocated = Snapshot(worker.optimizer, groups).num_bytes
    return on_all_ranks(planned <= allocated < planned + 64 * num_pieces)


def run_case(case: dict, out: Path, groups: ParallelGroups) -> None:
    config = make_config(Path(case["model"]), out / "run", case["parallel"], case["dtype"], packing=True)
    config = config.model_copy(update={"optimizer": config.optimizer.model_copy(update=case["optimizer"])})
    worker = create_worker(config, config.model_path, groups)
    waiting, writing = (
        CheckpointWriter(with_async_save(worker, value), out / name)
        for name, value in (("sync", False), ("async", True))
    )
    for number in (1, 2):
        update(worker)
        waiting.save(number, {"number": number})
        writing.save(number, {"number": number})
    update(worker)  # while the second checkpoint is written
    writing.finish()
    metrics = {name: scalars(writer.metrics()) for name, writer in (("sync", waiting), ("async", writing))}
    save_hugging_face(worker.model, groups, config.model_path, out / "continued")
    assert load_checkpoint(worker, checkpoints(out / "async")[-1])["number"] == 2
    update(worker)
    save_hugging_face(worker.model, groups, config.model_path, out / "resumed")
    facts = {
        "metrics": metrics,
        "snapshot_keeps_its_values": snapshot_keeps_its_values(worker),
        "copy_is_as_planned": copy_is_as_planned(worker),
    }
    if "timeout_s" in case:
        save_slowly(worker, out / "slow", case["timeout_s"])
    if groups.is_main:
        (out / "facts.json").write_text(json.dumps(facts))


if __name__ == "__main__":
    run_cases(run_case)
