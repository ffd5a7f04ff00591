"""Run by `launch`: loads a checkpoint into a layout, and saves it as a checkpoint and as a Hugging Face folder.

The model comes from a Hugging Face folder of the same weights. These and Adam's moments are made NaN before the
checkpoint is read. `rank-N.json` says what rank N did when it saved the checkpoint.
"""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from unittest.mock import patch

import torch
from examples import make_config
from running import run_cases

from bench.allocated_bytes import peak_allocated_bytes
from megatron_bapo.model.hf_export import save_hugging_face
from megatron_bapo.parallel.groups import ParallelGroups
from megatron_bapo.trainer.checkpoint import load_checkpoint, save_checkpoint
from megatron_bapo.trainer.optimizer import STATES
from megatron_bapo.trainer.worker import create_worker


@contextmanager
def recorded_flushes() -> Iterator[dict[str, int]]:
    """Record name and size of the files that this rank flushes with fsync."""
    flushed, fsync = {}, os.fsync

    def flush(descriptor: int) -> None:
        path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        flushed[path.name] = path.stat().st_size
        fsync(descriptor)

    with patch.object(os, "fsync", flush):
        yield flushed


def run_case(case: dict, out: Path, groups: ParallelGroups) -> None:
    source = Path(case["model"])
    config = make_config(source, out, case["parallel"], "float32", packing=True)
    worker = create_worker(config, source, groups)
    save_hugging_face(worker.model, groups, source, out / "imported")
    for _, parameter in worker.model.named_parameters():
        for state_name in STATES:
            worker.optimizer.write(parameter, state_name, torch.full_like(parameter, torch.nan))
    worker.optimizer.num_steps = 7
    state = load_checkpoint(worker, Path(case["checkpoint"]))
    for _, parameter in worker.model.named_parameters():
        for state_name in ("exp_avg", "exp_avg_sq"):
            moments = worker.optimizer.read(parameter, state_name)
            assert moments is None or not moments.any(), (
                f"{state_name} is not zero in a checkpoint before the first step"
            )
    assert worker.optimizer.num_steps == 0
    save_hugging_face(worker.model, groups, source, out / "written")
    with recorded_flushes() as flushed:
        peak = peak_allocated_bytes(partial(save_checkpoint, worker, out / "checkpoints", 0, state, keep=1))
    facts = {"flushed": flushed, "peak_bytes": peak}
    (out / f"rank-{groups.global_rank}.json").write_text(json.dumps(facts))


if __name__ == "__main__":
    run_cases(run_case)
