"""Cost of clip bounds: an update with each method to find them, against one with fixed bounds (plain GRPO).

Four workers in one process start from the same weights and train on the same trajectories, 8 updates per rollout batch,
taking turns after each update. The tokens of a trajectory are random, and its behaviour log-probs are the policy's own
at the start of its rollout batch. Wrong responses are longer than right ones, and the share of right ones varies
between groups, so that bounds at the start, at the end and between occur. Times are CPU seconds of the only working
thread, which other load on the machine affects little. The benchmark fails if `score` and `speculate` make different
updates.
"""

from __future__ import annotations

import os
import tempfile
from dataclasses import dataclass, field, replace
from pathlib import Path
from time import process_time
from typing import Any

import numpy as np
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM
from transformers.utils.logging import disable_progress_bar

from bench.report import option_parser, report
from megatron_bapo.config.schema import Config
from megatron_bapo.metrics.values import scalars
from megatron_bapo.parallel.groups import create_groups
from megatron_bapo.parallel.platform import start_distributed
from megatron_bapo.records import Trajectory, VersionSpan
from megatron_bapo.trainer.micro_batches import Example
from megatron_bapo.trainer.policy_update import update_policy
from megatron_bapo.trainer.worker import Worker, create_worker, score

NUM_BATCHES = 4
UPDATES_PER_BATCH = 8
PROMPTS_PER_MINIBATCH, RESPONSES_PER_PROMPT = 4, 4
PROMPT_TOKENS, RESPONSE_TOKENS = 24, 60
WRONG_IS_LONGER = 1.3
LEARNING_RATE = 3e-4
MODEL: dict[str, Any] = {"hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 4, "vocab_size": 4096}
METHODS: dict[str, dict[str, Any]] = {
    "GRPO": {"objective": "ppo"},
    "score": {"clip_bounds": {"method": "score"}},
    "speculate": {"clip_bounds": {"method": "speculate"}},
    "microbatch": {"clip_bounds": {"scope": "microbatch"}},
}


@dataclass
class Trainee:
    worker: Worker
    seconds: list[float] = field(default_factory=list)
    metrics: list[dict[str, float]] = field(default_factory=list)

    def update(self, examples: list[Example], *, fresh_rollout: bool) -> None:
        start = process_time()
        metrics = update_policy(self.worker, examples, lr=LEARNING_RATE, on_policy=False, fresh_rollout=fresh_rollout)
        self.seconds.append(process_time() - start)
        self.metrics.append(scalars(metrics))

    def mean(self, name: str) -> float:
        """Return a metric's mean over the updates that report it."""
        return float(np.mean([metrics[name] for metrics in self.metrics if name in metrics]))


def make_config(model: Path, run_dir: Path, algorithm: dict[str, Any]) -> Config:
    size = PROMPTS_PER_MINIBATCH * RESPONSES_PER_PROMPT
    return Config.model_validate(
        {
            "run_dir": run_dir,
            "model": {"path": model, "dtype": "float32"},
            "data": {"train": {"path": "unused.jsonl"}},
            "algorithm": algorithm,
            "optimizer": {"lr": LEARNING_RATE, "weight_decay": 0.0},
            "trainer": {
                "total_steps": NUM_BATCHES,
                "train_batch_size": UPDATES_PER_BATCH * size,
                "ppo_mini_batch_size": size,
                "max_tokens_per_gpu": 512,
            },
        }
    )


def make_minibatch(rng: np.random.Generator) -> list[Example]:
    """Return groups of right and wrong responses with GRPO's advantages; behaviour log-probs are still zero."""
    trajectories, advantages = [], []
    for _ in range(PROMPTS_PER_MINIBATCH):
        right = rng.random(RESPONSES_PER_PROMPT) < rng.beta(2.0, 2.0)
        advantages += list((right - right.mean()) / (right.std() + 1e-6))
        for is_right in right:
            mean = RESPONSE_TOKENS * (1.0 if is_right else WRONG_IS_LONGER)
            num_tokens = int(np.clip(rng.lognormal(np.log(mean), 0.4), 8, 400))
            trajectories.append(
                Trajectory(
                    prompt_token_ids=rng.integers(0, MODEL["vocab_size"], PROMPT_TOKENS).astype(np.int32),
                    response_token_ids=rng.integers(0, MODEL["vocab_size"], num_tokens).astype(np.int32),
                    behaviour_log_probs=np.zeros(num_tokens, np.float32),
                    version_spans=(VersionSpan(0, num_tokens),),
                    finish_reason="stop",
                    text="",
                )
            )
    weight = 1.0 / sum(len(t.response_token_ids) for t in trajectories)
    return [Example(t, float(a), weight) for t, a in zip(trajectories, advantages, strict=True)]


def with_own_log_probs(worker: Worker, examples: list[Example]) -> list[Example]:
    """Return the examples with the worker's log-probs as behaviour log-probs."""
    micro_batches = worker.lay_out(examples, [[index] for index in range(len(examples))])
    return [
        replace(e, trajectory=replace(e.trajectory, behaviour_log_probs=scores.log_probs_N.numpy()))
        for e, scores in zip(examples, score(worker, micro_batches, temperature=1.0), strict=True)
    ]


def train(trainees: dict[str, Trainee]) -> None:
    for batch in range(NUM_BATCHES):
        rng = np.random.default_rng(batch)
        minibatches = [make_minibatch(rng) for _ in range(UPDATES_PER_BATCH)]
        own = {
            name: [with_own_log_probs(trainee.worker, examples) for examples in minibatches]
            for name, trainee in trainees.items()
        }
        for number in range(UPDATES_PER_BATCH):
            for name, trainee in trainees.items():
                trainee.update(own[name][number], fresh_rollout=number == 0)
    scored, speculated = ([m["actor/bapo_clip_high"] for m in trainees[n].metrics] for n in ("score", "speculate"))
    assert scored == speculated, "score and speculate found different bounds"
    for ours, theirs in zip(
        *(trainees[n].worker.model.named_parameters() for n in ("score", "speculate")), strict=True
    ):
        assert torch.equal(ours[1], theirs[1]), f"score and speculate trained different weights: {ours[0]}"


def main() -> None:
    disable_progress_bar()
    os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0")
    with tempfile.TemporaryDirectory() as temporary:
        root = Path(temporary)
        torch.manual_seed(0)
        shape = Qwen3Config(
            **MODEL, num_attention_heads=4, num_key_value_heads=2, head_dim=32, tie_word_embeddings=True
        )
        Qwen3ForCausalLM(shape).save_pretrained(root / "model")
        start_distributed(timeout_s=60.0, store_file=root / "rendezvous")
        configs = {name: make_config(root / "model", root, algorithm) for name, algorithm in METHODS.items()}
        groups = create_groups(configs["GRPO"].parallel, seed=0, timeout_s=60.0)
        trainees = {name: Trainee(create_worker(c, c.model_path, groups)) for name, c in configs.items()}
        train(trainees)
        torch.distributed.destroy_process_group()
    # The first batch warms up and lets `speculate` measure the cost of scoring.
    warm = {name: trainee.seconds[UPDATES_PER_BATCH:] for name, trainee in trainees.items()}
    ratios = {name: round(sum(times) / sum(warm["GRPO"]), 3) for name, times in warm.items() if name != "GRPO"}
    outcomes = ("start", "interior", "end")
    rows = [
        [
            name,
            float(np.mean(warm[name])),
            ratios.get(name, 1.0),
            *(trainee.mean(f"actor/bapo_outcome/{outcome}") if name != "GRPO" else "" for outcome in outcomes),
            trainee.mean("actor/pg_clipfrac"),
        ]
        for name, trainee in trainees.items()
    ]
    speculate = trainees["speculate"]
    hit_rate, speculated = (speculate.mean(f"actor/bapo_{name}") for name in ("speculation_hit", "speculated"))
    figures = {"hit_rate": round(hit_rate, 3), "speculated": round(speculated, 3)}
    figures |= {f"{name}_s": round(float(np.mean(times)), 4) for name, times in warm.items()}
    columns = ["bounds", "CPU s per update", "ratio", *outcomes, "clipped tokens"]
    report("bound_scopes", columns, rows, ratios=ratios, figures=figures)


if __name__ == "__main__":
    option_parser(__doc__).parse_args()
    main()
