"""Trainer ranks of `bench.rollout_scale`: python -m bench.scale_ranks RUN_DIR RAY_ADDRESS RESULTS

Each rank takes batches and prepares them for updates as `controller/training_loop.py` does; there are no updates,
because the model is not what is measured. The main rank saves the state in flight and has weights loaded in between.
"""

from __future__ import annotations

import gc
import json
import multiprocessing
import os
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from bench.resident_bytes import anonymous_bytes, forget_freed_memory
from megatron_bapo.cluster.interrupts import end_with_parent
from megatron_bapo.cluster.ray_cluster import connect, get_actor, get_result
from megatron_bapo.config.loading import load_config
from megatron_bapo.config.schema import Config
from megatron_bapo.controller.colocation import ColocationManager
from megatron_bapo.controller.rollout_client import SERVICE, RolloutClient
from megatron_bapo.controller.rollout_sampler import RolloutSampler
from megatron_bapo.controller.run import Run, Timer
from megatron_bapo.controller.run_state import RunState
from megatron_bapo.controller.training_loop import take_groups
from megatron_bapo.parallel.collectives import barrier, gather_by_rank
from megatron_bapo.parallel.groups import create_groups
from megatron_bapo.parallel.platform import start_distributed
from megatron_bapo.records import Trajectory
from megatron_bapo.rollout.weight_probe import WeightProbe
from megatron_bapo.run_directory import RunDirectory
from megatron_bapo.trainer.checkpoint_writer import CheckpointWriter
from megatron_bapo.trainer.rollout_batch import make_examples, minibatch, minibatches
from megatron_bapo.trainer.scatter_batch import scatter_batch
from megatron_bapo.trainer.worker import create_worker

NUM_BATCHES = 2
TIMEOUT_S = 1800.0
REPLY_TOKENS = 64
"""Length of an environment's reply, of which a response has one after each 1024 tokens."""


class Peak:
    """Peak increase of this process's anonymous memory, sampled by a thread every few milliseconds."""

    def __init__(self) -> None:
        forget_freed_memory()
        self._base, self.num_bytes, self._is_done = anonymous_bytes(), 0, threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        while not self._is_done.wait(0.005):
            self.num_bytes = max(self.num_bytes, anonymous_bytes() - self._base)

    def end(self) -> int:
        self._is_done.set()
        self._thread.join()
        return self.num_bytes


