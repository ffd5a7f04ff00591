"""Run by `launch`: log-probs and the gradients of the first update under one type of context parallelism.

A case is {"name", "model", "parallel"}.
"""

from functools import partial
from pathlib import Path

import numpy as np

from megatron_bapo.model.hf_export import write_stage
from megatron_bapo.parallel.groups import ParallelGroups
from megatron_bapo.trainer.worker import create_worker
from tests.gpu.policies import log_probs, make_config, train
from tests.parallel.running import run_cases


def run_case(case: dict, out: Path, groups: ParallelGroups) -> None:
    config = make_config(
        Path(case["model"]),
        model__transformer_impl="transformer_engine",
        **{f"parallel__{name}": value for name, value in case["parallel"].items()},
    )
    worker = create_worker(config, config.model_path, groups)
    found = log_probs(worker)
    train(worker, 1)
    write_stage(out, worker.model.trained, groups, read=partial(worker.optimizer.read, state="exp_avg"))
    if groups.is_main:
        np.save(out / "log_probs.npy", found)


if __name__ == "__main__":
    run_cases(run_case)
