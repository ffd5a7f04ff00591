"""Run by `launch`: an update of a mixture-of-experts model with and without routing replay.

A case is {"name", "model", "parallel", "replay", "noise", "engine", "mini_batch"}, and "behaviour" for another policy
than the recomputed one. With "noise" every pass chooses partly random experts. "engine" is a safetensors file with the
routes and log-probs of each example; the main rank scatters the routes with `replay=rollout`.
`out/NAME/` gets the log-probs that recomputation and the first update found, and that update's gradients and metrics.
"""

import json
from collections import ChainMap
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import torch.distributed as dist
from examples import LEARNING_RATE, NUM_EXAMPLES, make_config, make_examples
from megatron.core.transformer.moe import moe_utils
from running import run_cases
from safetensors.numpy import load_file, save_file

from megatron_bapo.config.schema import Config
from megatron_bapo.metrics.values import scalars
from megatron_bapo.model.hf_export import write_stage
from megatron_bapo.parallel.collectives import barrier, gather_objects
from megatron_bapo.parallel.groups import ParallelGroups
from megatron_bapo.records import Trajectory
from megatron_bapo.trainer import rollout_batch
from megatron_bapo.trainer.policy_update import reduce_metrics, update_policy
from megatron_bapo.trainer.scatter_batch import scatter_batch
from megatron_bapo.trainer.token_trace import TokenTrace
from megatron_bapo.trainer.trajectory_values import indices_with_tokens
from megatron_bapo.trainer.worker import create_worker

NOISE = 0.5
"""Standard deviation of the noise that the choice of experts sees; their logits are of size 1."""


@contextmanager
def noisy_choices(seed: int) -> Iterator[None]:
    """Let top-k choose by noisy scores, but return the true ones."""
    generator, top_k = torch.Generator().manual_seed(seed), torch.topk

    def noisy(scores: torch.Tensor, k: int, dim: int = -1, **kwargs: bool) -> tuple[torch.Tensor, torch.Tensor]:
        noise = NOISE * torch.randn(scores.shape, generator=generator)
        _, indices = top_k(scores + noise, k, dim=dim, **kwargs)
        return scores.gather(dim, indices), indices

    # On CPUs, Megatron's modules have their own copy of torch's namespace.
    with patch.object(moe_utils.torch, "topk", noisy):
        yield


@contextmanager
def count_summed_bytes() -> Iterator[list[int]]:
    """Yield a list that gets the sizes of the byte tensors that this rank sums with others."""
    sizes, all_reduce = list[int](), dist.all_reduce

    def counted(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if tensor.dtype == torch.uint8:
            sizes.append(tensor.nbytes)
        return all_reduce(tensor, *args, **kwargs)

    with patch.object(dist, "all_reduce", counted):
        yield sizes


def make_run_config(case: dict, out: Path) -> Config:
    config = make_config(Path(case["model"]), out / "run", case["parallel"], "float32", packing=True)
    tree = config.model_dump()
    tree["algorithm"] = {
        "objective": "ppo",
        "behaviour_policy": case.get("behaviour", "recomputed"),
        "routing_replay": case["replay"],
    }
    tree["trainer"]["ppo_mini_batch_size"] = case["mini_batch"]
    return Config.model_validate(tree | {"rollout": {"n": 4}})


def make_trajectories(case: dict, vocab_size: int) -> list[Trajectory]:
    """Return the trajectories of the matrix, with log-probs and routes of the engine as the case says."""
    engine, trajectories = load_file(case["engine"]), []
    for i, example in enumerate(make_examples(vocab_size, replies=True)):
        trajectory = replace(example.trajectory, reward=0.0)
        if "behaviour" in case:
            trajectory = replace(trajectory, behaviour_log_probs=engine[f"log_probs.{i}"])
        if case["replay"] == "rollout":
            trajectory = replace(trajectory, routes=engine[f"routes.{i}"])
        trajectories.append(trajectory)
    return trajectories


def run_case(case: dict, out: Path, groups: ParallelGroups) -> None:
    config = make_run_config(case, out)
    worker = create_worker(config, config.model_path, groups)
    given, batches = None, []
    if groups.is_main:
        given = make_trajectories(case, worker.model.architecture.vocab_size)
        batches = rollout_batch.packed_together(config, given, step=0)
        (out / "gradients").mkdir()
    barrier(groups)
    with noisy_choices(groups.global_rank) if case["noise"] else nullcontext():
        trajectories = scatter_batch(worker, given, batches)
        with count_summed_bytes() as summed:
            examples, _ = rollout_batch.make_examples(worker, None, trajectories)
        chosen = rollout_batch.minibatches(config, trajectories, step=0)[0]
        trace = TokenTrace.of(trajectories, range(NUM_EXAMPLES))
        given = make_examples(worker.model.architecture.vocab_size)  # their advantages and weights
        examples = [replace(e, advantage=g.advantage, weight=g.weight) for e, g in zip(examples, given, strict=True)]
        marked = trace.mark([examples[i] for i in chosen], chosen)
        updated = update_policy(worker, marked, lr=LEARNING_RATE, on_policy=False, fresh_rollout=True, trace=trace)
    write_stage(out / "gradients", worker.model.trained, groups, read=partial(worker.optimizer.read, state="exp_avg"))
    metrics = scalars(reduce_metrics(updated, groups))
    traced = {index: trace.gather(index, groups) for index in chosen}
    held = [0 if e.routes is None else len(e.routes) for e in examples]
    held_by_rank = gather_objects(held, groups.data)
    own = set(indices_with_tokens(trajectories)).intersection(chosen if "behaviour" not in case else [])
    recomputed = gather_objects({str(i): np.array(examples[i].proximal_log_probs) for i in own}, groups.data)
    if groups.is_main:
        save_file(dict(ChainMap(*recomputed)), out / "recomputed.safetensors")
        updated_log_probs = {str(i): np.array(traced[i].figures["log_probs"]) for i in chosen}
        save_file(updated_log_probs, out / "updated.safetensors")
        (out / "metrics.json").write_text(json.dumps({"update": metrics, "held": held_by_rank, "summed": sum(summed)}))


if __name__ == "__main__":
    run_cases(run_case)
