"""How long training is blocked by a checkpoint that is written in the background, against one that it waits for.

python -m bench.checkpoint                50M parameters
python -m bench.checkpoint --size 500M    20 GB of memory and 24 GB of disk

Two gloo ranks (TP 2) have a random Qwen3 in float32 with Adam's moments, so that a checkpoint has 12 bytes a parameter.
They save with `checkpoint.async_save` off and on, in turns. While a checkpoint is written in the background they update
the model, which shows what the write takes from training. Files go to the folder of TMPDIR and are flushed to disk.
"""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from statistics import mean, median
from time import perf_counter
from typing import Any

import numpy as np
import psutil
import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import spawn
from transformers import Qwen3Config

from bench.report import option_parser, report
from bench.train_step import LEARNING_RATE, make_examples
from megatron_bapo.config.schema import Config
from megatron_bapo.metrics.values import scalars
from megatron_bapo.parallel.collectives import barrier
from megatron_bapo.parallel.groups import create_groups
from megatron_bapo.parallel.platform import start_distributed
from megatron_bapo.trainer.checkpoint import checkpoints
from megatron_bapo.trainer.checkpoint_writer import CheckpointWriter
from megatron_bapo.trainer.policy_update import supervised_update
from megatron_bapo.trainer.worker import Worker, create_worker

NUM_RANKS, NUM_REPEATS, TIMEOUT_S = 2, 3, 600.0
SEQUENCES = np.full(2, 32)
"""Tokens of each sequence of an update."""
BYTES_PER_PARAMETER = 12
SHAPES: dict[str, dict[str, Any]] = {
    "50M": {
        "hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 8, "vocab_size": 32768,
        "num_attention_heads": 8,
    },
    "250M": {
        "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 8, "vocab_size": 151936,
        "num_attention_heads": 16,
    },
    "500M": {
        "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 26, "vocab_size": 151936,
        "num_attention_heads": 16,
    },
}  # fmt: skip
NEEDED_GIB = {"50M": 4, "250M": 12, "500M": 20}


def make_config(model: Path, run_dir: Path, *, async_save: bool) -> Config:
    return Config.model_validate(
        {
            "run_dir": run_dir,
            "model": {"path": model, "dtype": "float32"},
            "parallel": {"world_size": NUM_RANKS, "tensor_model_parallel_size": NUM_RANKS},
            "data": {"train": {"path": "unused.jsonl"}},
            "trainer": {"total_steps": 1, "train_batch_size": 2, "ppo_mini_batch_size": 2, "max_tokens_per_gpu": 64},
            "checkpoint": {"async_save": async_save, "keep": 1},
        }
    )


def _rank(rank: int, folder: Path, vocab_size: int) -> None:
    """Run one rank of all measurements; rank 0 writes them to `results.json`."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(NUM_RANKS)}
    start_distributed(TIMEOUT_S, store_file=folder / "rendezvous")
    configs = {name: make_config(folder / "model", folder, async_save=name == "async") for name in ("sync", "async")}
    groups = create_groups(configs["sync"].parallel, seed=0, timeout_s=TIMEOUT_S)
    worker = create_worker(configs["sync"], folder / "model", groups, load=False)
    examples = make_examples(SEQUENCES, vocab_size)

    def step_s() -> float:
        start = perf_counter()
        supervised_update(worker, examples, LEARNING_RATE)
        barrier(groups)
        return perf_counter() - start

    step_s()  # the moments are not zero, so that they are saved
    writers = {
        name: CheckpointWriter(Worker(config, groups, worker.model, worker.optimizer), folder / name)
        for name, config in configs.items()
    }
    found: dict[str, list[float]] = {"alone_s": [], "beside_s": [], "added_s": []}
    for number in range(1, NUM_REPEATS + 1):
        found["alone_s"] += (alone := [step_s() for _ in range(3)])
        beside = []
        for name, writer in writers.items():
            barrier(groups)
            start = perf_counter()
            writer.save(number, {})
            barrier(groups)
            found.setdefault(f"{name}_blocked_s", []).append(perf_counter() - start)
            while groups_are_writing(writer):
                beside.append(step_s())
            writer.finish()
            found.setdefault(f"{name}_write_s", []).append(scalars(writer.metrics())["checkpoint/write_s"])
        found["beside_s"] += beside
        found["added_s"].append(sum(beside) - len(beside) * median(alone))
    if groups.is_main:
        size = sum(path.stat().st_size for path in checkpoints(folder / "async")[-1].rglob("*.safetensors"))
        (folder / "results.json").write_text(json.dumps(found | {"num_bytes": size}))
    dist.destroy_process_group()


def groups_are_writing(writer: CheckpointWriter) -> bool:
    """Return on all ranks whether a write is under way on any of them."""
    writing = torch.tensor(float(writer.is_writing))
    dist.all_reduce(writing)
    return writing.item() > 0


def main() -> None:
    parser = option_parser(__doc__)
    parser.add_argument("--size", choices=SHAPES, default="50M", help="parameters of the model (default 50M)")
    size = parser.parse_args().size
    available_gib = psutil.virtual_memory().available / 2**30
    if available_gib < NEEDED_GIB[size]:
        raise SystemExit(f"{size} needs {NEEDED_GIB[size]} GiB of memory, and {available_gib:.0f} GiB are free")
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        shape = SHAPES[size]
        Qwen3Config(**shape, num_key_value_heads=8, head_dim=64, tie_word_embeddings=True).save_pretrained(
            folder / "model"
        )
        for name in ("sync", "async"):
            (folder / name).mkdir()
        spawn(_rank, args=(folder, shape["vocab_size"]), nprocs=NUM_RANKS)
        found = json.loads((folder / "results.json").read_text())
    num_parameters = found["num_bytes"] / BYTES_PER_PARAMETER
    blocked = {name: median(found[f"{name}_blocked_s"]) for name in ("sync", "async")}
    written = {name: median(found[f"{name}_write_s"]) for name in ("sync", "async")}
    added_s = mean(found["added_s"])
    ratios = {
        "blocked": round(blocked["async"] / blocked["sync"], 3),
        "blocked_and_slower_updates": round((blocked["async"] + added_s) / blocked["sync"], 3),
        "update_beside_a_write": round(mean(found["beside_s"]) / median(found["alone_s"]), 3),
    }
    figures = {
        "millions_of_parameters": round(num_parameters / 1e6, 1),
        **{f"{name}_blocked_s": round(value, 3) for name, value in blocked.items()},
        **{f"{name}_write_s": round(value, 3) for name, value in written.items()},
        "update_s": round(median(found["alone_s"]), 3),
        "update_beside_a_write_s": round(mean(found["beside_s"]), 3),
        "added_to_updates_s": round(added_s, 3),
        "sync_gb_per_s": round(found["num_bytes"] / blocked["sync"] / 1e9, 3),
    }
    rows = [
        ("training waits", blocked["sync"], written["sync"], 1.0),
        ("in the background", blocked["async"], written["async"], ratios["blocked"]),
    ]
    report("checkpoint", ("checkpoint", "blocked, s", "written in, s", "ratio"), rows, ratios=ratios, figures=figures)


if __name__ == "__main__":
    main()
