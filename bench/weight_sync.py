"""Weight syncs through the store against gathering on rank 0 and broadcasting, and against mbridge's export.

python -m bench.weight_sync [20M] [500M], with requirements-bench.txt on the path

Two gloo ranks (TP 2) hold a random Qwen3 in bfloat16; a vLLM engine of one rank loads it. Seconds are medians until the
last rank is done. Bytes are those that leave a rank or a store; peak bytes are the most that PyTorch's allocator gave
out on a rank above the model. Changes are random elements in random places. Last, on paper, by the plan alone:
published models on clusters of 8-GPU hosts.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import tempfile
from collections.abc import Callable
from contextlib import closing
from functools import partial
from itertools import count
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from safetensors.torch import load_file
from transformers.utils.logging import disable_progress_bar

from bench.allocated_bytes import peak_allocated_bytes
from bench.hf_io import local_names_bridge
from bench.report import medians_s, report
from bench.weight_sync_on_paper import on_paper
from megatron_bapo.config.schema import Config, CreateModelConfig, ParallelConfig, RolloutConfig
from megatron_bapo.model.build import build_policy
from megatron_bapo.model.hf_create import create_checkpoint
from megatron_bapo.model.hf_export import stage_shapes, stream_tensors
from megatron_bapo.model.hf_import import load_hugging_face
from megatron_bapo.model.weight_layouts import EngineLayout, one_host, weight_plan
from megatron_bapo.model.weight_slices import LocalSlices
from megatron_bapo.parallel.groups import create_groups
from megatron_bapo.rollout.engine import Engine, engine_environment
from megatron_bapo.weight_sync.plan import Box, Shard, WeightPlan, make_plan
from megatron_bapo.weight_sync.relay import StoreServer, pull
from megatron_bapo.weight_sync.transport import WeightStore
from megatron_bapo.weight_sync.version_file import view_of

_COMMON = {"head_dim": 64, "tie_word_embeddings": True, "initializer_range": 0.02}
MODELS = {
    "20M": CreateModelConfig(
        num_hidden_layers=8, hidden_size=384, intermediate_size=1152, num_attention_heads=6, num_key_value_heads=2,
        vocab_size=16384, **_COMMON,
    ),
    "500M": CreateModelConfig(
        num_hidden_layers=26, hidden_size=1024, intermediate_size=3072, num_attention_heads=16, num_key_value_heads=8,
        vocab_size=151936, **_COMMON,
    ),
}  # fmt: skip
SHARES = (0.001, 0.01, 0.03, 0.1)
BUCKET_BYTES = 64 << 20
NUM_RANKS, NUM_REPEATS, NUM_WARMUPS = 2, 3, 2
"""The first two files of a store wait for the machine to give out shared memory."""


def _trainers(rank: int, folder: Path, checkpoint: Path, store_folder: Path) -> None:
    """One rank's part of what is measured on the trainer's side; rank 0 leaves it in `results.json`."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=NUM_RANKS)
    parallel = ParallelConfig(world_size=NUM_RANKS, tensor_model_parallel_size=NUM_RANKS)
    groups = create_groups(parallel, seed=0, timeout_s=300.0)
    config = Config.model_validate(
        {
            "run_dir": folder,
            "model": {"path": checkpoint, "dtype": "bfloat16"},
            "parallel": parallel,
            "data": {"train": {"path": "unused.jsonl"}},
            "trainer": {"total_steps": 1, "train_batch_size": 8, "ppo_mini_batch_size": 8},
        }
    )
    model = build_policy(config, checkpoint, groups)
    load_hugging_face(model, checkpoint, groups)
    engine = EngineLayout(tensor_parallel_size=NUM_RANKS)
    plan = weight_plan(
        model.architecture, parallel, engine, one_host(parallel, engine), dtype="bfloat16", bucket_bytes=BUCKET_BYTES
    )
    store, slices, versions = WeightStore(store_folder), LocalSlices(model, groups), count(1)
    bridge = local_names_bridge(model, checkpoint)

    def sync() -> None:
        version = next(versions)
        store.write(version, plan, rank, slices)
        dist.barrier()
        if rank == 0:
            store.commit(version, plan)
            store.discard_before(version)

    def gather_and_broadcast() -> None:
        held = {name: tensor.clone() for name, tensor in stream_tensors(model, groups)}
        for name, shape in stage_shapes(model, groups).items():
            dist.broadcast(held[name] if rank == 0 else torch.empty(shape, dtype=torch.bfloat16), src=0)

    def export_with_mbridge() -> None:
        for _ in bridge.export_weights([chunk.gpt for chunk in model.chunks]):
            pass

    tasks: dict[str, Callable[[], object]] = {
        "store, every rank its slices": sync,
        "gather on rank 0, broadcast": gather_and_broadcast,
        "mbridge export_weights": torch.no_grad()(export_with_mbridge),
    }
    together = {name: partial(_until_all_are_done, task) for name, task in tasks.items()}
    seconds = medians_s(together, num_repeats=NUM_REPEATS, num_warmups=NUM_WARMUPS)
    results = {}
    for name, task in tasks.items():
        peak = torch.tensor(peak_allocated_bytes(task))
        dist.all_reduce(peak, dist.ReduceOp.MAX)
        results[name] = (seconds[name], int(peak))
    if rank == 0:
        (folder / "results.json").write_text(json.dumps(results))
    dist.destroy_process_group()


