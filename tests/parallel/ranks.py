"""Run by `launch`: the cases of the layout matrix.

A case is {"name", "model", "parallel", "dtype"}, with "fault", "freeze_router" and "resume_from" where it has them. For
each, its folder gets the log-probs of some examples before any update, the first update's gradients, packed and padded,
and the parameters after two updates and after a third from another layout's checkpoint, all in Hugging Face's names,
and the metrics.
"""

import json
from functools import partial
from pathlib import Path

import numpy as np
import torch
from examples import LEARNING_RATE, make_config, make_examples
from faults import FAULTS
from running import run_cases
from safetensors.torch import save_file

from megatron_bapo.metrics.values import scalars
from megatron_bapo.model.hf_export import save_hugging_face, stream_tensors, write_stage
from megatron_bapo.parallel.collectives import barrier
from megatron_bapo.parallel.groups import ParallelGroups
from megatron_bapo.trainer.checkpoint import checkpoints, load_checkpoint, save_checkpoint
from megatron_bapo.trainer.policy_update import reduce_metrics, update_policy
from megatron_bapo.trainer.worker import Worker, create_worker, score_sequence

NUM_SCORED = 4
NUM_UPDATES = 2
"""Updates before the checkpoint; the second one uses the moments of the first."""


def update(worker: Worker) -> dict[str, float]:
    examples = make_examples(worker.model.architecture.vocab_size, replies=True)
    return scalars(reduce_metrics(update_policy(worker, examples, lr=LEARNING_RATE, on_policy=False), worker.groups))


def write_gradients(worker: Worker, folder: Path) -> None:
    """Write a tenth of the gradients: Adam's first moment after the first update, under any sharding."""
    write_stage(folder, worker.model.trained, worker.groups, read=partial(worker.optimizer.read, state="exp_avg"))


def run_case(case: dict, out: Path, groups: ParallelGroups) -> None:
    with FAULTS[case.get("fault")]():
        _run_case(case, out, groups)


def _run_case(case: dict, out: Path, groups: ParallelGroups) -> None:
    packed, padded = (
        make_config(
            *(Path(case["model"]), out / "run", case["parallel"], case["dtype"]),
            packing=packing,
            freeze_router=case.get("freeze_router", False),
        )
        for packing in (True, False)
    )
    if groups.is_main:
        for name in ("gradients", "gradients-padded", "tensors"):
            (out / name).mkdir(parents=True)
    barrier(groups)
    worker = create_worker(padded, padded.model_path, groups)
    metrics = {"padded": update(worker)}
    write_gradients(worker, out / "gradients-padded")

    worker = create_worker(packed, packed.model_path, groups)
    log_probs = [
        score_sequence(worker, np.concatenate([e.trajectory.prompt_token_ids, e.trajectory.response_token_ids]))
        for e in make_examples(worker.model.architecture.vocab_size, replies=True)[:NUM_SCORED]
    ]
    if groups.is_main:
        save_file({str(i): torch.from_numpy(x.copy()) for i, x in enumerate(log_probs)}, out / "log_probs.safetensors")
    save_hugging_face(worker.model, groups, packed.model_path, out / "initial")
    if tensors := dict(stream_tensors(worker.model, groups)):  # all at once, as in a bucket of the weight transfer
        copies = {name: tensor.clone(memory_format=torch.contiguous_format) for name, tensor in tensors.items()}
        save_file(copies, out / "tensors" / f"{groups.global_rank}.safetensors")
    for number in range(NUM_UPDATES):
        metrics[f"update-{number}"] = update(worker)
        if number == 0:
            write_gradients(worker, out / "gradients")
    save_hugging_face(worker.model, groups, packed.model_path, out / "final")
    save_checkpoint(worker, out / "checkpoints", NUM_UPDATES, {"marker": case["name"]}, keep=1)
    if "resume_from" in case:
        saved = checkpoints(out.parent / case["resume_from"] / "checkpoints")[-1]
        assert load_checkpoint(worker, saved)["marker"] == case["resume_from"]
    metrics["continued"] = update(worker)
    save_hugging_face(worker.model, groups, packed.model_path, out / "continued")
    if groups.is_main:
        (out / "metrics.json").write_text(json.dumps(metrics))


if __name__ == "__main__":
    run_cases(run_case)
