"""Entry point of a trainer rank; torchrun starts it as built by cluster/trainer_process.py."""

from __future__ import annotations

import argparse
import os
import sys
import traceback
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from megatron_bapo.cluster.interrupts import end_with_parent
from megatron_bapo.garbage_collection import collector_paused

if __name__ == "__main__":
    end_with_parent()  # before the imports: torchrun may be killed in the seconds that they take

with collector_paused():
    import torch._dynamo  # noqa: F401  (torch's optimizers import it when they are made)

    from megatron_bapo.cluster.ray_cluster import connect
    from megatron_bapo.config.loading import load_config
    from megatron_bapo.config.schema import Config
    from megatron_bapo.controller.colocation import ColocationManager
    from megatron_bapo.controller.provenance import record_start
    from megatron_bapo.controller.recorded_rollouts import RecordedRollouts
    from megatron_bapo.controller.recorder import Recorder
    from megatron_bapo.controller.rollout_client import RolloutClient
    from megatron_bapo.controller.rollout_sampler import RolloutSampler
    from megatron_bapo.controller.run import Run
    from megatron_bapo.controller.run_state import RunState
    from megatron_bapo.controller.training_loop import train
    from megatron_bapo.parallel.collectives import broadcast_object, gather_by_rank, on_main
    from megatron_bapo.parallel.device_check import check_device
    from megatron_bapo.parallel.groups import create_groups
    from megatron_bapo.parallel.platform import device_name, set_host_threads, start_distributed
    from megatron_bapo.parallel.telemetry import start_telemetry
    from megatron_bapo.run_directory import RunDirectory
    from megatron_bapo.trainer.checkpoint import load_checkpoint
    from megatron_bapo.trainer.checkpoint_writer import CheckpointWriter
    from megatron_bapo.trainer.fused_paths import fused_paths
    from megatron_bapo.trainer.weight_publisher import TransferSites, weight_transport
    from megatron_bapo.trainer.worker import create_worker


@dataclass(frozen=True)
class RankArgs:
    """Command-line arguments of a trainer rank."""

    source: str | Path
    """Source of the rollouts: the Ray cluster's address, or a folder of rollout files."""
    store_folder: Path
    """Folder of this host's weight store."""
    address: str
    """Network address of this host."""
    host: int
    """Number of this host in the weight transfer plan."""
    engine_hosts: tuple[tuple[int, ...], ...]
    """For each of an engine's nodes, the numbers of the hosts at this position in all engines, in the weight transfer
    plan."""


def start_run(config: Config, args: RankArgs) -> Run:
    """Join the trainer's process group, build the policy, and resume from the newest checkpoint if there is one."""
    directory, source = RunDirectory(config.run_dir), args.source
    check_device()
    on_one_machine = os.environ["GROUP_WORLD_SIZE"] == "1"  # torchrun's number of nodes
    store_file = args.store_folder / "ranks" if on_one_machine else None
    start_distributed(config.trainer.collective_timeout_s, store_file)
    set_host_threads(cpu_offload=config.optimizer.cpu_offload)
    groups = create_groups(config.parallel, config.seed, config.trainer.collective_timeout_s)
    sender_hosts = gather_by_rank(args.host, groups)
    client = None
    if groups.is_main and isinstance(source, str):
        connect(source, namespace=str(config.run_dir), node_address=args.address)
        client = RolloutClient(config, sender_hosts, args.engine_hosts)
    colocation = ColocationManager(config, groups, client)
    worker = create_worker(config, config.model_path, groups)
    if groups.is_main:
        paths = fused_paths(worker.model, worker.optimizer, fused_kernels=worker.fused_kernels)
        record_start(directory, device_name(), config.parallel.world_size)
        print("fused paths:", ", ".join(f"{operation} by {path}" for operation, path in paths.items()), flush=True)
    saved = broadcast_object(directory.newest_checkpoint, groups)
    state = RunState() if saved is None else RunState.from_json(load_checkpoint(worker, saved))
    rollouts = client
    if groups.is_main and isinstance(source, Path):
        rollouts = RecordedRollouts(config, source, state.step)
    if saved is not None:
        on_main(rollouts and partial(rollouts.restore_data_state, state.data, saved), groups)
    recorder = Recorder(config, directory, state) if groups.is_main else None
    transport = None
    if isinstance(source, str):
        hosts = sender_hosts, args.engine_hosts
        transport = weight_transport(
            worker, TransferSites(args.store_folder, *hosts, args.address, rendezvous=f"ray://{source}")
        )
    sampler = RolloutSampler(config, directory.sampled_rollouts, groups, recorder and recorder.add_sampled)
    writer = CheckpointWriter(worker, directory.checkpoints, rollouts)
    parts = config, directory, worker, transport, colocation, state, rollouts, recorder, sampler, writer
    return Run(*parts, start_telemetry())


def _numbers(comma_separated: str) -> tuple[int, ...]:
    return tuple(map(int, comma_separated.split(",")))


def main() -> int:
    parser = argparse.ArgumentParser(description="One trainer rank, under torchrun.")
    parser.add_argument("run_dir", type=Path)
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--ray", help="address of the run's Ray cluster")
    source.add_argument("--rollouts-from", type=Path, help="folder of rollouts to train on")
    parser.add_argument("--store", required=True, type=Path, help="folder of this host's weight store")
    parser.add_argument("--address", required=True, help="network address of this host")
    parser.add_argument("--host", required=True, type=int, help="this host's number in the weight transfer plan")
    parser.add_argument(
        "--engine-hosts", required=True, type=_numbers, nargs="*", help="numbers of the hosts of an engine's nodes"
    )
    parsed = parser.parse_args()
    directory = RunDirectory(parsed.run_dir)
    run = None
    try:
        config = load_config(directory.config, [])
        source = parsed.ray or parsed.rollouts_from
        args = RankArgs(source, parsed.store, parsed.address, parsed.host, tuple(parsed.engine_hosts))
        run = start_run(config, args)
        train(run)
    except Exception as error:  # process boundary: the launcher shows the message of the first rank that failed
        directory.record_failure(error)
        with suppress(OSError):  # the log may be on a full disk
            traceback.print_exc()
        return 1
    finally:
        if run is not None:
            for part in (run.checkpoints, run.telemetry, run.sampler, run.recorder):
                if part is not None:
                    part.close()
    return 0


if __name__ == "__main__":
    code = main()
    # The parts are closed. At a normal exit Ray destroys what its own thread may still use (ray-project/ray#18899); a
    # rank that had saved its state was killed by SIGSEGV there.
    with suppress(OSError):  # the log may be on a full disk
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)
