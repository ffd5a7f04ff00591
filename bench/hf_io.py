"""Import and export of a Hugging Face checkpoint against mbridge: seconds, and peak bytes above the model.

python -m bench.hf_io, with the packages of requirements-bench.txt on the path

Both sides load and write the same Megatron model, a random Qwen3 of 0.1B parameters in float32, at TP 1 in one process
and at TP 2 in two gloo ranks. Each starts from the same files, and its result is compared with them bit by bit. Seconds
are medians until the last rank is done and its files are on disk; input files are in the page cache. Bytes are the peak
of PyTorch's allocator on a rank above the model, without the mapped checkpoint.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Callable
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch.multiprocessing.spawn import spawn
from transformers import AutoConfig, Qwen3Config, Qwen3ForCausalLM
from transformers.utils.logging import disable_progress_bar

from bench.allocated_bytes import peak_allocated_bytes
from bench.report import medians_s, option_parser, report
from megatron_bapo.config.architecture import read_architecture
from megatron_bapo.config.schema import Config, ParallelConfig
from megatron_bapo.model.build import PolicyModel, build_policy
from megatron_bapo.model.hf_export import save_hugging_face
from megatron_bapo.model.hf_import import load_hugging_face
from megatron_bapo.parallel.groups import ParallelGroups, create_groups

SHAPE = {
    "vocab_size": 32768,
    "hidden_size": 768,
    "intermediate_size": 2304,
    "num_hidden_layers": 8,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "tie_word_embeddings": False,
}
TENSOR_PARALLEL_SIZES = (1, 2)
NUM_REPEATS, NUM_WARMUPS = 7, 3
"""The first writes are slower, because the system has to allocate memory for its page cache."""

Task = Callable[[], object]


def local_names_bridge(model: PolicyModel, checkpoint: Path) -> Any:
    """Return mbridge's bridge for the module names of local layer specs; mbridge itself has Transformer Engine's."""
    from mbridge.models.qwen3 import Qwen3Bridge  # pyright: ignore[reportMissingImports]

    norms = {"input_layernorm": "input_layernorm", "pre_mlp_layernorm": "post_attention_layernorm"}

    class LocalNames(Qwen3Bridge):
        def _build_config(self) -> Any:
            return model.config

        def _weight_name_mapping_mcore_to_hf(self, name: str) -> list[str]:
            *_, layer, module, _ = ("", *name.split("."))[-4:]
            if module in norms:
                return [f"model.layers.{layer}.{norms[module]}.weight"]
            return super()._weight_name_mapping_mcore_to_hf(name)

    return LocalNames(AutoConfig.from_pretrained(checkpoint), dtype=model.config.params_dtype)


def _rank(rank: int, num_ranks: int, folder: Path) -> None:
    """Run one rank of all measurements; rank 0 writes them to `results.json`."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=num_ranks)
    parallel = ParallelConfig(world_size=num_ranks, tensor_model_parallel_size=num_ranks)
    groups = create_groups(parallel, seed=0, timeout_s=120.0)
    checkpoint = folder.parent / "checkpoint"
    config = Config.model_validate(
        {
            "run_dir": folder,
            "model": {"path": checkpoint, "dtype": "float32"},
            "parallel": parallel,
            "data": {"train": {"path": "unused.jsonl"}},
            "trainer": {"total_steps": 1, "train_batch_size": 8, "ppo_mini_batch_size": 8},
        }
    )
    model = build_policy(config, read_architecture(checkpoint), groups)
    bridge, gpt = local_names_bridge(model, checkpoint), [chunk.gpt for chunk in model.chunks]
    tasks: dict[str, dict[str, Task]] = {
        "import": {
            "ours": partial(load_hugging_face, model, checkpoint, groups),
            "mbridge": torch.no_grad()(partial(bridge.load_weights, gpt, str(checkpoint))),
        },
        "export": {
            "ours": partial(save_hugging_face, model, groups, checkpoint, folder / "ours"),
            "mbridge": torch.no_grad()(partial(bridge.save_weights, gpt, str(folder / "mbridge"))),
        },
    }
    results = {}
    for direction, sides in tasks.items():
        for side in sides:
            _check(model, tasks, direction, side, folder, groups.is_main)
        together = {side: partial(_once, task, folder / side, groups) for side, task in sides.items()}
        seconds = medians_s(together, num_repeats=NUM_REPEATS, num_warmups=NUM_WARMUPS)
        for side, task in sides.items():
            mapped = chain(checkpoint.glob("*.safetensors"), folder.glob("*/*.safetensors"))
            peak = torch.tensor(peak_allocated_bytes(task, mapped))
            dist.all_reduce(peak, dist.ReduceOp.MAX)
            results[f"{direction} {side}"] = (seconds[side], int(peak))
    if groups.is_main:
        (folder / "results.json").write_text(json.dumps(results))
    dist.destroy_process_group()


def _once(task: Task, written: Path, groups: ParallelGroups) -> None:
    """Run the task once, without an earlier export, until the last rank is done and its files are flushed."""
    if groups.is_main:
        shutil.rmtree(written, ignore_errors=True)
    task()
    dist.barrier()
    if groups.is_main:
        for path in written.glob("*.safetensors"):
            with path.open() as file:
                os.fsync(file.fileno())
    dist.barrier()


def _check(
    model: PolicyModel, tasks: dict[str, dict[str, Task]], direction: str, side: str, folder: Path, is_main: bool
) -> None:
    """Check an import with our export, or an export with our import."""
    with torch.no_grad():
        for _, parameter in model.named_parameters():
            parameter.fill_(torch.nan)
    tasks["import"][side if direction == "import" else "ours"]()
    writer = side if direction == "export" else "ours"
    tasks["export"][writer]()
    dist.barrier()
    if is_main:
        original, written = (_load(path) for path in (folder.parent / "checkpoint", folder / writer))
        assert written.keys() == original.keys(), f"the {direction} of {side} misses tensors"
        wrong = [name for name in original if not torch.equal(original[name], written[name])]
        assert not wrong, f"the {direction} of {side} changes {wrong[0]}"
    dist.barrier()


def _load(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


def main() -> None:
    rows, ratios, figures = [], {}, {}
    disable_progress_bar()
    with tempfile.TemporaryDirectory() as temporary:
        root = Path(temporary)
        torch.manual_seed(0)
        Qwen3ForCausalLM(Qwen3Config(**SHAPE)).save_pretrained(root / "checkpoint", max_shard_size="100MB")
        for size in TENSOR_PARALLEL_SIZES:
            folder = root / f"tp{size}"
            folder.mkdir()
            spawn(_rank, args=(size, folder), nprocs=size)
            results = json.loads((folder / "results.json").read_text())
            for task, (seconds, peak) in results.items():
                rows.append((size, task, seconds, peak / 2**20))
                key = f"{task.replace(' ', '_')}_tp{size}"
                figures |= {f"{key}_s": round(seconds, 3), f"{key}_peak_mib": round(peak / 2**20, 1)}
            for direction in ("import", "export"):
                ours, theirs = results[f"{direction} ours"], results[f"{direction} mbridge"]
                ratios[f"{direction}_time_tp{size}"] = round(ours[0] / theirs[0], 3)
                ratios[f"{direction}_peak_bytes_tp{size}"] = round(ours[1] / theirs[1], 3)
    report("hf_io", ("TP", "task", "seconds", "peak MiB per rank"), rows, ratios=ratios, figures=figures)


if __name__ == "__main__":
    option_parser(__doc__).parse_args()
    main()
