"""Weight transfers between the stores of hosts against a plain send and receive of the same bytes by gloo.

sudo python -m bench.weight_transfer_between_hosts

Hosts are network namespaces on this machine. The first has the trainer's store with a random model of 480M parameters
in bfloat16, and the others receive it. One pair of hosts has a cable without a limit, where processors are the limit.
With more hosts they would be, too, which is not so in a cluster; those cables are therefore limited to GBIT_S. Seconds
are medians until the last host is done; those of the write to the trainer's store are of one core. Changed elements are
chosen at random. Between two updates receivers prepare for differences, as they do while engines generate. Peak memory
is the largest increase of any host's own memory, without the stores themselves.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from time import perf_counter, process_time
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore

from bench.network_hosts import CABLE, host_address, network_hosts
from bench.report import option_parser, report
from bench.resident_bytes import peak_resident_bytes
from megatron_bapo.config.architecture import FAMILIES, Architecture
from megatron_bapo.config.schema import ParallelConfig
from megatron_bapo.model.weight_layouts import EngineLayout, Placement, weight_plan
from megatron_bapo.parallel.platform import host_group
from megatron_bapo.weight_sync import host_chain
from megatron_bapo.weight_sync.host_chain import Chain, receive, send
from megatron_bapo.weight_sync.plan import WeightPlan
from megatron_bapo.weight_sync.transport import WeightStore
from megatron_bapo.weight_sync.version_file import view_of

MODEL = Architecture(
    family=FAMILIES["qwen3"], num_hidden_layers=26, hidden_size=1024, intermediate_size=3072, num_attention_heads=16,
    num_key_value_heads=8, head_dim=64, vocab_size=151936, max_position_embeddings=32768, rms_norm_eps=1e-6,
    rope_theta=1e6, tie_word_embeddings=True,
)  # fmt: skip
SMALL_MODEL = replace(MODEL, num_hidden_layers=6, vocab_size=32768)
"""A sixth of `MODEL`, for --short."""
BUCKET_BYTES = 64 << 20
GBIT_S = 2.0
NUM_REPEATS, NUM_WARMUPS = 5, 2
CHANGED_SHARE = 0.01
PLAIN_TAG = 2**30
WRITE = "write to the trainer's store"


@dataclass(frozen=True)
class Measured:
    """Medians over the repeats of one task."""

    seconds: float
    sent_bytes: float
    """Bytes that left the first host's cable."""
    peak_bytes: int
    """Largest increase of the memory of a host's process."""


