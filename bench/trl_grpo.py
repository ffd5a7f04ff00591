"""GRPO by TRL, for bench.end_to_end: trains a model on prompts and writes the time of each step."""

from __future__ import annotations

import json
import sys
from itertools import pairwise
from pathlib import Path
from time import perf_counter, process_time
from typing import Any

import torch
from datasets import Dataset  # pyright: ignore[reportMissingImports]
from transformers import TrainerCallback
from trl import GRPOConfig, GRPOTrainer  # pyright: ignore[reportMissingImports]

from megatron_bapo.rewards.math_answer import compute_score


class StepClock(TrainerCallback):
    """Records the time and the processor time at the end of each rollout batch, which has `num_updates` updates."""

    def __init__(self, num_updates: int) -> None:
        self._num_updates = num_updates
        self._ends: list[tuple[float, float]] = []

    def on_train_begin(self, *_args: Any, **_kwargs: Any) -> None:
        self._ends.append((perf_counter(), process_time()))

    def on_step_end(self, _args: Any, state: Any, *_others: Any, **_kwargs: Any) -> None:
        if state.global_step % self._num_updates == 0:
            self._ends.append((perf_counter(), process_time()))

    def seconds(self) -> tuple[list[float], list[float]]:
        """Return the seconds and the processor seconds of each batch."""
        step_s, step_cpu_s = ([end - start for start, end in pairwise(ends)] for ends in zip(*self._ends, strict=True))
        return step_s, step_cpu_s


def reward(completions: list[Any], answer: list[str], **_columns: Any) -> list[float]:
    """Return the scores of the project's own reward."""
    return [
        compute_score("", text[0]["content"], ground_truth)["score"]
        for text, ground_truth in zip(completions, answer, strict=True)
    ]


def main(job: dict[str, Any], results: Path) -> None:
    torch.set_num_threads(job["num_cores"])
    rows = [json.loads(line) for line in Path(job["prompts"]).read_text().splitlines()]
    prompts = [{"prompt": [{"role": "user", "content": row["prompt"]}], "answer": row["answer"]} for row in rows]
    num_updates = job["batch_size"] // job["mini_batch_size"]
    settings = GRPOConfig(
        output_dir=str(results.parent / "trl"),
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,  # on by default, and slower
        num_generations=job["num_generations"],
        generation_batch_size=job["batch_size"],
        per_device_train_batch_size=job["mini_batch_size"],
        gradient_accumulation_steps=1,
        max_steps=job["num_steps"] * num_updates,
        max_completion_length=job["max_response_length"],
        learning_rate=job["lr"],
        temperature=1.0,
        beta=0.0,
        use_vllm=job["use_vllm"],
        save_strategy="no",
        report_to="none",
        logging_steps=1,
        disable_tqdm=True,
        seed=job["seed"],
    )
    clock = StepClock(num_updates)
    trainer = GRPOTrainer(
        model=job["model"],
        reward_funcs=reward,
        args=settings,
        train_dataset=Dataset.from_list(prompts),
        callbacks=[clock],
    )
    trainer.train()
    lengths = [row["completions/mean_length"] for row in trainer.state.log_history if "completions/mean_length" in row]
    step_s, step_cpu_s = clock.seconds()
    results.write_text(json.dumps({"step_s": step_s, "step_cpu_s": step_cpu_s, "mean_length": lengths}))


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2]))
