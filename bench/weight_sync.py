"""Weight syncs through the store against gathering on a rank and broadcasting, and against mbridge's export.

python -m bench.weight_sync [--sizes 20M], with the packages of requirements-bench.txt on the path

Two gloo ranks (TP 2) have a random Qwen3 in bfloat16; vLLM engines of one and two ranks load it. Seconds are medians
until the last rank is done. Bytes are the model's or those that an engine's ranks read. Peak bytes are the largest
increase of a rank's own memory. bench.weight_transfer_between_hosts measures the network, and
bench.weight_sync_on_paper computes the time of published models on clusters of 8-GPU hosts.
"""

from __future__ import annotations

import asyncio
import json
import os
import tempfile
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager, closing
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch.multiprocessing.spawn import spawn
from transformers.utils.logging import disable_progress_bar

from bench.hf_io import local_names_bridge
from bench.report import medians_s, option_parser, report
from bench.resident_bytes import peak_resident_bytes
from megatron_bapo.config.architecture import read_architecture
from megatron_bapo.config.model import CreateModelConfig
from megatron_bapo.config.rollout import RolloutConfig
from megatron_bapo.config.schema import Config, ParallelConfig
from megatron_bapo.model.build import build_policy
from megatron_bapo.model.hf_create import create_checkpoint
from megatron_bapo.model.hf_export import own_shapes, stream_tensors
from megatron_bapo.model.hf_import import load_hugging_face
from megatron_bapo.model.weight_layouts import EngineLayout, Placement, one_host, weight_plan
from megatron_bapo.model.weight_slices import LocalSlices
from megatron_bapo.parallel.collectives import gather_objects
from megatron_bapo.parallel.groups import create_groups
from megatron_bapo.rollout.engine import Engine, engine_environment
from megatron_bapo.rollout.engine_spec import EngineSpec
from megatron_bapo.weight_sync.plan import WeightPlan
from megatron_bapo.weight_sync.route import WeightRoute
from megatron_bapo.weight_sync.transport import SPARE, WeightStore
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
BUCKET_BYTES = 64 << 20
NUM_RANKS, NUM_REPEATS, NUM_ENGINE_REPEATS, NUM_WARMUPS = 2, 3, 7, 3
"""The first files of a store are slower, because the system has to allocate shared memory."""
Figures = dict[str, list[float]]


def _trainers(rank: int, folder: Path, checkpoint: Path, store_folder: Path) -> None:
    """Run one rank of the trainer's measurements; rank 0 writes them to `results.json`."""
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
    model = build_policy(config, read_architecture(checkpoint), groups)
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

    shapes_by_rank = gather_objects(own_shapes(model, groups), groups.tensor)

    def gather_and_broadcast() -> None:
        gathered = {name: tensor.clone() for name, tensor in stream_tensors(model, groups)}
        for owner, shapes in enumerate(shapes_by_rank):
            for name, shape in shapes.items():
                dist.broadcast(gathered[name] if rank == owner else torch.empty(shape, dtype=torch.bfloat16), src=owner)

    def export_with_mbridge() -> None:
        for _ in bridge.export_weights([chunk.gpt for chunk in model.chunks]):
            pass

    tasks: dict[str, Callable[[], object]] = {
        "store, each rank writes its slices": sync,
        "gather on a rank, broadcast": gather_and_broadcast,
        "mbridge export_weights": torch.no_grad()(export_with_mbridge),
    }
    together = {name: partial(_until_all_are_done, task) for name, task in tasks.items()}
    seconds = medians_s(together, num_repeats=NUM_REPEATS, num_warmups=NUM_WARMUPS)
    results = {}
    for name, task in tasks.items():
        peak = torch.tensor(peak_resident_bytes(task))
        dist.all_reduce(peak, dist.ReduceOp.MAX)
        results[name] = (seconds[name], plan.total_bytes, int(peak))
    if rank == 0:
        (folder / "results.json").write_text(json.dumps(results))
    dist.destroy_process_group()


def _until_all_are_done(task: Callable[[], object]) -> None:
    task()
    dist.barrier()


def _plan(checkpoint: Path, engine: EngineLayout, place: Callable[..., Placement]) -> WeightPlan:
    """Return the plan of one trainer rank."""
    parallel, architecture = ParallelConfig(world_size=1), read_architecture(checkpoint)
    placement = place(parallel, engine)
    return weight_plan(architecture, parallel, engine, placement, dtype="bfloat16", bucket_bytes=BUCKET_BYTES)


def _publish(store: WeightStore, version: int, tensors: dict[str, torch.Tensor], plan: WeightPlan) -> None:
    store.write(version, plan, 0, lambda part: view_of(tensors[part.name], part.box))
    store.commit(version, plan)


async def _one_rank(checkpoint: Path, tensors: dict[str, torch.Tensor], store: WeightStore) -> Figures:
    """Return the seconds of a sync of one trainer rank and one engine, of the engine's part, and of a plain copy."""
    plan, found = _plan(checkpoint, EngineLayout(), one_host), {"sync": [], "reload": [], "copy": []}
    async with _engine(checkpoint, 1, store) as engine:
        for version in range(1, NUM_WARMUPS + NUM_ENGINE_REPEATS + 1):
            start = perf_counter()
            _publish(store, version, tensors, plan)
            await engine.load_weights(version)
            found["sync"].append(perf_counter() - start)
            start = perf_counter()
            await engine._server.load(version)
            found["reload"].append(perf_counter() - start)
            store.discard_before(version)
            start = perf_counter()
            _copy(store.folder / SPARE, tensors)
            found["copy"].append(perf_counter() - start)
    return {name: values[NUM_WARMUPS:] for name, values in found.items()}


