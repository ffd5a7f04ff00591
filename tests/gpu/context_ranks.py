"""Run by `launch`: log-probs and the first update's gradients under one way of context parallelism.

A case is {"name", "world_size", "model", "cp_comm_type"}.
"""

from functools import partial
from pathlib import Path

import numpy as np

from megatron_bapo.model.hf_export import write_stage_file
from megatron_bapo.parallel.groups import create_groups
from megatron_bapo.parallel.megatron import parallel_state
from megatron_bapo.trainer.worker import create_worker
from tests.gpu.policies import log_probs, make_config, train
from tests.parallel.launching import run_cases


def run_case(case: dict, out: Path) -> None:
    size = case["world_size"]
    config = make_config(
        Path(case["model"]),
        model__transformer_impl="transformer_engine",
        parallel__world_size=size,
        parallel__context_parallel_size=size,
        parallel__cp_comm_type=case["cp_comm_type"],
    )
    groups = create_groups(config.parallel, seed=1, timeout_s=300.0)
    worker = create_worker(config, config.model_path, groups)
    found = log_probs(worker)
    train(worker, 1)
    write_stage_file(out, worker.model, groups, read=partial(worker.optimizer.read, state="exp_avg"))
    if groups.is_main:
        np.save(out / "log_probs.npy", found)
    parallel_state.destroy_model_parallel()


if __name__ == "__main__":
    run_cases(run_case)
