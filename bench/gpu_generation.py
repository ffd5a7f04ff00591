"""Speed of a vLLM engine while it generates, against what `plan` expects of it.

Models have the shapes of Qwen2.5-1.5B and 7B with random weights, so that nearly every response has its maximum length.
Prompts have 512 tokens and responses 512, in groups of eight. An engine runs 8, 64 and 256 responses at once, records
its decoding steps as CUDA graphs, and returns the log-prob of every sampled token. Time includes the prompts.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from time import perf_counter

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils.logging import disable_progress_bar

from bench.gpu import LONGEST, report_and_save, require_gpu
from bench.report import option_parser
from megatron_bapo.config.architecture import read_architecture
from megatron_bapo.config.schema import Config
from megatron_bapo.model.hf_create import byte_tokenizer
from megatron_bapo.parallel.platform import device_name, local_device, release_cached_memory, visible_devices
from megatron_bapo.planning.generation_time import generation_seconds
from megatron_bapo.planning.hardware import DEVICE_NAMES, GPUS, GpuName
from megatron_bapo.planning.known_models import FOLDER
from megatron_bapo.planning.rollout_memory import engine_memory
from megatron_bapo.rollout.engine import Engine, engine_environment
from megatron_bapo.rollout.engine_spec import EngineSpec
from megatron_bapo.rollout.messages import GenerationRequest
from megatron_bapo.weight_sync.route import WeightRoute

MODELS = ("Qwen2.5-1.5B", "Qwen2.5-7B")
NUM_RESPONSES = (8, 64, 256)
GROUP = 8
NUM_TOKENS = 512
"""Tokens of a prompt, and of a response."""


@dataclass(frozen=True)
class Measured:
    seconds: float
    """Time of the whole batch."""
    num_tokens: int
    """Generated tokens, all responses together."""


def make_config(folder: Path, num_responses: int, num_tokens: int, *, dtype: str = "bfloat16") -> Config:
    """Return the configuration of a batch whose prompts and responses all have `num_tokens` tokens."""
    return Config.model_validate(
        {
            "run_dir": folder / "run",
            "model": {"path": folder, "dtype": dtype},
            "data": {"train": {"path": "unused.jsonl"}, "max_prompt_length": num_tokens},
            "rollout": {
                "n": GROUP,
                "max_response_length": num_tokens,
                "max_num_seqs": max(NUM_RESPONSES),
                "enforce_eager": False,
                "request_timeout_s": 300,
            },
            "trainer": {
                "total_steps": 1,
                "train_batch_size": num_responses,
                "ppo_mini_batch_size": num_responses,
                "max_tokens_per_gpu": 4 * num_tokens,
            },
        }
    )


def create_model(shape: Path, folder: Path, dtype: str) -> None:
    """Write a checkpoint of the shape in `shape`/config.json with random weights, and a tokenizer of bytes."""
    with torch.device(local_device()):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(shape), dtype=getattr(torch, dtype))
    model.save_pretrained(folder)
    byte_tokenizer(["a", "b"]).save_pretrained(folder)
    del model
    release_cached_memory()


async def measure(folder: Path, numbers: Sequence[int], num_tokens: int, *, dtype: str) -> dict[int, Measured]:
    """Return what an engine with the checkpoint does for each number of responses."""
    found: dict[int, Measured] = {}
    spec, engine = EngineSpec.of(make_config(folder, max(numbers), num_tokens, dtype=dtype)), Engine()
    with tempfile.TemporaryDirectory() as route:
        await engine.start(spec, WeightRoute(Path(route)))
        try:
            for number in numbers:
                # Other prompts: the same ones would be in the prefix cache.
                await engine.generate_many([replace(each, max_tokens=8) for each in requests(number, num_tokens, 1)])
                start = perf_counter()
                generated = await engine.generate_many(requests(number, num_tokens))
                seconds = perf_counter() - start
                found[number] = Measured(seconds, sum(len(c.token_ids) for each in generated for c in each.completions))
        finally:
            await engine.shutdown()
    return found


def requests(num_responses: int, num_tokens: int, seed: int = 0) -> list[GenerationRequest]:
    """Return requests of random prompts of `num_tokens` tokens, for as many tokens."""
    prompts = np.random.default_rng(seed).integers(0, 256, (num_responses // GROUP, num_tokens), np.int32)
    return [
        GenerationRequest(
            f"{seed}-{num_responses}-{i}", (prompt,), GROUP, temperature=1.0, top_p=1.0, top_k=-1, min_p=0.0,
            max_tokens=num_tokens, seed=GROUP * i,
        )
        for i, prompt in enumerate(prompts)
    ]  # fmt: skip


def planned_seconds(folder: Path, gpu: GpuName, num_responses: int, num_tokens: int) -> float:
    """Return what `plan` expects of such a batch."""
    config, architecture = make_config(folder, num_responses, num_tokens), read_architecture(folder)
    engine = engine_memory(config, architecture, GPUS[gpu], LONGEST)
    return generation_seconds(config, architecture, GPUS[gpu], engine, LONGEST)


def main(models: Sequence[str] = MODELS) -> None:
    require_gpu()
    gpu = DEVICE_NAMES.get(device_name() or "")
    os.environ.update(engine_environment(visible_devices()[:1]))
    disable_progress_bar()
    rows, ratios, figures = [], {}, {}
    for model in models:
        with tempfile.TemporaryDirectory() as temporary:
            create_model(FOLDER / model, Path(temporary), "bfloat16")
            found = asyncio.run(measure(Path(temporary), NUM_RESPONSES, NUM_TOKENS, dtype="bfloat16"))
        for number, measured in found.items():
            key = f"{model}_{number}"
            figures[f"{key}_tokens_per_s"] = round(measured.num_tokens / measured.seconds)
            figures[f"{key}_step_ms"] = round(1e3 * measured.seconds * number / measured.num_tokens, 2)
            row = [model, number, figures[f"{key}_tokens_per_s"], figures[f"{key}_step_ms"], "?"]
            if gpu is not None:
                expected = planned_seconds(FOLDER / model, gpu, number, NUM_TOKENS)
                row[-1] = ratios[f"{key}_planned_time"] = round(expected / measured.seconds, 3)
            rows.append(row)
    columns = ["shape", "responses", "tokens/s", "ms per step", "planned time"]
    report_and_save("gpu_generation", columns, rows, ratios=ratios, figures=figures)


if __name__ == "__main__":
    parser = option_parser(__doc__)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=MODELS, help="shapes (default: all)")
    main(parser.parse_args().models)
