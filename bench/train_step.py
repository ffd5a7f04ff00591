"""One training step in one process: this trainer against `transformers` with AdamW, on the same tokens.

Both minimize the same loss over the same sequences in micro-batches of the same token budget, clip the gradient and
step AdamW, in fp32 on one thread. `transformers` gets padded batches of sequences of similar length, as its trainer
makes them with `group_by_length`. Every token of a sequence is a label, so that both compute all logits. The benchmark
fails if the losses differ.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM
from transformers.utils.logging import disable_progress_bar

from bench.report import medians_s, option_parser, report
from megatron_bapo.config.schema import Config
from megatron_bapo.metrics.values import scalars
from megatron_bapo.parallel.groups import create_groups
from megatron_bapo.parallel.platform import start_distributed
from megatron_bapo.records import Trajectory, VersionSpan
from megatron_bapo.trainer.micro_batches import Example
from megatron_bapo.trainer.policy_update import supervised_update
from megatron_bapo.trainer.worker import create_worker

NUM_SEQUENCES = 16
MAX_TOKENS = 1024
LEARNING_RATE = 1e-5
SHAPES: dict[str, dict[str, Any]] = {
    "4M": {"hidden_size": 192, "intermediate_size": 512, "num_hidden_layers": 6, "vocab_size": 8192},
    "16M": {"hidden_size": 320, "intermediate_size": 896, "num_hidden_layers": 8, "vocab_size": 16384},
}
LENGTHS = {
    "equal lengths": np.full(NUM_SEQUENCES, 256),
    "ragged lengths": np.random.default_rng(0).lognormal(np.log(160), 0.8, NUM_SEQUENCES).astype(int).clip(16, 900),
}


def make_model(folder: Path, shape: dict[str, Any]) -> Qwen3ForCausalLM:
    torch.manual_seed(0)
    config = Qwen3Config(**shape, num_attention_heads=6, num_key_value_heads=2, head_dim=64, tie_word_embeddings=True)
    model = Qwen3ForCausalLM(config)
    model.save_pretrained(folder)
    return model


def make_examples(lengths: np.ndarray, vocab_size: int) -> list[Example]:
    rng = np.random.default_rng(1)
    num_labels = int(sum(lengths - 1))
    examples = []
    for length in lengths:
        tokens = rng.integers(0, vocab_size, length).astype(np.int32)
        trajectory = Trajectory(
            prompt_token_ids=tokens[:1],
            response_token_ids=tokens[1:],
            behaviour_log_probs=np.zeros(length - 1, np.float32),
            version_spans=(VersionSpan(0, int(length - 1)),),
            finish_reason="stop",
            text="",
        )
        examples.append(Example(trajectory, advantage=0.0, weight=1.0 / num_labels))
    return examples


def padded_batches(examples: list[Example]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return batches of (tokens, labels), longest sequences first; the label of padding is -100."""
    sequences = sorted(
        (np.concatenate([e.trajectory.prompt_token_ids, e.trajectory.response_token_ids]) for e in examples),
        key=len,
        reverse=True,
    )
    batches, start = [], 0
    while start < len(sequences):
        longest = len(sequences[start])
        rows = sequences[start : start + max(1, MAX_TOKENS // longest)]
        tokens = torch.zeros(len(rows), longest, dtype=torch.long)
        labels = torch.full_like(tokens, -100)
        for row, sequence in enumerate(rows):
            tokens[row, : len(sequence)] = labels[row, : len(sequence)] = torch.from_numpy(sequence.astype(np.int64))
        batches.append((tokens, labels))
        start += len(rows)
    return batches


def transformers_step(
    model: Qwen3ForCausalLM, optimizer: torch.optim.Optimizer, batches: list[tuple[torch.Tensor, torch.Tensor]]
) -> float:
    """Take one step and return its loss."""
    num_labels = sum(int((labels[:, 1:] != -100).sum()) for _, labels in batches)
    optimizer.zero_grad()
    total = 0.0
    for tokens, labels in batches:
        loss = model(
            tokens, attention_mask=(labels != -100).long(), labels=labels, num_items_in_batch=torch.tensor(num_labels)
        ).loss
        loss.backward()
        total += loss.item()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return total


def make_config(model: Path, run_dir: Path) -> Config:
    return Config.model_validate(
        {
            "run_dir": run_dir,
            "model": {"path": model, "dtype": "float32"},
            "data": {"train": {"path": "unused.jsonl"}},
            "optimizer": {"lr": LEARNING_RATE, "weight_decay": 0.0},
            "trainer": {
                "total_steps": 1,
                "train_batch_size": NUM_SEQUENCES,
                "ppo_mini_batch_size": NUM_SEQUENCES,
                "max_tokens_per_gpu": MAX_TOKENS,
            },
        }
    )


def compare(shape: dict[str, int], lengths: np.ndarray, folder: Path, groups: object) -> tuple[dict[str, float], int]:
    """Return the median seconds of both steps and the number of tokens in a step."""
    theirs = make_model(folder / "model", shape)
    config = make_config(folder / "model", folder / "run")
    worker = create_worker(config, config.model_path, groups)  # pyright: ignore[reportArgumentType]
    optimizer = torch.optim.AdamW(theirs.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.999), weight_decay=0.0)
    examples = make_examples(lengths, shape["vocab_size"])
    batches = padded_batches(examples)
    losses: dict[str, float] = {}

    def our_step() -> None:
        losses["ours"] = scalars(supervised_update(worker, examples, LEARNING_RATE))["actor/loss"]

    def their_step() -> None:
        losses["theirs"] = transformers_step(theirs, optimizer, batches)

    seconds = medians_s({"ours": our_step, "transformers": their_step}, num_repeats=4)
    assert abs(losses["ours"] - losses["theirs"]) < 1e-3, f"the two train on different losses: {losses}"
    return seconds, int(sum(lengths))


def main() -> None:
    disable_progress_bar()
    os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0")
    rows, ratios, figures = [], {}, {}
    with tempfile.TemporaryDirectory() as temporary:
        root = Path(temporary)
        start_distributed(timeout_s=60.0, store_file=root / "rendezvous")
        groups = create_groups(make_config(root, root).parallel, seed=0, timeout_s=60.0)
        for shape_name, shape in SHAPES.items():
            for lengths_name, lengths in LENGTHS.items():
                folder = root / f"{shape_name}-{lengths_name}".replace(" ", "-")
                seconds, num_tokens = compare(shape, lengths, folder, groups)
                key = f"{shape_name}_{lengths_name}".replace(" ", "_")
                ratios[key] = round(seconds["ours"] / seconds["transformers"], 3)
                figures[f"{key}_tokens_per_s"] = round(num_tokens / seconds["ours"], 1)
                rows.append([shape_name, lengths_name, *seconds.values(), ratios[key]])
        torch.distributed.destroy_process_group()
    columns = ["parameters", "batch", "this trainer, s", "transformers, s", "ratio"]
    report("train_step", columns, rows, ratios=ratios, figures=figures)


if __name__ == "__main__":
    option_parser(__doc__).parse_args()
    main()
