"""Time of the parts of one BAPO update: scoring, bound search, training pass, optimizer, and the rest.

The model has Qwen2.5-1.5B's shape with random weights. An update has 32k tokens in micro-batches of 8k, ratios other
than 1, and bounds from a scoring pass over the minibatch. Each part is timed separately; the training pass is PPO's
update minus the optimizer step.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bench.gpu import one_rank, report_and_save, require_gpu, seconds_of
from bench.gpu_train_step import STEP_TOKENS, TOKENS, layers, make_batch, make_config
from bench.report import option_parser
from megatron_bapo.algorithm.clip_bounds import find_clip_bounds
from megatron_bapo.config.algorithm import AlgorithmConfig
from megatron_bapo.config.architecture import read_architecture
from megatron_bapo.parallel.groups import ParallelGroups
from megatron_bapo.planning.known_models import FOLDER
from megatron_bapo.trainer.micro_batches import Example
from megatron_bapo.trainer.policy_update import update_policy
from megatron_bapo.trainer.worker import Worker, create_worker, score, score_trajectories

MODEL = "Qwen2.5-1.5B"
LEARNING_RATE = 1e-6


def off_policy(worker: Worker, examples: list[Example]) -> list[Example]:
    """Return the examples with behaviour log-probs near the policy's, as after one or two updates."""
    rng = np.random.default_rng(0)
    scored = score_trajectories(worker, [example.trajectory for example in examples], temperature=1.0)
    return [
        replace(
            example,
            trajectory=replace(
                example.trajectory,
                behaviour_log_probs=(log_probs + 0.1 * rng.standard_normal(len(log_probs))).astype(np.float32),
            ),
        )
        for example, log_probs in zip(examples, scored, strict=True)
    ]


def measure(
    folder: Path, groups: ParallelGroups, settings: dict[str, Any], *, max_tokens: int, step_tokens: int, dtype: str
) -> dict[str, float]:
    """Return the seconds of the whole update and of its parts."""
    examples = make_batch(max_tokens, step_tokens // max_tokens, read_architecture(folder).vocab_size)
    config = make_config(folder, max_tokens, len(examples), settings, dtype=dtype)
    worker = create_worker(config, folder, groups, load=False)
    examples = off_policy(worker, examples)
    bapo = replace(worker, config=config.model_copy(update={"algorithm": AlgorithmConfig(objective="bapo")}))
    micro_batches = worker.micro_batches(examples)
    current_N = torch.cat([scores.log_probs_N for scores in score(worker, micro_batches, 1.0)])
    behaviour_N, advantages_N = (
        torch.cat([getattr(m, name) for m in micro_batches]) for name in ("behaviour_log_probs_N", "advantages_N")
    )

    def update(of: Worker) -> Callable[[], object]:
        return lambda: update_policy(of, examples, lr=LEARNING_RATE, on_policy=False)

    seconds = seconds_of(
        {
            "whole update": update(bapo),
            "PPO's update": update(worker),
            "optimizer": lambda: worker.optimizer.step(LEARNING_RATE),
            "scoring": lambda: score(worker, micro_batches, 1.0),
            "bound search": lambda: find_clip_bounds(
                current_N - behaviour_N, advantages_N, bapo.config.algorithm.clip_bounds
            ),
        },
        num_repeats=3,
    )
    training = seconds.pop("PPO's update") - seconds["optimizer"]
    whole = seconds["whole update"]
    rest = whole - training - seconds["optimizer"] - seconds["scoring"] - seconds["bound search"]
    return {**seconds, "training pass": training, "rest": rest}


def main() -> None:
    require_gpu()
    rows, ratios, figures = [], {}, {}
    with one_rank() as (groups, _):
        for name, settings in layers().items():
            seconds = measure(
                FOLDER / MODEL,
                groups,
                settings,
                max_tokens=TOKENS["8k"],
                step_tokens=STEP_TOKENS,
                dtype="bfloat16",
            )
            for part, value in seconds.items():
                share = value / seconds["whole update"]
                key = f"{name}_{part}".replace(" ", "_")
                rows.append([name, part, value, share])
                ratios[key], figures[f"{key}_s"] = round(share, 3), round(value, 4)
    report_and_save("gpu_bapo_step", ["layers", "part", "s", "of the update"], rows, ratios=ratios, figures=figures)


if __name__ == "__main__":
    option_parser(__doc__).parse_args()
    main()
