"""Model FLOPs utilization of one policy update, relative to matrix products on the same GPU in the same run.

Models have the shapes of Qwen2.5-1.5B and 3B with random weights. Micro-batches of 8k and 32k tokens are packed from
four sequences of slightly different lengths; they are halved until they fit by `plan`. Layers are measured without and
with Transformer Engine, in bfloat16 and FP8. FLOPs are the planner's, without recomputation. The objective is PPO,
whose update is one training pass; `bench.gpu_bapo_step` measures the parts that BAPO adds. Time and memory are compared
with those of `plan`, which is told the host's time for a layer, measured with short micro-batches. Goals: 0.50 of the
ceiling in bfloat16 at 8k, and in FP8 1.25 times bfloat16's tokens per second.
"""

from __future__ import annotations

import gc
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from bench.gpu import LONGEST, matrix_flops, one_rank, report_and_save, require_gpu, seconds_of
from bench.report import option_parser
from bench.train_step import make_examples
from megatron_bapo.config.architecture import read_architecture
from megatron_bapo.config.schema import Config
from megatron_bapo.parallel.groups import ParallelGroups
from megatron_bapo.parallel.platform import (
    compute_capability,
    device_name,
    free_memory_bytes,
    has_transformer_engine,
    release_cached_memory,
    take_peak_memory,
)
from megatron_bapo.planning.flops import training_pass_flops
from megatron_bapo.planning.hardware import DEVICE_NAMES, GPUS, GpuName
from megatron_bapo.planning.known_models import FOLDER
from megatron_bapo.planning.trainer_memory import stage_memory
from megatron_bapo.planning.training_time import training_time
from megatron_bapo.trainer.micro_batches import Example
from megatron_bapo.trainer.policy_update import update_policy
from megatron_bapo.trainer.worker import create_worker

MODELS = ("Qwen2.5-1.5B", "Qwen2.5-3B")
TOKENS = {"8k": 8192, "32k": 32768}
"""Tokens of a micro-batch; a step has four micro-batches of 8k or one of 32k."""
STEP_TOKENS = 32768
SHORTEST = 1024
"""Micro-batches are not made shorter than this."""
HOST_MICRO_BATCHES = (2, 6)
"""Micro-batches of `SHORTEST` tokens in the two updates whose difference is the host's time."""
USABLE = 0.93
"""Share of the free memory that torch's tensors may fill; the rest is fragmentation and workspaces."""
TRANSFORMER_ENGINE = {"model": {"transformer_impl": "transformer_engine"}}


@dataclass(frozen=True)
class Measured:
    tokens_per_s: float
    flops: float
    """Model FLOPs per second."""
    peak_bytes: int


def layers() -> dict[str, dict[str, Any]]:
    """Return the settings of the layers that can run on this GPU, by name."""
    variants: dict[str, dict[str, Any]] = {"local bf16": {}}
    if has_transformer_engine():
        variants["TE bf16"] = TRANSFORMER_ENGINE
        if (compute_capability() or (0, 0)) >= (9, 0):
            variants["TE FP8"] = TRANSFORMER_ENGINE | {"fp8": {"recipe": "tensorwise"}}
    return variants


def make_config(
    folder: Path, max_tokens: int, num_sequences: int, settings: dict[str, Any], *, dtype: str = "bfloat16"
) -> Config:
    """Return the configuration of one update of `num_sequences`; long micro-batches recompute their activations."""
    return Config.model_validate(
        {
            **settings,
            "run_dir": folder / "run",
            "model": {"path": folder, "dtype": dtype, **settings.get("model", {})},
            "parallel": {"recompute_granularity": "full" if max_tokens > TOKENS["8k"] else None},
            "data": {"train": {"path": "unused.jsonl"}},
            "algorithm": {"objective": "ppo", **settings.get("algorithm", {})},
            "rollout": {"n": num_sequences, "max_response_length": max_tokens},
            "trainer": {
                "total_steps": 1,
                "train_batch_size": num_sequences,
                "ppo_mini_batch_size": num_sequences,
                "max_tokens_per_gpu": max_tokens,
            },
        }
    )


