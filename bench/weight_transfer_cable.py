"""Weight transfers between two hosts whose cable is cut at each third of the transfer, for a while and for good.

sudo python -m bench.weight_transfer_cable

Hosts are network namespaces with a cable of GBIT_S; weight_sync.stall_timeout_s is STALL_S and rollout.start_timeout_s
LIMIT_S. Both hosts have version 1, and version 2 is transferred whole. Seconds are those after the cut until both
processes have ended.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from time import perf_counter, sleep

import torch
from torch._C._distributed_c10d import FileStore

from bench.network_hosts import CABLE, NetworkHost, host_address, network_hosts
from bench.report import option_parser, report
from bench.weight_transfer_between_hosts import MODEL
from megatron_bapo.cluster.host_connections import HostConnections
from megatron_bapo.config.schema import ParallelConfig
from megatron_bapo.errors import RunError
from megatron_bapo.model.weight_layouts import EngineLayout, Placement, weight_plan
from megatron_bapo.parallel.platform import host_group
from megatron_bapo.weight_sync.host_chain import Chain, receive, send
from megatron_bapo.weight_sync.transport import WeightStore
from megatron_bapo.weight_sync.version_file import view_of

SMALL = replace(MODEL, num_hidden_layers=2, vocab_size=16384)
PLAN = weight_plan(
    SMALL,
    ParallelConfig(world_size=1),
    EngineLayout(),
    Placement((0,), ((1,),)),
    dtype="bfloat16",
    bucket_bytes=4 << 20,
)
GBIT_S, STALL_S, PAUSE_S, LIMIT_S = 0.2, 15.0, 5.0, 900.0
FAILED, ENDED = 3, 1


COLUMNS = ("cable is cut", "at", "seconds until both ended", "sender", "receiver", "receiver's version")


def main() -> None:
    wire_s = PLAN.total_bytes * 8 / (GBIT_S * 1e9)
    undisturbed_s, *said = _case(None, 0.0)
    rows = [("never", "", undisturbed_s, *said)]
    ratios, figures = {}, {"undisturbed_s": undisturbed_s}
    for pause_s in (PAUSE_S, None):
        length = "for good" if pause_s is None else f"for {pause_s:g} s"
        for third in (1, 2, 3):
            seconds, *said = _case(pause_s, wire_s * (third - 0.5) / 3, is_cut=True)
            rows.append((length, f"third {third}", seconds, *said))
            figures[f"cut {length} in third {third}, s"] = seconds
            if pause_s is None:
                ratios[f"given up after cut in third {third} to stall_timeout_s"] = seconds / STALL_S
    report("weight_transfer_cable", COLUMNS, rows, ratios=ratios, figures=figures)


def _case(pause_s: float | None, after_s: float, *, is_cut: bool = False) -> tuple[float, str, str, str]:
    """Transfer version 2 and cut the cable `after_s` after its start; return seconds, both ends and the version."""
    with network_hosts(2, GBIT_S) as hosts, tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        processes = [
            subprocess.Popen(host.command(sys.executable, "-m", __spec__.name, "--host", str(index), name))
            for index, host in enumerate(hosts)
        ]
        while not (folder / "started").exists():
            sleep(0.01)
        start = perf_counter()
        if is_cut:
            sleep(after_s)
            start = perf_counter()
            _set_cable(hosts[0], "down")
            if pause_s is not None:
                sleep(pause_s)
                _set_cable(hosts[0], "up")
        codes = [process.wait(timeout=120) for process in processes]
        seconds = perf_counter() - start
        store = WeightStore(folder / "1")
        newest = store.versions()[-1]
        store.verify(newest)
        names = {0: "done", FAILED: "RunError", ENDED: "ended"}
        sender, receiver = (names.get(code, f"exit code {code}") for code in codes)
        return round(seconds, 1), sender, receiver, f"{newest}, verified"


def _set_cable(host: NetworkHost, state: str) -> None:
    subprocess.run(["ip", "-n", host.name, "link", "set", CABLE, state], check=True, timeout=30)


def _publish(store: WeightStore, version: int) -> None:
    tensors = {name: torch.full(shape, float(version)).bfloat16() for name, shape in PLAN.shapes.items()}
    store.write(version, PLAN, 0, lambda part: view_of(tensors[part.name], part.box))
    store.commit(version, PLAN)


def host_main(index: int, folder: Path) -> None:
    torch.set_num_threads(1)
    store = WeightStore(folder / str(index))
    store.folder.mkdir(mode=0o700)
    rendezvous = FileStore(str(folder / "rendezvous"), 2)
    connections = HostConnections()
    with connections.opening(STALL_S):
        group = host_group(rendezvous, index, 2, host_address(index), LIMIT_S)
    chain = Chain(group, {0: 0, 1: 1}, (1,))
    for version in (1, 2):
        if index == 0:
            _publish(store, version)
        group.barrier().wait()
        if version == 2 and index == 0:
            (folder / "started").touch()
        try:
            with connections.needed():
                send(store, version, 0, chain) if index == 0 else receive(store, version, PLAN, 1, chain)
        except RunError as error:
            print(f"host {index}: {error}", file=sys.stderr, flush=True)
            os._exit(FAILED)


if __name__ == "__main__":
    parser = option_parser(__doc__)
    parser.add_argument("--host", nargs=2, metavar=("INDEX", "FOLDER"), help=argparse.SUPPRESS)
    if host := parser.parse_args().host:
        host_main(int(host[0]), Path(host[1]))
    else:
        main()
