"""Starts a run on one machine: Ray with the engines and the rollout service, and the trainer under torchrun.

The launcher trains nothing. It validates, starts both planes, shows what the trainer records, and makes sure that
nothing is left running, however the run ends.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console

from megatron_bapo.config.colocation_checks import check_devices
from megatron_bapo.config.loading import dump_config
from megatron_bapo.config.schema import Config, MismatchAlarmsConfig
from megatron_bapo.controller.cluster import ask, finished, local_cluster, place
from megatron_bapo.controller.engine_fleet import place_engine
from megatron_bapo.controller.exit_codes import INTERRUPTED
from megatron_bapo.controller.host_store import HOST_STORE, STORE_SERVER, HostStore
from megatron_bapo.controller.interrupts import Interrupts, end_with_parent
from megatron_bapo.controller.progress import ProgressDisplay
from megatron_bapo.controller.prompt_sets import TaskPrompts, load_task_prompts
from megatron_bapo.controller.recorded_rollouts import check_files
from megatron_bapo.controller.rollout_client import SERVICE
from megatron_bapo.controller.rollout_service import RolloutService
from megatron_bapo.controller.run_report import accuracies, write_run_report
from megatron_bapo.controller.run_state import RunDirectory, check_resumable
from megatron_bapo.errors import RunError, UserError
from megatron_bapo.logs import last_lines
from megatron_bapo.metrics.alarms import mismatch_alarms
from megatron_bapo.metrics.sinks import read_new_rows, read_rows, replace_text
from megatron_bapo.parallel.platform import compute_capability, has_transformer_engine, visible_devices
from megatron_bapo.rollout.tokenization import load_tokenizer, tokenize
from megatron_bapo.weight_sync.relay import StoreServer
from megatron_bapo.weight_sync.transport import WeightStore

POLL_S = 0.25
STOPPING = "stopping after the current step; Ctrl-C again ends at once"


def run_training(config: Config, rollouts_from: Path | None = None) -> int:
    """Run or continue `config.run_dir`; the exit code, 130 after an interruption that can be resumed.

    With `rollouts_from` that folder's files are trained on, and no engine is started.

    Raises UserError and RunError, each with a complete message.
    """
    console = Console()
    prompts = load_task_prompts(config)
    for note in prompts.notes:
        console.print(note)
    directory = RunDirectory(config.run_dir)
    directory.create()
    with directory.locked():
        prepare(config, directory, prompts, engines=rollouts_from is None)
        if rollouts_from is not None:
            _check_rollouts(config, directory, rollouts_from)
            console.print("Without engines held-out prompts are not evaluated.")
        warm_start_steps = config.warm_start.num_steps if config.warm_start else 0
        display = ProgressDisplay(config.trainer.total_steps, num_warm_start_steps=warm_start_steps, console=console)
        with Interrupts() as interrupts, display:
            _run_planes(config, directory, display, interrupts, rollouts_from)
        report = write_run_report(directory.root)
        if directory.stop_request.exists():
            resume = _resume_command(directory, rollouts_from)
            message = f"Stopped; the state is saved. Continue with the same command, or: {resume}"
            console.print(message, soft_wrap=True, highlight=False)
            return INTERRUPTED
        _summarise(display, directory, report)
    return 0


def prepare(
    config: Config,
    directory: RunDirectory,
    prompts: TaskPrompts,
    *,
    rollout_only: bool = False,
    engines: bool = True,
) -> None:
    """Everything that can go wrong cheaply, before anything is started."""
    check_devices(
        config,
        len(visible_devices()),
        engines=engines,
        capability=compute_capability(),
        has_transformer_engine=has_transformer_engine(),
    )
    check_resumable(config, directory, rollout_only=rollout_only)
    if config.model.create is not None and directory.newest_checkpoint is None:
        from megatron_bapo.model.hf_create import create_checkpoint

        texts = [prompt.messages[0]["content"] for prompt in prompts.train]
        create_checkpoint(config.model_path, config.model.create, texts, config.seed)
    tokenizer = load_tokenizer(config.model_path)
    tokenize([*prompts.train, *prompts.validation], tokenizer, config.data)
    for leftover in (directory.stop_request, directory.failure, directory.phase):
        leftover.unlink(missing_ok=True)
    replace_text(directory.config, dump_config(config))


def _check_rollouts(config: Config, directory: RunDirectory, folder: Path) -> None:
    if folder.resolve() == directory.rollouts.resolve():
        raise UserError(
            f"--rollouts-from {folder} is the run's own folder, which training writes anew; choose run_dir=<another "
            "folder>"
        )
    check_files(config, folder, directory.saved_step)


def _run_planes(
    config: Config,
    directory: RunDirectory,
    display: ProgressDisplay,
    interrupts: Interrupts,
    rollouts_from: Path | None,
) -> None:
    """Start the trainer, and the rollout plane where it is wanted, and watch them to the end."""
    starting: dict[str, Any] = {}
    with ExitStack() as stack:
        store = stack.enter_context(closing(WeightStore.create()))
        if rollouts_from is None:
            display.phase("starting Ray, the engines and the trainer")
            address, starting = stack.enter_context(rollout_plane(config, directory, store))
            source = ("--ray", address)
        else:
            display.phase("starting the trainer")
            source = ("--rollouts-from", str(rollouts_from))
        with _trainer(config, directory, source, store.folder) as trainer:
            _watch(trainer, starting, config, directory, display, interrupts)
        if trainer.returncode != 0:
            raise _failure(trainer.returncode, directory, _resume_command(directory, rollouts_from))


@contextmanager
def rollout_plane(config: Config, directory: RunDirectory, store: WeightStore) -> Iterator[tuple[str, dict[str, Any]]]:
    """Ray with the engines and the rollout service, until it is left.

    Yields the cluster's address, and by name the references that tell when each actor has started.
    """
    num_actors, engine_store = config.rollout.num_engines + 1, store
    with ExitStack() as stack:
        if config.weight_sync.engine_store == "own":
            engine_store = stack.enter_context(closing(WeightStore.create()))
            num_actors += 2
        address = stack.enter_context(local_cluster(num_actors, config.rollout.object_store_mib))
        # Held: an actor lives as long as its handle.
        _actors, starting = _place_actors(config, directory, engine_store.folder)
        if engine_store is not store:
            _actors += _place_relay(config, directory, store.folder, engine_store.folder)
        yield address, starting


def _place_actors(config: Config, directory: RunDirectory, store: Path) -> tuple[list[Any], dict[str, Any]]:
    """Place engines and service: their handles, and by name the references that tell when each has started."""
    engines: dict[str, Any] = {}
    starting: dict[str, Any] = {}
    for index in range(config.rollout.num_engines):
        name = f"engine {index}"
        engines[name], starting[name] = place_engine(config, index, store, name)
    service = place(RolloutService, config, engines, dict(starting), store, name=SERVICE)
    starting[SERVICE] = service.probe_token_ids.remote()
    return [*engines.values(), service], starting


def _place_relay(config: Config, directory: RunDirectory, trainers: Path, engines: Path) -> list[Any]:
    """What fills the engines' store from the trainer's."""
    server = place(StoreServer, trainers, name=STORE_SERVER, stateless=True)
    full_every, timeout_s = config.weight_sync.full_every, config.rollout.start_timeout_s
    log_file = directory.logs / "weight-store.log"
    arguments = (engines, server, full_every, timeout_s, log_file)
    return [server, place(HostStore, *arguments, name=HOST_STORE, stateless=True)]


@contextmanager
def _trainer(config: Config, directory: RunDirectory, source: tuple[str, str], store: Path) -> Iterator[psutil.Popen]:
    """The trainer under torchrun in a session of its own, so that Ctrl-C reaches only the launcher.

    `source` is the argument that says where its rollouts come from.
    """
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(config.parallel.world_size)),
        # Files in the private store instead of a TCP store, which would listen on every interface.
        *("--rdzv-backend", "c10d", "--rdzv-conf", "store_type=file", "--rdzv-endpoint", str(store / "rendezvous")),
        *("--local-addr", "127.0.0.1"),
        *("-m", "megatron_bapo.controller.training_loop", str(directory.root)),
        *(*source, "--store", str(store)),
    ]
    # The last keeps the agent from opening a TCP store of its own for the ranks.
    loopback = {"GLOO_SOCKET_IFNAME": "lo", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    environment = {"OMP_NUM_THREADS": "1", **os.environ, **loopback}
    with directory.trainer_log.open("ab") as log:
        process = psutil.Popen(
            command,
            stdout=log,
            stderr=log,
            stdin=subprocess.DEVNULL,
            env=environment,
            start_new_session=True,
            preexec_fn=end_with_parent,
        )
    try:
        yield process
    finally:
        _end(process)


def _end(process: psutil.Popen) -> None:
    """End a process and all its descendants, gently at first."""
    try:
        family = [process, *process.children(recursive=True)]
    except psutil.NoSuchProcess:
        return
    for member in family:
        with suppress(psutil.NoSuchProcess):
            member.terminate()
    _, alive = psutil.wait_procs(family, timeout=10)
    for member in alive:
        with suppress(psutil.NoSuchProcess):
            member.kill()


def _watch(
    trainer: psutil.Popen,
    starting: dict[str, Any],
    config: Config,
    directory: RunDirectory,
    display: ProgressDisplay,
    interrupts: Interrupts,
) -> None:
    """Follow the run until the trainer ends.

    Raises RunError or UserError when an actor cannot start.
    """
    offset = None
    while trainer.poll() is None:
        time.sleep(POLL_S)
        _check_started(starting, config)
        offset = _show_news(directory, display, offset, config.logging.mismatch_alarms)
        if interrupts.requested and not directory.stop_request.exists():
            directory.stop_request.touch()
            display.phase(STOPPING)
    _show_news(directory, display, offset, config.logging.mismatch_alarms)


def _show_news(
    directory: RunDirectory, display: ProgressDisplay, offset: int | None, limits: MismatchAlarmsConfig
) -> int | None:
    """Show what was recorded since `offset`; None until the trainer has dropped the rows that it will write again."""
    if not directory.phase.is_file():
        return None
    if offset is None:
        offset = directory.metrics.stat().st_size
    rows, offset = read_new_rows(directory.metrics, offset)
    for row in rows:
        display.update(row)
        for alarm in mismatch_alarms(row["metrics"], limits):
            display.warn(alarm)
    if not directory.stop_request.exists():
        display.phase(directory.phase.read_text())
    return offset


def _check_started(starting: dict[str, Any], config: Config) -> None:
    """Take note of actors that have started; raises when one failed to."""
    for name in finished(starting):
        ask(starting.pop(name), name, config.rollout.start_timeout_s)


def _failure(exit_code: int, directory: RunDirectory, resume_command: str) -> Exception:
    """What the trainer said, or the end of its log."""
    if directory.failure.is_file():
        failure = json.loads(directory.failure.read_text())
        return (UserError if failure["kind"] == "user" else RunError)(failure["message"])
    log = directory.trainer_log
    return RunError(
        f"the trainer ended with exit code {exit_code}. Continue from the last complete checkpoint with: "
        f"{resume_command}\n{log} ends:\n{last_lines(log, 12)}"
    )


def _resume_command(directory: RunDirectory, rollouts_from: Path | None) -> str:
    option = "" if rollouts_from is None else f" --rollouts-from {rollouts_from}"
    return f"python -m megatron_bapo train {directory.config}{option}"


def _summarise(display: ProgressDisplay, directory: RunDirectory, report: Path) -> None:
    rows = read_rows(directory.metrics)
    before, after = accuracies(rows)
    display.final_summary(
        accuracy_before=before,
        accuracy_after=after,
        seconds=rows[-1]["time_s"],
        paths={
            "report": report,
            "metrics": directory.metrics,
            "TensorBoard": directory.tensorboard,
            "checkpoint": directory.newest_checkpoint or directory.checkpoints,
            "Hugging Face export": directory.export,
        },
    )
