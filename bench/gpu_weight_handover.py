"""Weight transfer from a trainer to an engine on the same GPU by CUDA IPC, against plain copies on the GPU.

The trainer offers tensors of Qwen2.5-3B's shape; another process opens them and copies each one into its own memory, as
a colocated engine does. Bytes count as read and as written, as for a copy. Checksums are not included, because an
engine verifies them separately.
"""

from __future__ import annotations

import multiprocessing
import tempfile
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import torch

from bench.gpu import copy_bytes_per_s, report_and_save, require_gpu, seconds_of
from bench.report import option_parser
from megatron_bapo.config.architecture import read_architecture
from megatron_bapo.config.schema import ParallelConfig
from megatron_bapo.model.weight_layouts import EngineLayout, many_hosts, weight_plan
from megatron_bapo.parallel.platform import local_device, open_storage, share_storage
from megatron_bapo.planning.known_models import FOLDER
from megatron_bapo.weight_sync.plan import Slice, WeightPlan
from megatron_bapo.weight_sync.shared_parameters import SharedParameters, offer_parameters
from megatron_bapo.weight_sync.version_file import view_of

MODEL = "Qwen2.5-3B"
BUCKET_BYTES = 256 << 20
TIMEOUT_S = 300
VERSION = 1


def make_plan(model: Path) -> WeightPlan:
    """Return the plan of one trainer rank and one engine rank on the same GPU."""
    parallel, engine = ParallelConfig(), EngineLayout()
    placement = many_hosts(parallel, engine, 1, 1, colocated=True)
    return weight_plan(
        read_architecture(model), parallel, engine, placement, dtype="bfloat16", bucket_bytes=BUCKET_BYTES
    )


def make_parameters(plan: WeightPlan) -> dict[str, torch.Tensor]:
    """Return the full parameters by name, on this process's device."""
    parts = [part for bucket in plan.buckets for part in bucket.slices]
    shapes: dict[str, tuple[int, ...]] = {}
    for part in parts:
        known = shapes.get(part.name, part.box.stop)
        shapes[part.name] = tuple(map(max, known, part.box.stop))
    return {name: torch.ones(s, dtype=torch.bfloat16, device=local_device()) for name, s in shapes.items()}


def receive(folder: Path) -> tuple[int, float]:
    """Run in the engine's process; return the bytes of the parameters and the seconds to copy all of them."""
    reader = SharedParameters(folder, 0, open_storage, local_device())
    own = {name: torch.empty_like(tensor) for name, tensor in reader.read(VERSION)}

    def take() -> None:
        for name, tensor in reader.read(VERSION):
            own[name].copy_(tensor)

    return sum(tensor.nbytes for tensor in own.values()), seconds_of({"take": take})["take"]


def measure(model: Path) -> tuple[int, float]:
    """Return the bytes of the parameters and the seconds of one transfer, without starting the processes."""
    plan = make_plan(model)
    parameters = make_parameters(plan)

    def read(part: Slice) -> torch.Tensor:
        return view_of(parameters[part.name], part.box)

    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder, ProcessPoolExecutor(1, mp_context=context) as engines:
        offer_parameters(Path(folder), VERSION, plan, 0, read, share_storage)
        return engines.submit(receive, Path(folder)).result(timeout=TIMEOUT_S)


def main() -> None:
    require_gpu()
    copied = copy_bytes_per_s()
    num_bytes, seconds = measure(FOLDER / MODEL)
    speed = 2 * num_bytes / seconds
    rows = [["copy", copied / 1e9, 1.0], [f"transfer of {num_bytes / 1e9:.1f} GB", speed / 1e9, speed / copied]]
    report_and_save(
        "gpu_weight_handover",
        ["what", "GB/s", "of a copy"],
        rows,
        ratios={"of_copy": round(speed / copied, 3)},
        figures={"copy_gb_s": round(copied / 1e9), "handover_gb_s": round(speed / 1e9), "seconds": seconds},
    )


if __name__ == "__main__":
    option_parser(__doc__).parse_args()
    main()
