"""Run by torchrun: loads a checkpoint into a layout, and saves it as a checkpoint and as a Hugging Face folder.

The model comes from a Hugging Face folder of the same weights; they are made NaN before the checkpoint is read.
"""

from pathlib import Path

import torch
from examples import make_config
from launching import run_cases

from megatron_bapo.model.hf_export import save_hugging_face
from megatron_bapo.parallel.groups import create_groups
from megatron_bapo.trainer.checkpoint import load_checkpoint, save_checkpoint
from megatron_bapo.trainer.worker import create_worker


def run_case(case: dict, out: Path) -> None:
    source = Path(case["model"])
    config = make_config(source, out, case["parallel"], "float32", packing=True)
    groups = create_groups(config.parallel, seed=0, timeout_s=120)
    worker = create_worker(config, source, groups)
    save_hugging_face(worker.model, groups, source, out / "imported")
    for _, parameter in worker.model.named_parameters():
        worker.optimizer.write(parameter, "main", torch.full_like(parameter, torch.nan))
    state = load_checkpoint(worker, Path(case["checkpoint"]))
    save_hugging_face(worker.model, groups, source, out / "written")
    save_checkpoint(worker, out / "checkpoints", 0, state, keep=1)


if __name__ == "__main__":
    run_cases(run_case)