def make_batch(max_tokens: int, num_micro_batches: int, vocab_size: int) -> list[Example]:
    """Return four sequences for each micro-batch, which fill it; every other advantage is negative."""
    inputs = (max_tokens // 4 * np.array([1.125, 1.0625, 0.9375, 0.875])).astype(int)
    examples = make_examples(np.tile(inputs + 1, num_micro_batches), vocab_size)
    return [replace(example, advantage=float(2 * (index % 2) - 1)) for index, example in enumerate(examples)]


def measure(
    folder: Path, groups: ParallelGroups, settings: dict[str, Any], *, max_tokens: int, step_tokens: int, dtype: str
) -> Measured:
    """Measure the model whose config.json is in the folder, and free its memory afterwards."""
    architecture = read_architecture(folder)
    examples = make_batch(max_tokens, step_tokens // max_tokens, architecture.vocab_size)
    config = make_config(folder, max_tokens, len(examples), settings, dtype=dtype)
    ((seconds, peak_bytes),) = _timed_updates(config, folder, groups, [examples])
    _free_memory()
    lengths = [example.num_input_tokens for example in examples]
    flops = training_pass_flops(architecture, lengths, lora=None)
    return Measured(sum(lengths) / seconds, flops / seconds, peak_bytes)


def measure_host_layer_ms(folder: Path, groups: ParallelGroups, settings: dict[str, Any], *, dtype: str) -> float:
    """Return the milliseconds in which the host launches one layer's passes, from updates that leave the GPU idle."""
    fewer, more = HOST_MICRO_BATCHES
    config = make_config(folder, SHORTEST, 4 * more, settings, dtype=dtype)
    architecture = read_architecture(folder)
    batches = [make_batch(SHORTEST, number, architecture.vocab_size) for number in (fewer, more)]
    less, longer = (seconds for seconds, _ in _timed_updates(config, folder, groups, batches))
    _free_memory()
    return 1e3 * (longer - less) / (more - fewer) / architecture.num_hidden_layers


def planned(
    folder: Path, settings: dict[str, Any], gpu: GpuName, *, max_tokens: int, step_tokens: int, host_layer_ms: float
) -> Measured:
    """Return what `plan` expects of this update with sequences of one length; its peak is that of torch's tensors."""
    architecture, length = read_architecture(folder), max_tokens // 4
    config = _of_one_length(folder, settings, length, step_tokens)
    seconds = training_time(config, architecture, GPUS[gpu], replace(LONGEST, host_layer_ms=host_layer_ms)).total
    flops = training_pass_flops(architecture, [length] * (step_tokens // length), lora=None)
    peak_bytes = planned_peak_bytes(folder, settings, max_tokens=max_tokens)
    return Measured(step_tokens / seconds, flops / seconds, peak_bytes)


def planned_peak_bytes(folder: Path, settings: dict[str, Any], *, max_tokens: int) -> int:
    """Return the peak of torch's tensors that `plan` expects of an update on any GPU."""
    config = _of_one_length(folder, settings, max_tokens // 4, max_tokens)
    (memory,) = stage_memory(config, read_architecture(folder), LONGEST)
    return memory.peak - memory.reserved


def fitting_tokens(folder: Path, max_tokens: int, free_bytes: int) -> int:
    """Return the tokens of a micro-batch: `max_tokens`, or half of it until every kind of layers fits by plan."""
    while max_tokens > SHORTEST and free_bytes * USABLE < max(
        planned_peak_bytes(folder, settings, max_tokens=max_tokens) for settings in layers().values()
    ):
        max_tokens //= 2
    return max_tokens


def _of_one_length(folder: Path, settings: dict[str, Any], length: int, step_tokens: int) -> Config:
    config = make_config(folder, 4 * length, step_tokens // length, settings)
    data = config.data.model_copy(update={"max_prompt_length": 1})
    rollout = config.rollout.model_copy(update={"max_response_length": length - 1})
    return config.model_copy(update={"data": data, "rollout": rollout})


def _timed_updates(
    config: Config, folder: Path, groups: ParallelGroups, batches: Sequence[list[Example]]
) -> list[tuple[float, int]]:
    """Return the seconds of an update with each batch, and the peak of torch's tensors."""
    worker, found = create_worker(config, folder, groups, load=False), []
    for batch in batches:
        take_peak_memory()
        update = partial(update_policy, worker, batch, lr=1e-6, on_policy=True)
        found.append((seconds_of({"update": update}, num_repeats=3)["update"], (take_peak_memory() or (0, 0))[0]))
    return found


def _free_memory() -> None:
    """Free what a worker held; its parts refer to each other."""
    gc.collect()
    release_cached_memory()


@dataclass
class Results:
    """What the bench prints and saves."""

    ceiling: float
    """FLOP/s of matrix products."""
    rows: list[list[object]] = field(default_factory=list)
    ratios: dict[str, float] = field(default_factory=dict)
    figures: dict[str, float] = field(default_factory=dict)

    def add(self, key: str, labels: list[object], measured: Measured, plan: Measured | None) -> None:
        """Add a row with these labels; `plan` is None on a GPU that the planner does not know."""
        share = measured.flops / self.ceiling
        self.ratios[f"{key}_of_ceiling"] = round(share, 3)
        self.figures[f"{key}_tokens_per_s"] = round(measured.tokens_per_s)
        self.figures[f"{key}_peak_gib"] = round(measured.peak_bytes / 2**30, 1)
        time, peak = "?", "?"
        if plan is not None:
            time = self.ratios[f"{key}_planned_time"] = round(measured.tokens_per_s / plan.tokens_per_s, 3)
            peak = self.ratios[f"{key}_planned_peak"] = round(plan.peak_bytes / measured.peak_bytes, 3)
        self.rows.append([*labels, measured.tokens_per_s, share, time, peak])


def compare(model: str, groups: ParallelGroups, results: Results) -> None:
    """Measure all layers and lengths of one model."""
    folder, gpu = FOLDER / model, DEVICE_NAMES.get(device_name() or "")
    host_ms = {name: measure_host_layer_ms(folder, groups, each, dtype="bfloat16") for name, each in layers().items()}
    for length, wanted in TOKENS.items():
        tokens = {"max_tokens": fitting_tokens(folder, wanted, free_memory_bytes()), "step_tokens": STEP_TOKENS}
        speeds: dict[str, float] = {}
        for name, settings in layers().items():
            key = f"{model}_{length}_{name}".replace(" ", "_")
            measured = measure(folder, groups, settings, **tokens, dtype="bfloat16")
            plan = gpu and planned(folder, settings, gpu, **tokens, host_layer_ms=host_ms[name])
            results.add(key, [model, tokens["max_tokens"], name, host_ms[name]], measured, plan)
            results.figures |= {f"{key}_micro_batch": tokens["max_tokens"], f"{key}_host_layer_ms": host_ms[name]}
            speeds[name] = measured.tokens_per_s
        if "TE FP8" in speeds:
            results.ratios[f"{model}_{length}_fp8_over_bf16"] = round(speeds["TE FP8"] / speeds["TE bf16"], 3)


def main() -> None:
    require_gpu()
    with one_rank() as (groups, _):
        results = Results(matrix_flops())
        for model in MODELS:
            compare(model, groups, results)
    results.figures["matrix_tflops"] = results.ceiling / 1e12
    columns = ["shape", "micro-batch", "layers", "host ms a layer", "tokens/s"]
    columns += [f"of {results.ceiling / 1e12:.0f} TFLOP/s", "planned time", "planned peak"]
    report_and_save("gpu_train_step", columns, results.rows, ratios=results.ratios, figures=results.figures)


if __name__ == "__main__":
    option_parser(__doc__).parse_args()
    main()
