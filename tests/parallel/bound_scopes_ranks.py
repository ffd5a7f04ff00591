"""Run by `launch`: the same updates with every method to find clip bounds.

A case is {"name", "model", "parallel", "max_tokens"}. For each way, `out/NAME/WAY/` gets the parameters
after two passes over four minibatches, and `out/NAME/metrics.json` what each update reported.
"""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from examples import LEARNING_RATE, make_config, make_examples
from running import run_cases

from megatron_bapo.algorithm.clip_bounds import find_clip_bounds
from megatron_bapo.config.algorithm import ClipBoundsSettings
from megatron_bapo.config.schema import Config
from megatron_bapo.metrics.values import scalars
from megatron_bapo.model.hf_export import save_hugging_face
from megatron_bapo.parallel.groups import ParallelGroups
from megatron_bapo.trainer.micro_batches import Example
from megatron_bapo.trainer.policy_update import reduce_metrics, update_policy
from megatron_bapo.trainer.speculation import MIN_MEASURED, Speculation
from megatron_bapo.trainer.worker import Worker, create_worker, score

WAYS = {
    "score": {},
    "speculate": {"method": "speculate"},
    "speculate-scored": {"method": "speculate"},
    "fresh": {},
    "microbatch": {"scope": "microbatch"},
}
"""`fresh` trains on the same minibatches as if engines with the current weights had sampled them."""
POSITIVE_SHARES = (0.49, 0.9, 0.1, 0.53)
"""Advantages of the minibatches; those of the second and the third determine the bounds."""
NUM_EPOCHS = 2


def minibatch(number: int, vocab_size: int) -> list[Example]:
    rng, examples = np.random.default_rng(number), make_examples(vocab_size)
    lengths = np.array([len(e.trajectory.response_token_ids) for e in examples])
    advantages = rng.normal(size=len(examples))
    for positive, share in ((True, POSITIVE_SHARES[number]), (False, 1 - POSITIVE_SHARES[number])):
        chosen = (advantages > 0) == positive
        advantages[chosen] *= 100 * share / (advantages * lengths)[chosen].sum() * (1 if positive else -1)
    return [replace(e, advantage=float(a)) for e, a in zip(examples, advantages, strict=True)]


def config_of(case: dict, out: Path, way: str) -> Config:
    config = make_config(Path(case["model"]), out / "run", case["parallel"], "float32", packing=True)
    bounds = ClipBoundsSettings.model_validate({"positive_contribution_target": 0.5, **WAYS[way]})
    return config.model_copy(
        update={
            "algorithm": config.algorithm.model_copy(update={"clip_bounds": bounds}),
            "trainer": config.trainer.model_copy(update={"max_tokens_per_gpu": case["max_tokens"]}),
            "logging": config.logging.model_copy(update={"entropy_clip_rule": way == "score"}),
        }
    )


def train(worker: Worker, way: str) -> list[dict[str, float]]:
    """Return the metrics of each update. Whether to speculate is fixed, because measured times would vary."""
    updates = []
    for number in [*range(len(POSITIVE_SHARES))] * NUM_EPOCHS:
        speculation = Speculation()
        for _ in range(MIN_MEASURED if way == "speculate" else 0):
            speculation.record(missed=False, scoring_cost=1.0)
        examples = minibatch(number, worker.model.architecture.vocab_size)
        predicting = replace(worker, speculation=speculation)
        metrics = update_policy(predicting, examples, lr=LEARNING_RATE, on_policy=False, fresh_rollout=way == "fresh")
        updates.append(scalars(reduce_metrics(metrics, worker.groups)))
    return updates


def bounds_of_micro_batches(worker: Worker) -> list[tuple[float, float]]:
    """Return the separate bounds of each micro-batch of the first update, in one process."""
    micro_batches = worker.micro_batches(minibatch(0, worker.model.architecture.vocab_size))
    bounds = [
        find_clip_bounds(
            scores.log_probs_N - m.behaviour_log_probs_N, m.advantages_N, worker.config.algorithm.clip_bounds
        )
        for m, scores in zip(micro_batches, score(worker, micro_batches, 1.0), strict=True)
    ]
    return [(b.low.item(), b.high.item()) for b in bounds]


def run_way(case: dict, out: Path, way: str, groups: ParallelGroups) -> dict:
    torch.manual_seed(0)
    config = config_of(case, out, way)
    worker = create_worker(config, config.model_path, groups)
    separate = bounds_of_micro_batches(worker) if config.parallel.world_size == 1 else []
    updates = train(worker, way)
    save_hugging_face(worker.model, groups, config.model_path, out / way)
    return {"updates": updates, "bounds_of_micro_batches": separate}


def run_case(case: dict, out: Path, groups: ParallelGroups) -> None:
    found = {way: run_way(case, out, way, groups) for way in WAYS}
    if groups.is_main:
        (out / "metrics.json").write_text(json.dumps(found))


if __name__ == "__main__":
    run_cases(run_case)