def _until_all_are_done(task: Callable[[], object]) -> None:
    task()
    dist.barrier()


def _whole(tensors: dict[str, torch.Tensor], engine_host: int) -> WeightPlan:
    """One trainer rank gives everything to a host's engines of one rank."""
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    shards = {name: [Shard(Box.whole(shape), (0,))] for name, shape in shapes.items()}
    return make_plan(
        shapes, "bfloat16", shards, shards, sender_hosts=[0], reader_hosts=[[engine_host]],
        reader_layout=EngineLayout().name, bucket_bytes=BUCKET_BYTES,
    )  # fmt: skip


def _publish(store: WeightStore, version: int, tensors: dict[str, torch.Tensor], plan: WeightPlan) -> None:
    store.write(version, plan, 0, lambda part: view_of(tensors[part.name], part.box))
    store.commit(version, plan)


def _change(tensors: dict[str, torch.Tensor], share: float, generator: np.random.Generator) -> None:
    """Flip the lowest bit of a share of each tensor's elements."""
    for tensor in tensors.values():
        elements = tensor.view(-1).view(torch.int16).numpy()
        elements[generator.choice(len(elements), max(1, round(share * len(elements))), replace=False)] ^= 1


def _relayed(tensors: dict[str, torch.Tensor]) -> dict[str, tuple[float, int]]:
    """From one store to another: task -> seconds and bytes, by share of changed elements; `full` without an old one."""
    plan, generator, versions = _whole(tensors, engine_host=1), np.random.default_rng(0), count(1)
    found: dict[str, list[tuple[float, int]]] = {}
    with closing(WeightStore.create()) as trainers, closing(WeightStore.create()) as engines:
        sources = {0: StoreServer(trainers.folder)}
        for share in (None, None, *(share for share in SHARES for _ in range(2))):
            version = next(versions)
            _change(tensors, share or 0.01, generator)
            trainers.discard_before(version - 1)
            _publish(trainers, version, tensors, plan)
            engines.discard_before(version)
            start = perf_counter()
            pulled = pull(engines, version, 1, sources, full_every=1 if share is None else 10**6)
            name = "relay, full" if share is None else f"relay, {share:.1%} changed"
            found.setdefault(name, []).append((perf_counter() - start, pulled.num_bytes))
            assert engines.verify(version) == plan.total_bytes
    return {name: min(values) for name, values in found.items()}