async def _two_ranks(checkpoint: Path, tensors: dict[str, torch.Tensor], store: WeightStore) -> Figures:
    """Return the seconds in which an engine of two ranks loads a version, and the bytes that its ranks read."""
    layouts = {"its slices": EngineLayout(2), "whole": EngineLayout()}
    plans = {name: _plan(checkpoint, layout, one_host) for name, layout in layouts.items()}
    found: Figures = {f"{name}, {unit}": [] for name in plans for unit in ("seconds", "bytes")}
    async with _engine(checkpoint, 2, store) as engine:
        versions = count(1)
        for _ in range(NUM_WARMUPS + NUM_ENGINE_REPEATS):
            for name, plan in plans.items():
                _publish(store, version := next(versions), tensors, plan)
                start = perf_counter()
                num_bytes = await engine.load_weights(version)
                found[f"{name}, seconds"].append(perf_counter() - start)
                found[f"{name}, bytes"].append(num_bytes)
                store.discard_before(version)
    return {name: values[NUM_WARMUPS:] for name, values in found.items()}


@asynccontextmanager
async def _engine(checkpoint: Path, num_ranks: int, store: WeightStore) -> AsyncIterator[Any]:
    engine = Engine()
    settings = RolloutConfig(tensor_parallel_size=num_ranks, max_num_seqs=8, kv_cache_gib=0.1)
    await engine.start(EngineSpec(checkpoint, settings, "bfloat16", max_model_len=64), WeightRoute(store.folder))
    try:
        yield engine
    finally:
        await engine.shutdown()


def _copy(file: Path, tensors: dict[str, torch.Tensor]) -> None:
    """Copy the tensors into a file of shared memory whose pages are allocated."""
    if not file.exists():  # it exists only after the first version
        return
    with file.open("r+b") as opened:
        for tensor in tensors.values():
            opened.write(tensor.view(-1).view(torch.uint8).numpy().data)


@dataclass
class Results:
    rows: list[tuple[object, ...]] = field(default_factory=list)
    ratios: dict[str, float] = field(default_factory=dict)
    figures: dict[str, float] = field(default_factory=dict)


def _trainers_part(name: str, folder: Path, checkpoint: Path, results: Results) -> None:
    with closing(WeightStore.create()) as store:
        spawn(_trainers, args=(folder, checkpoint, store.folder), nprocs=NUM_RANKS)
    found = json.loads((folder / "results.json").read_text())
    for task, (seconds, num_bytes, peak) in found.items():
        results.rows.append((name, task, seconds, num_bytes / 2**20, round(peak / 2**20, 1)))
    ours = found["store, each rank writes its slices"]
    for task, key in (("gather on a rank, broadcast", "gather"), ("mbridge export_weights", "mbridge")):
        results.ratios[f"time_{name}_to_{key}"] = round(ours[0] / found[task][0], 3)
        results.ratios[f"peak_bytes_{name}_to_{key}"] = round(ours[2] / found[task][2], 3)


def _engines_part(name: str, checkpoint: Path, tensors: dict[str, torch.Tensor], results: Results) -> None:
    size = sum(tensor.nbytes for tensor in tensors.values())
    with closing(WeightStore.create()) as store:
        one = asyncio.run(_one_rank(checkpoint, tensors, store))
    for part, seconds in one.items():
        results.rows.append((name, f"engine of one rank, {part}", median(seconds), size / 2**20, ""))
        results.figures[f"engine_{part}_{name}_s"] = round(median(seconds), 3)
    repeats = list(zip(one["sync"], one["copy"], one["reload"], strict=True))
    with closing(WeightStore.create()) as store:
        two = asyncio.run(_two_ranks(checkpoint, tensors, store))
    direct_s, direct_bytes, whole_s, whole_bytes = map(median, two.values())
    results.rows += [
        (name, "engine of two ranks, its slices", direct_s, direct_bytes / 2**20, ""),
        (name, "engine of two ranks, whole tensors", whole_s, whole_bytes / 2**20, ""),
    ]
    results.ratios |= {
        f"sync_{name}_to_copy_and_reload": round(median(s / (c + r) for s, c, r in repeats), 3),
        f"sync_{name}_to_1.5_copies_and_reload": round(median(s / (1.5 * c + r) for s, c, r in repeats), 3),
        f"time_{name}_direct_to_whole": round(direct_s / whole_s, 3),
        f"bytes_{name}_direct_to_whole": round(direct_bytes / whole_bytes, 3),
    }


def main(names: Iterable[str]) -> None:
    results = Results()
    disable_progress_bar()
    os.environ.update(engine_environment())
    with tempfile.TemporaryDirectory() as temporary:
        for name in names:
            folder = Path(temporary) / name
            checkpoint = folder / "checkpoint"
            folder.mkdir()
            create_checkpoint(checkpoint, MODELS[name], ["a", "b"], seed=0)
            _trainers_part(name, folder, checkpoint, results)
            tensors = {n: t.bfloat16() for n, t in load_file(checkpoint / "model.safetensors").items()}
            _engines_part(name, checkpoint, tensors, results)
    columns = ("model", "task", "seconds", "MiB", "peak MiB per rank")
    report("weight_sync", columns, results.rows, ratios=results.ratios, figures=results.figures)


if __name__ == "__main__":
    parser = option_parser(__doc__)
    parser.add_argument("--sizes", nargs="+", choices=MODELS, default=MODELS, help="parameters (default: all)")
    main(parser.parse_args().sizes)