@contextmanager
def counted_broadcasts() -> Iterator[list[int]]:
    """Yield a list that receives the bytes of each tensor broadcast in this context."""
    module: Any = dist.distributed_c10d
    original, sizes = module.broadcast, list[int]()

    def counted(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        sizes.append(tensor.nbytes)
        return original(tensor, *args, **kwargs)

    module.broadcast = counted
    try:
        yield sizes
    finally:
        module.broadcast = original


def own_bytes(trajectories: Sequence[Trajectory]) -> int:
    """Return the bytes of the tokens and log-probs that this rank has, without placeholders."""
    arrays = [a for t in trajectories for a in (t.prompt_token_ids, t.response_token_ids, t.behaviour_log_probs)]
    return sum(array.nbytes for array in arrays if array.strides[0] != 0)


def with_replies(trajectory: Trajectory) -> Trajectory:
    """Return the trajectory as if an environment had written a part of it."""
    mask = np.ones(len(trajectory.response_token_ids), bool)
    for start in range(1024, len(mask) - REPLY_TOKENS, 1024):
        mask[start : start + REPLY_TOKENS] = False
    return replace(trajectory, loss_mask=mask, behaviour_log_probs=trajectory.behaviour_log_probs[mask])


def broadcast_bytes(run: Run, own: list[Trajectory] | None) -> dict[str, float]:
    """Return the bytes broadcast for each trajectory of batches with an environment and with a KL penalty."""
    found: dict[str, float] = {}
    algorithm = run.config.algorithm.model_copy(update={"kl_reward_coef": 0.1})
    with_kl = replace(run.worker, config=run.config.model_copy(update={"algorithm": algorithm}))
    turns = None if own is None else [with_replies(trajectory) for trajectory in own]
    for name, worker, batch in (("turns", run.worker, turns), ("turns_kl", with_kl, turns)):
        batches = [] if batch is None else minibatches(run.config, batch, 0)
        with counted_broadcasts() as sizes:
            num = len(scatter_batch(worker, batch and [*batch], batches))
        found[name] = sum(sizes) / num
    return found


def take(run: Run) -> tuple[dict[str, Any], list[Trajectory]]:
    """Take a batch, prepare its updates, and return the figures of this rank and the trajectories."""
    barrier(run.worker.groups)
    peak, start = Peak(), time.perf_counter()
    with counted_broadcasts() as sizes:
        scored, trajectories = take_groups(run, Timer())
    taken_s = time.perf_counter() - start
    examples, _ = make_examples(run.worker, run.frozen.reference, trajectories)
    for chosen in minibatches(run.config, trajectories, run.state.step):
        run.worker.plan(minibatch(run.config, [examples[i] for i in chosen]))
    run.state.step += 1
    values = {} if scored is None else {name: getattr(metric, "value", 0.0) for name, metric in scored.metrics.items()}
    return {
        "peak_bytes": peak.end(),
        "own_bytes": own_bytes(trajectories),
        "broadcast": sum(sizes) / len(trajectories),
        "taken_s": taken_s,
        "prepared_s": time.perf_counter() - start - taken_s,
        "stall_s": values.get("rollout/event_loop_stall_max_s", 0.0),
        "own_stall_s": values.get("rollout/event_loop_own_stall_max_s", 0.0),
        "service_cpu_s": values.get("perf/cpu_s/rollouts", 0.0),
        "num_tokens": sum(len(t.response_token_ids) for t in trajectories),
    }, trajectories


def save_and_load(run: Run, client: RolloutClient, folder: Path) -> dict[str, float]:
    """Save the state in flight and have the engines load weights; return the seconds that the trainer waits."""
    start = time.perf_counter()
    client.begin_saving(folder)
    client.finish_saving()
    saved_s = time.perf_counter() - start
    version = run.state.policy_version = run.state.policy_version + 1
    get_result(get_actor(SERVICE).load_weights.remote(version), SERVICE, TIMEOUT_S)
    client.probe(WeightProbe(version, np.ones(2, np.int32), np.zeros(1, np.float32), tolerance=1.0))
    return {"saved_s": saved_s, "loaded_s": time.perf_counter() - start - saved_s}


def run_rank(rank: int, config: Config, address: str, meeting: Path) -> None:
    end_with_parent()
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(config.parallel.world_size)}
    start_distributed(TIMEOUT_S, store_file=meeting)
    groups, client = create_groups(config.parallel, config.seed, TIMEOUT_S), None
    if groups.is_main:
        connect(address, namespace=str(config.run_dir))
        client = RolloutClient(config)
        client.wait_for_engines()
    worker = create_worker(config, config.model_path, groups)
    directory = RunDirectory(config.run_dir)
    sampler = RolloutSampler(config, directory.sampled_rollouts, groups)
    run = Run(
        config, directory, worker, None, ColocationManager(config, groups, client), RunState(), client, None, sampler,
        CheckpointWriter(worker, directory.checkpoints, client), None,
    )  # fmt: skip
    steps, found = [], dict[str, Any]()
    for _ in range(NUM_BATCHES):
        own, trajectories = take(run)
        saved = save_and_load(run, client, RunDirectory(config.run_dir).root / "saved") if client else {}
        steps.append(gather_by_rank(own | saved, groups))
        if run.state.step == NUM_BATCHES:
            found = broadcast_bytes(run, trajectories if client else None)
        del own, trajectories
    if groups.is_main:
        Path(sys.argv[3]).write_text(json.dumps({"steps": steps, "broadcast": found}))
    barrier(groups)
    dist.destroy_process_group()


def main() -> int:
    config = load_config(RunDirectory(Path(sys.argv[1])).config, [])
    gc.collect()
    gc.freeze()
    context = multiprocessing.get_context("fork")
    with TemporaryDirectory() as folder:
        meeting = Path(folder) / "ranks"
        ranks = [
            context.Process(target=run_rank, args=(rank, config, sys.argv[2], meeting))
            for rank in range(config.parallel.world_size)
        ]
        for rank in ranks:
            rank.start()
        for rank in ranks:
            rank.join()
    return max(abs(rank.exitcode or 0) for rank in ranks)


if __name__ == "__main__":
    sys.exit(main())
