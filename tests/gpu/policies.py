"""Policies that a trainer of one rank builds on the first GPU, and the values that the checks compare."""

from __future__ import annotations

import os
import tempfile
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, PretrainedConfig, Qwen3Config, Qwen3MoeConfig

from megatron_bapo.config.schema import Config, ParallelConfig
from megatron_bapo.metrics.values import scalars
from megatron_bapo.model.hf_export import stream_tensors
from megatron_bapo.parallel.groups import ParallelGroups, create_groups
from megatron_bapo.parallel.platform import start_distributed
from megatron_bapo.records import Trajectory, VersionSpan
from megatron_bapo.trainer.micro_batches import Example
from megatron_bapo.trainer.policy_update import supervised_update
from megatron_bapo.trainer.worker import Worker, create_worker, score_trajectories

NUM_EXAMPLES = 16
LEARNING_RATE = 3e-5
_SHAPE = {
    "vocab_size": 512, "hidden_size": 512, "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 4,
    "head_dim": 64, "intermediate_size": 1024, "max_position_embeddings": 512, "initializer_range": 0.02,
}  # fmt: skip
MODELS: dict[str, PretrainedConfig] = {
    "dense": Qwen3Config(**_SHAPE, tie_word_embeddings=False),
    "experts": Qwen3MoeConfig(
        **_SHAPE, tie_word_embeddings=True, num_experts=8, num_experts_per_tok=2, moe_intermediate_size=256,
        norm_topk_prob=True, mlp_only_layers=[1],
    ),
}  # fmt: skip
"""Models whose widths are all multiples of 128, the largest block size of FP8."""


@cache
def one_rank() -> ParallelGroups:
    """Create the process group of this single process once."""
    os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0")
    start_distributed(300.0, store_file=Path(tempfile.mkdtemp()) / "rendezvous")
    return create_groups(ParallelConfig(), seed=1, timeout_s=300.0)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return a folder of bfloat16 values for each of `MODELS`, so that all policies start from equal weights."""
    folders = {}
    for name, config in MODELS.items():
        torch.manual_seed(0)
        folders[name] = tmp_path_factory.mktemp(name)
        AutoModelForCausalLM.from_config(config).to(torch.bfloat16).save_pretrained(folders[name])
    return folders


def make_config(model: Path, **changes: Any) -> Config:
    """Return the configuration with `changes`: dotted keys, with `__` for the dot."""
    tree: dict[str, Any] = {
        "run_dir": model / "run",
        "model": {"path": model, "dtype": "bfloat16"},
        "data": {"train": {"path": "unused.jsonl"}},
        "optimizer": {"lr": LEARNING_RATE, "weight_decay": 0.01},
        "trainer": {
            "total_steps": 1,
            "train_batch_size": NUM_EXAMPLES,
            "ppo_mini_batch_size": NUM_EXAMPLES,
            "max_tokens_per_gpu": 2048,
        },
    }
    for dotted, value in changes.items():
        *sections, key = dotted.split("__")
        node = tree
        for section in sections:
            node = node.setdefault(section, {})
        node[key] = value
    return Config.model_validate(tree)


def policy(model: Path, **changes: Any) -> Worker:
    return create_worker(make_config(model, **changes), model, one_rank())


def fused(model: Path, **changes: Any) -> Worker:
    """Build a worker with Transformer Engine's layers."""
    return policy(model, model__transformer_impl="transformer_engine", **changes)


def trajectories() -> list[Trajectory]:
    """Return ragged trajectories of up to 120 tokens."""
    generator, found = np.random.default_rng(0), []
    for _ in range(NUM_EXAMPLES):
        num_prompt, num_response = generator.integers(3, 40), generator.integers(8, 80)
        tokens = generator.integers(0, _SHAPE["vocab_size"], num_prompt + num_response).astype(np.int32)
        found.append(
            Trajectory(
                prompt_token_ids=tokens[:num_prompt],
                response_token_ids=tokens[num_prompt:],
                behaviour_log_probs=np.zeros(num_response, np.float32),
                version_spans=(VersionSpan(0, int(num_response)),),
                finish_reason="length",
                text="",
            )
        )
    return found


def log_probs(worker: Worker) -> np.ndarray:
    """Return the log-probs of all response tokens of `trajectories`, float64."""
    return np.concatenate(score_trajectories(worker, trajectories(), 1.0)).astype(np.float64)


def reference_log_probs(model: Path) -> np.ndarray:
    """Return the log-probs of transformers in fp32 on the CPU."""
    reference, found = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32), []
    for t in trajectories():
        tokens = torch.from_numpy(np.concatenate([t.prompt_token_ids, t.response_token_ids]).astype(np.int64))
        with torch.no_grad():
            all_log_probs = reference(tokens[None]).logits[0, :-1].log_softmax(-1)
        found.append(all_log_probs.gather(1, tokens[1:, None])[-len(t.response_token_ids) :, 0].numpy())
    return np.concatenate(found).astype(np.float64)


def train(worker: Worker, num_steps: int) -> list[float]:
    """Return the losses of this number of supervised updates on the same examples."""
    sequences = trajectories()
    weight = 1.0 / sum(len(t.response_token_ids) for t in sequences)
    examples = [Example(trajectory, advantage=0.0, weight=weight) for trajectory in sequences]
    losses = []
    for _ in range(num_steps):
        metrics = scalars(supervised_update(worker, examples, LEARNING_RATE))
        assert metrics["actor/skipped_updates"] == 0
        losses.append(metrics["actor/loss"])
    return losses


def gradients(worker: Worker) -> dict[str, torch.Tensor]:
    """Return a tenth of the first update's gradients, fp32, by Hugging Face name: Adam's first moments after it."""
    read = partial(worker.optimizer.read, state="exp_avg")
    return {name: tensor.clone() for name, tensor in stream_tensors(worker.model, worker.groups, read=read)}


def exported(worker: Worker) -> dict[str, torch.Tensor]:
    """Return the weights by Hugging Face name."""
    return {name: tensor.clone() for name, tensor in stream_tensors(worker.model, worker.groups)}


def k3(current: np.ndarray, behaviour: np.ndarray) -> float:
    """Return the mean k3 estimate of KL(behaviour || current) in nats."""
    log_ratio = current - behaviour
    return float(np.mean(np.expm1(log_ratio) - log_ratio))


def mean_difference(ours: np.ndarray, theirs: np.ndarray) -> float:
    return float(np.abs(ours - theirs).mean())


def cosine(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> float:
    """Return the smallest cosine similarity over all tensors."""
    assert ours.keys() == theirs.keys()
    return min(
        torch.nn.functional.cosine_similarity(ours[name].flatten().double(), theirs[name].flatten().double(), dim=0)
        .clamp(max=1.0)
        .item()
        for name in ours
        if theirs[name].abs().max() > 0
    )
