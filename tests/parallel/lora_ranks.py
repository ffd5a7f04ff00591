"""Run by `launch`: a model with adapters in many layouts.

A case is {"name", "model", "parallel", "dtype", "lora"}, with "resume_from" where it has one; "lora" is that section
of the configuration. Its folder gets log-probs with and without adapters, the first update's gradients, packed and
padded, and the adapters at the start, after two updates and after a third from another layout's checkpoint. It also
gets the model with its adapters merged, as exported and as published to engines.
"""

import json
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
from examples import LEARNING_RATE, make_config, make_examples, with_adapters
from running import run_cases
from safetensors.torch import save_file

from megatron_bapo.config.schema import Config
from megatron_bapo.metrics.values import scalars
from megatron_bapo.model.hf_export import write_stage
from megatron_bapo.parallel.collectives import barrier
from megatron_bapo.parallel.groups import ParallelGroups
from megatron_bapo.trainer.checkpoint import checkpoints, load_checkpoint, save_checkpoint
from megatron_bapo.trainer.export import export
from megatron_bapo.trainer.policy_update import reduce_metrics, update_policy
from megatron_bapo.trainer.weight_publisher import WeightPublisher
from megatron_bapo.trainer.worker import Worker, create_worker, score_trajectories
from megatron_bapo.weight_sync.transport import WeightStore

NUM_UPDATES = 2
FOLDERS = ("initial", "final", "continued", "gradients", "gradients-padded")


def lora_config(case: dict, out: Path, *, packing: bool) -> Config:
    config = make_config(Path(case["model"]), out / "run", case["parallel"], case["dtype"], packing=packing)
    return with_adapters(config, case["lora"])


def update(worker: Worker) -> dict[str, float]:
    examples = make_examples(worker.model.architecture.vocab_size, replies=True, in_groups=False)
    return scalars(reduce_metrics(update_policy(worker, examples, lr=LEARNING_RATE, on_policy=False), worker.groups))


def write_gradients(worker: Worker, folder: Path) -> None:
    """Write a tenth of the gradients: Adam's first moment after the first update."""
    write_stage(folder, worker.model.trained, worker.groups, read=partial(worker.optimizer.read, state="exp_avg"))


def save_log_probs(worker: Worker, path: Path, *, adapters: bool) -> None:
    trajectories = [
        e.trajectory for e in make_examples(worker.model.architecture.vocab_size, replies=True, in_groups=False)
    ]
    model = None if adapters else worker.model.without_adapters()
    found = score_trajectories(worker, trajectories, 1.0, model)
    own = {str(i): torch.from_numpy(np.array(x)) for i, x in enumerate(found) if np.isfinite(x).all()}
    if worker.groups.is_replica_leader:
        save_file(own, path.with_name(f"{path.stem}-{worker.groups.data.rank}.safetensors"))


def publish(worker: Worker, store: WeightStore, *, lora: str) -> None:
    sync = worker.config.weight_sync.model_copy(update={"lora": lora})
    WeightPublisher(replace(worker, config=worker.config.model_copy(update={"weight_sync": sync})), store).publish(1)


def run_case(case: dict, out: Path, groups: ParallelGroups) -> None:
    packed, padded = (lora_config(case, out, packing=packing) for packing in (True, False))
    if groups.is_main:
        for name in (*FOLDERS, "store", "adapter-store"):
            (out / name).mkdir()
    barrier(groups)
    worker = create_worker(padded, padded.model_path, groups)
    metrics = {"padded": update(worker)}
    write_gradients(worker, out / "gradients-padded")

    worker = create_worker(packed, packed.model_path, groups)
    write_stage(out / "initial", worker.model.trained, groups)
    save_log_probs(worker, out / "log_probs", adapters=True)
    save_log_probs(worker, out / "base_log_probs", adapters=False)
    for number in range(NUM_UPDATES):
        metrics[f"update-{number}"] = update(worker)
        if number == 0:
            write_gradients(worker, out / "gradients")
    save_log_probs(worker, out / "final_log_probs", adapters=True)
    write_stage(out / "final", worker.model.trained, groups)
    export(worker, out / "merged", out / "adapter")
    publish(worker, WeightStore(out / "store"), lora="merged")
    publish(worker, WeightStore(out / "adapter-store"), lora="adapters")
    save_checkpoint(worker, out / "checkpoints", NUM_UPDATES, {}, keep=1)
    if "resume_from" in case:
        load_checkpoint(worker, checkpoints(out.parent / case["resume_from"] / "checkpoints")[-1])
    metrics["continued"] = update(worker)
    write_stage(out / "continued", worker.model.trained, groups)
    if groups.is_main:
        (out / "metrics.json").write_text(json.dumps(metrics))


if __name__ == "__main__":
    run_cases(run_case)
