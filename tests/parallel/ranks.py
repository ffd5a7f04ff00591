"""Run by torchrun: every case of a JSON file, one after another in the same processes.

A case is {"name", "model", "parallel"}; for each, `out/NAME/` gets the log-probs of the examples before any update, the
first update's gradients and the parameters after three updates, all in Hugging Face's names, and the metrics.
"""

import json
import sys
from pathlib import Path

import numpy as np
import torch
from examples import make_config, make_examples
from safetensors.torch import save_file

from megatron_bapo.metrics.values import scalars
from megatron_bapo.model.hf_export import save_hugging_face, write_stage_file
from megatron_bapo.parallel.collectives import barrier
from megatron_bapo.parallel.groups import create_groups
from megatron_bapo.parallel.megatron import parallel_state
from megatron_bapo.parallel.platform import start_distributed
from megatron_bapo.trainer.checkpoint import checkpoints, load_checkpoint, save_checkpoint
from megatron_bapo.trainer.policy_update import reduce_metrics, update_policy
from megatron_bapo.trainer.worker import create_worker, score_sequence


def run_case(case: dict, out: Path) -> None:
    config = make_config(Path(case["model"]), out / "run", case["parallel"])
    groups = create_groups(config.parallel, seed=0, timeout_s=120)
    worker = create_worker(config, config.model_path, groups)
    examples = make_examples(worker.model.architecture.vocab_size)
    if groups.is_main:
        out.mkdir(parents=True)
        (out / "gradients").mkdir()
    log_probs = [
        score_sequence(worker, np.concatenate([e.trajectory.prompt_token_ids, e.trajectory.response_token_ids]))
        for e in examples
    ]
    if groups.is_main:
        save_file({str(i): torch.from_numpy(x.copy()) for i, x in enumerate(log_probs)}, out / "log_probs.safetensors")
    barrier(groups)
    save_hugging_face(worker.model, groups, config.model_path, out / "initial")
    metrics = []
    for update in range(3):
        step = update_policy(worker, examples, lr=1e-3, on_policy=False)
        metrics.append(scalars(reduce_metrics(step, groups)))
        if update == 0:
            write_stage_file(out / "gradients", worker.model, groups, read=lambda p: p.main_grad)
    save_hugging_face(worker.model, groups, config.model_path, out / "final")
    save_checkpoint(worker, out / "checkpoints", 3, {"marker": case["name"]}, keep=1)
    if "resume_from" in case:
        saved = checkpoints(out.parent / case["resume_from"] / "checkpoints")[-1]
        assert load_checkpoint(worker, saved)["marker"] == case["resume_from"]
    step = update_policy(worker, examples, lr=1e-3, on_policy=False)
    metrics.append(scalars(reduce_metrics(step, groups)))
    save_hugging_face(worker.model, groups, config.model_path, out / "continued")
    if groups.is_main:
        (out / "metrics.json").write_text(json.dumps(metrics))
    parallel_state.destroy_model_parallel()


def main() -> None:
    cases, out = json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2])
    start_distributed(timeout_s=120)
    for case in cases:
        run_case(case, out / case["name"])
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
