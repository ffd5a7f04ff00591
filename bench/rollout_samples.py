"""Cost of sampled rollouts: a step whose tokens are all stored, against one that stores none.

Both are one update on the same responses. The stored step includes the thread that decodes the texts and writes the
file. A run stores 8 prompts of every tenth step, so its cost is a small part of this. Times are CPU seconds of the
process, which other load on the machine affects little.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from time import process_time

import numpy as np
import torch

from bench.report import medians_s, option_parser, report
from megatron_bapo.config.schema import Config
from megatron_bapo.controller.rollout_sampler import RolloutSampler
from megatron_bapo.controller.run_state import RunState
from megatron_bapo.data.rollout_files import rollout_files
from megatron_bapo.model.hf_create import create_checkpoint
from megatron_bapo.parallel.groups import create_groups
from megatron_bapo.parallel.platform import start_distributed
from megatron_bapo.records import Group, Prompt, Trajectory, VersionSpan
from megatron_bapo.rollout.generation import ScoredGroups
from megatron_bapo.trainer.policy_update import update_policy
from megatron_bapo.trainer.rollout_batch import make_examples, minibatch
from megatron_bapo.trainer.token_trace import TokenTrace
from megatron_bapo.trainer.worker import create_worker

NUM_GROUPS, N, LENGTH = 8, 8, 256
NUM_REPEATS = 9
LETTERS = "abcdefghijklmnopqrstuvwxyz 0123456789"


def make_config(root: Path) -> Config:
    shape = {"hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 4, "num_attention_heads": 4}
    return Config.model_validate(
        {
            "run_dir": root,
            "model": {"create": {**shape, "num_key_value_heads": 2, "head_dim": 32}, "dtype": "float32"},
            "data": {"train": {"path": "unused.jsonl"}},
            "rollout": {"n": N, "max_response_length": LENGTH},
            "trainer": {
                "total_steps": 1,
                "train_batch_size": NUM_GROUPS * N,
                "ppo_mini_batch_size": NUM_GROUPS * N,
                "max_tokens_per_gpu": 4096,
            },
            "logging": {"rollouts": {"every_steps": 1, "num_prompts": NUM_GROUPS}},
        }
    )


def make_groups() -> list[Group]:
    rng = np.random.default_rng(0)

    def response(number: int) -> Trajectory:
        tokens = rng.integers(4, len(LETTERS), LENGTH).astype(np.int32)
        log_probs = rng.normal(-3.6, 0.3, LENGTH).astype(np.float32)
        return Trajectory(tokens[:16], tokens, log_probs, (VersionSpan(0, LENGTH),), "stop", "", float(number % 2))

    prompts = [Prompt(f"p:{i}", ({"role": "user", "content": "1 + 1"},), "2", "p") for i in range(NUM_GROUPS)]
    return [Group(prompt, tuple(map(response, range(N)))) for prompt in prompts]


def main() -> None:
    os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0")
    with tempfile.TemporaryDirectory() as temporary:
        root = Path(temporary)
        start_distributed(timeout_s=60.0, store_file=root / "rendezvous")
        config = make_config(root)
        assert config.model.create is not None
        create_checkpoint(config.model_path, config.model.create, [LETTERS], config.seed)
        mesh = create_groups(config.parallel, seed=0, timeout_s=60.0)
        worker = create_worker(config, config.model_path, mesh)
        scored = ScoredGroups(make_groups(), 0)
        trajectories = [trajectory for group in scored.groups for trajectory in group.trajectories]
        sampler = RolloutSampler(config, root / "sampled_rollouts", mesh)

        def step(given: ScoredGroups | None) -> None:
            sampler.choose(1, given)
            examples, _ = make_examples(worker, None, trajectories)
            trace: TokenTrace = sampler.trace(1, trajectories)
            marked = trace.mark(examples, range(len(examples)))
            update_policy(worker, minibatch(config, marked), lr=0.0, on_policy=False, trace=trace)
            sampler.write(RunState(), trace, examples)
            sampler.flush()

        tasks = {"none": lambda: step(None), "all": lambda: step(scored)}
        times = medians_s(tasks, num_repeats=NUM_REPEATS, num_warmups=2, clock=process_time)
        size = rollout_files(root / "sampled_rollouts")[1].stat().st_size
        sampler.close()
        torch.distributed.destroy_process_group()
    num_tokens = NUM_GROUPS * N * LENGTH
    ratios = {"all": round(times["all"] / times["none"], 4)}
    figures = {"added_us_per_token": round(1e6 * (times["all"] - times["none"]) / num_tokens, 2)}
    figures |= {"bytes_per_token": round(size / num_tokens, 1)}
    rows = [[name, seconds, seconds / times["none"]] for name, seconds in times.items()]
    report("rollout_samples", ["stored tokens", "CPU s per step", "ratio"], rows, ratios=ratios, figures=figures)


if __name__ == "__main__":
    option_parser(__doc__).parse_args()
    main()