def _engine_side(checkpoint: Path, tensors: dict[str, torch.Tensor]) -> dict[str, float]:
    """Seconds of a sync of one rank and one engine, part by part, and of a plain copy through the store's files."""
    os.environ.update(engine_environment(has_gpu=False))
    plan = _whole(tensors, engine_host=0)
    found: dict[str, list[float]] = {}

    def timed(name: str, start: float) -> None:
        found.setdefault(name, []).append(perf_counter() - start)

    async def measure(store: WeightStore) -> None:
        engine = Engine()
        settings = RolloutConfig(max_num_seqs=8, kv_cache_gib=0.1)
        await engine.start(checkpoint, settings, "bfloat16", max_model_len=64, seed=0, store_folder=store.folder)
        server: Any = engine._server
        for version in range(1, NUM_WARMUPS + NUM_REPEATS + 1):
            start = perf_counter()
            _publish(store, version, tensors, plan)
            await engine.load_weights(version)
            timed("sync", start)
            start = perf_counter()
            await server.load(store.folder, version)
            timed("reload", start)
            store.discard_before(version)
            start = perf_counter()
            _copy(store.folder / "spare.safetensors", tensors)
            timed("copy", start)
        await engine.shutdown()

    with closing(WeightStore.create()) as store:
        asyncio.run(measure(store))
    return {name: float(np.median(values[NUM_WARMUPS:])) for name, values in found.items()}


def _copy(file: Path, tensors: dict[str, torch.Tensor]) -> None:
    """The same bytes into a file of shared memory that has its pages already."""
    if not file.exists():
        return
    with file.open("r+b") as opened:
        for tensor in tensors.values():
            opened.write(tensor.view(-1).view(torch.uint8).numpy().data)


def main() -> None:
    names = sys.argv[1:] or list(MODELS)
    rows, ratios, figures = [], {}, {}
    disable_progress_bar()
    with tempfile.TemporaryDirectory() as temporary:
        for name in names:
            folder = Path(temporary) / name
            folder.mkdir()
            create_checkpoint(folder / "checkpoint", MODELS[name], ["a", "b"], seed=0)
            tensors = {n: t.bfloat16() for n, t in load_file(folder / "checkpoint" / "model.safetensors").items()}
            size = sum(tensor.nbytes for tensor in tensors.values())
            with closing(WeightStore.create()) as store:
                mp.spawn(_trainers, args=(folder, folder / "checkpoint", store.folder), nprocs=NUM_RANKS)
            results = json.loads((folder / "results.json").read_text())
            for task, (seconds, peak) in results.items():
                rows.append((name, task, seconds, size / 2**20, round(peak / 2**20, 1)))
            ours = results["store, every rank its slices"]
            for task, key in (("gather on rank 0, broadcast", "gather"), ("mbridge export_weights", "mbridge")):
                ratios[f"time_{name}_to_{key}"] = round(ours[0] / results[task][0], 3)
                ratios[f"peak_bytes_{name}_to_{key}"] = round(ours[1] / results[task][1], 3)
            for task, (seconds, num_bytes) in _relayed(tensors).items():
                rows.append((name, task, seconds, num_bytes / 2**20, ""))
                ratios[f"bytes_{name}_{task.split(', ')[1].replace(' ', '_')}"] = round(num_bytes / size, 4)
            parts = _engine_side(folder / "checkpoint", tensors)
            for part, seconds in parts.items():
                rows.append((name, f"one engine, {part}", seconds, size / 2**20, ""))
                figures[f"engine_{part}_{name}_s"] = round(seconds, 3)
            ratios[f"sync_{name}_to_1.5_copies_and_reload"] = round(
                parts["sync"] / (1.5 * parts["copy"] + parts["reload"]), 3
            )
    report("weight_sync", ("model", "task", "seconds", "MiB", "peak MiB a rank"), rows, ratios=ratios, figures=figures)
    on_paper()


if __name__ == "__main__":
    main()
