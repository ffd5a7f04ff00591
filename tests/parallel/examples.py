"""The examples that every layout is tested on."""

from dataclasses import replace
from pathlib import Path

import numpy as np

from megatron_bapo.config.algorithm import DistillationConfig
from megatron_bapo.config.schema import Config
from megatron_bapo.records import Trajectory, VersionSpan
from megatron_bapo.trainer.micro_batches import Example

NUM_EXAMPLES, GROUP_SIZE = 12, 4
LEARNING_RATE = 1e-3
TRACED = (9, 4, 5, 1, 2)
"""Examples whose tokens are traced."""


def make_config(
    model: Path, run_dir: Path, parallel: dict, dtype: str, *, packing: bool, freeze_router: bool = False
) -> Config:
    return Config.model_validate(
        {
            "run_dir": run_dir,
            "model": {"path": model, "dtype": dtype, "freeze_router": freeze_router},
            "parallel": parallel,
            "data": {"train": {"path": "unused.jsonl"}},
            "optimizer": {"lr": LEARNING_RATE, "adam_eps": 1e-5, "weight_decay": 0.01, "clip_grad": 100.0},
            "trainer": {
                "total_steps": 1,
                "train_batch_size": NUM_EXAMPLES,
                "ppo_mini_batch_size": NUM_EXAMPLES,
                "max_tokens_per_gpu": 64,
                "packing": packing,
                "logprob_chunk_size": 16,
            },
        }
    )


def with_offload_and_frozen_models(config: Config) -> Config:
    """Settings with Adam's state in host memory, and a reference model and a teacher beside the policy."""
    assert config.model.path is not None
    distillation = DistillationConfig(teacher=config.model.path)
    return config.model_copy(
        update={
            "optimizer": config.optimizer.model_copy(update={"cpu_offload": True}),
            "algorithm": config.algorithm.model_copy(update={"kl_loss_coef": 0.1, "distillation": distillation}),
        }
    )


def with_adapters(config: Config, lora: dict | None) -> Config:
    """Settings with the section `model.lora`."""
    return Config.model_validate(config.model_dump() | {"model": {**config.model.model_dump(), "lora": lora}})


def make_examples(vocab_size: int, *, replies: bool = False, in_groups: bool = True) -> list[Example]:
    """Return ragged examples whose behaviour log-probs put ratios on both sides of the clip bounds.

    With `replies` every third example contains an environment reply from its second token to its middle.
    """
    rng = np.random.default_rng(int(in_groups))  # no ratio is so near a bound that bfloat16 moves it across
    examples = list[Example]()
    for number in range(NUM_EXAMPLES):
        num_prompt, num_response = rng.integers(3, 12), rng.integers(2, 16)
        mask = np.ones(num_response, bool)
        if replies and number % 3 == 0:
            mask[1 : num_response // 2] = False
        trajectory = Trajectory(
            prompt_token_ids=rng.integers(0, vocab_size, num_prompt).astype(np.int32),
            response_token_ids=rng.integers(0, vocab_size, num_response).astype(np.int32),
            behaviour_log_probs=(-np.log(vocab_size) + 0.5 * rng.standard_normal(num_response)).astype(np.float32)[
                mask
            ],
            version_spans=(VersionSpan(0, int(mask.sum())),),
            finish_reason="stop",
            text="",
            loss_mask=mask,
        )
        advantage, weight = float(rng.normal(0.2, 1.0)), 1.0 / (NUM_EXAMPLES * 8)
        if in_groups and number % GROUP_SIZE:
            shared = examples[number - number % GROUP_SIZE].trajectory.prompt_token_ids
            trajectory = replace(trajectory, prompt_token_ids=shared)
        group = number // GROUP_SIZE if in_groups else None
        examples.append(Example(trajectory, advantage, weight, group=group))
    return examples