def main() -> None:
    parser = option_parser(__doc__)
    parser.add_argument("--short", action="store_true", help="a sixth of the model, in two minutes")
    parser.add_argument("--host", nargs=3, metavar=("INDEX", "HOSTS", "FOLDER"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    model = SMALL_MODEL if arguments.short else MODEL
    if arguments.host:
        index, num_hosts, folder = arguments.host
        host_main(int(index), _plan(model, int(num_hosts)), int(num_hosts), Path(folder))
    else:
        measure_hosts(model, ["--short"] if arguments.short else [])


def measure_hosts(model: Architecture, options: list[str]) -> None:
    """Measure all tasks on two and on five hosts, whose processes get `options`, and print the report."""
    rows, figures = [], {}
    for num_hosts, gbit_s in ((2, None), (2, GBIT_S), (5, GBIT_S)):
        found = _measured_on(num_hosts, gbit_s, options)
        figures[(num_hosts, gbit_s)] = found
        network = "not limited" if gbit_s is None else f"{gbit_s:g} Gbit/s"
        rows += [
            (f"1 to {num_hosts - 1}", network, task, one.seconds, one.sent_bytes / 2**20, one.peak_bytes / 2**20)
            for task, one in found.items()
        ]
    pair, slow_pair, five = figures[2, None], figures[2, GBIT_S], figures[5, GBIT_S]
    model_bytes = _plan(model, 2).total_bytes
    changed = f"{CHANGED_SHARE:.0%} changed"
    ratios = {
        "time_full_to_plain_gloo": pair["full"].seconds / pair["plain gloo"].seconds,
        "time_full_to_plain_gloo_limited_network": slow_pair["full"].seconds / slow_pair["plain gloo"].seconds,
        "time_4_hosts_to_1": five["full"].seconds / slow_pair["full"].seconds,
        "sent_bytes_4_hosts_to_model": five["full"].sent_bytes / model_bytes,
        "time_with_checksums_to_without": pair["full"].seconds / pair["full, no checksums"].seconds,
        "bytes_1_percent_changed_to_full": pair[changed].sent_bytes / pair["full"].sent_bytes,
        "time_1_percent_changed_to_full": pair[changed].seconds / pair["full"].seconds,
        "time_1_percent_changed_to_full_limited_network": slow_pair[changed].seconds / slow_pair["full"].seconds,
        "peak_bytes_to_two_buckets": max(one.peak_bytes for found in figures.values() for one in found.values())
        / (2 * BUCKET_BYTES),
    }
    speeds = {
        "gb_s_plain_gloo": model_bytes / pair["plain gloo"].seconds / 1e9,
        "gb_s_full": model_bytes / pair["full"].seconds / 1e9,
        "gb_per_core_s_write": model_bytes / pair[WRITE].seconds / 1e9,
        "network_efficiency": slow_pair["plain gloo"].seconds / slow_pair["full"].seconds,
    }
    report(
        "weight_transfer_between_hosts",
        ("hosts", "network", "task", "seconds", "MiB sent by host 0", "peak MiB"),
        rows,
        ratios={name: round(value, 3) for name, value in ratios.items()},
        figures={name: round(value, 3) for name, value in speeds.items()},
    )


def _measured_on(num_hosts: int, gbit_s: float | None, options: list[str]) -> dict[str, Measured]:
    """Run a process on each of `num_hosts` hosts; return what the first one measured, by task."""
    with network_hosts(num_hosts, gbit_s) as hosts, tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", __spec__.name, *options, "--host"]
        processes = [
            subprocess.Popen(host.command(*command, str(index), str(num_hosts), folder))
            for index, host in enumerate(hosts)
        ]
        for process in processes:
            if process.wait(timeout=1200) != 0:
                raise SystemExit(f"a host's process ended with {process.returncode}; its error is above")
        content = json.loads((Path(folder) / "results.json").read_text())
    return {task: Measured(**values) for task, values in content.items()}


def _plan(model: Architecture, num_hosts: int) -> WeightPlan:
    """Return the plan of one trainer rank on host 0 and an engine on each of the other hosts."""
    placement = Placement((0,), (tuple(range(1, num_hosts)),))
    return weight_plan(
        model, ParallelConfig(world_size=1), EngineLayout(), placement, dtype="bfloat16", bucket_bytes=BUCKET_BYTES
    )


class HostProcess:
    """One host's part in the measurements; all hosts call the same methods in the same order."""

    def __init__(self, index: int, plan: WeightPlan, num_hosts: int, folder: Path, store: WeightStore) -> None:
        self.index, self._store, self._plan = index, store, plan
        rendezvous, address = FileStore(str(folder / "rendezvous"), num_hosts), host_address(index)
        self._group = host_group(rendezvous, index, num_hosts, address, timeout_s=600.0)
        self._chain = Chain(self._group, {host: host for host in range(num_hosts)}, tuple(range(1, num_hosts)))
        generator, shapes = torch.Generator().manual_seed(0), self._plan.shapes if index == 0 else {}
        self._tensors = {name: torch.randn(shape, generator=generator).bfloat16() for name, shape in shapes.items()}
        # The same bytes as the store's: memory that was never written would be one page, which stays in the cache.
        self._flat = torch.ones(self._plan.total_bytes if index == 1 else 0, dtype=torch.uint8)
        if index == 0:
            self._flat = torch.cat([tensor.view(-1).view(torch.uint8) for tensor in self._tensors.values()])
        self._version, self._write_s = 0, list[float]()

    def measure(self) -> dict[str, Measured]:
        """Measure all tasks and return the results by name."""
        tasks = {
            "plain gloo": self._plain,
            "full": self._full,
            "full, no checksums": self._full_unverified,
            f"{CHANGED_SHARE:.0%} changed": self._differences,
        }
        runs: dict[str, list[tuple[float, int]]] = {name: [] for name in tasks}
        peaks: dict[str, int] = {}
        for repeat in range(NUM_WARMUPS + NUM_REPEATS):
            for name, task in tasks.items():
                self._publish()
                run = self._timed(task)
                if repeat >= NUM_WARMUPS:
                    runs[name].append(run)
        for name, task in tasks.items():
            self._publish()
            peak = torch.tensor([peak_resident_bytes(task)])
            self._group.allreduce([peak], dist.ReduceOp.MAX).wait()
            peaks[name] = int(peak)
        return {
            name: Measured(median(each[0] for each in runs[name]), median(each[1] for each in runs[name]), peaks[name])
            for name in tasks
        } | {WRITE: Measured(median(self._write_s[NUM_WARMUPS:] or [0.0]), 0.0, 0)}

    def _publish(self) -> None:
        """Change a share of the elements and commit the next version in the trainer's store."""
        self._version += 1
        self._store.discard_before(self._version - 1)
        if self.index > 0 and (versions := self._store.versions()):
            self._store.prepare(versions[-1])
        if self.index == 0:
            for tensor in self._tensors.values():
                elements = tensor.view(-1).view(torch.int16)
                elements[torch.randint(len(elements), (round(CHANGED_SHARE * len(elements)),))] ^= 1
            start = process_time()
            self._store.write(self._version, self._plan, 0, lambda part: view_of(self._tensors[part.name], part.box))
            self._write_s.append(process_time() - start)
            self._store.commit(self._version, self._plan)

    def _timed(self, task: Callable[[], object]) -> tuple[float, int]:
        """Return the seconds until the last host is done, and the bytes that left this host."""
        self._group.barrier().wait()
        sent, start = _sent_bytes(), perf_counter()
        task()
        self._group.barrier().wait()
        return perf_counter() - start, _sent_bytes() - sent

    def _plain(self) -> None:
        """Send the model's bytes from the first host to the second."""
        if self.index == 0:
            self._group.send([self._flat], 1, PLAIN_TAG).wait()
        elif self.index == 1:
            self._group.recv([self._flat], 0, PLAIN_TAG).wait()

    def _full(self, base: int | None = None) -> None:
        if self.index == 0:
            send(self._store, self._version, 0, self._chain, base)
        else:
            receive(self._store, self._version, self._plan, self.index, self._chain, base)

    def _full_unverified(self) -> None:
        with (
            patch.object(host_chain, "xxh3_128", NoHasher),
            patch.object(host_chain._Incoming, "_verified", _unverified),
        ):
            self._full()

    def _differences(self) -> None:
        self._full(self._version - 1)


class NoHasher:
    def update(self, data: object) -> None:
        pass


def _unverified(_incoming: object, _number: int, expected: str, _hasher: NoHasher, complete: Callable[[], None]) -> str:
    complete()
    return expected


def host_main(index: int, plan: WeightPlan, num_hosts: int, folder: Path) -> None:
    torch.set_num_threads(1)
    with closing(WeightStore.create()) as store:
        process = HostProcess(index, plan, num_hosts, folder, store)
        measured = process.measure()
    if index == 0:
        content = {name: asdict(one) for name, one in measured.items()}
        (folder / "results.json").write_text(json.dumps(content))


def _sent_bytes() -> int:
    """Return the bytes that this host's cable has sent."""
    for line in Path("/proc/self/net/dev").read_text().splitlines():
        device, _, counters = line.partition(":")
        if device.strip() == CABLE:
            return int(counters.split()[8])
    raise AssertionError(f"this host has no {CABLE}")


if __name__ == "__main__":
    main()
