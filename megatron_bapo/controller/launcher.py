"""Start a run on one machine or a cluster: engines and rollout service under Ray, the trainer under torchrun.

The launcher does not train. It validates the configuration, starts both planes, shows the trainer's progress, and ends
every process of the run, however the run ends.
"""

from __future__ import annotations

import json
import os
import shlex
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any, Protocol

import psutil

from megatron_bapo.cluster.host_store import create_host_stores
from megatron_bapo.cluster.interrupts import STOPPED_AT_ONCE, Interrupts
from megatron_bapo.cluster.planes import (
    Hosts,
    NodeLost,
    create_stores,
    engine_placements,
    joined_cluster,
    node_agents,
    start_trainers,
    teacher_placements,
)
from megatron_bapo.cluster.ray_cluster import ActorDied, finished, get_result
from megatron_bapo.cluster.run_end import tell_nodes
from megatron_bapo.cluster.trainer_process import LOOPBACK, TrainerLog, TrainerNode, end, end_all, start_trainer
from megatron_bapo.config.checks import refuse
from megatron_bapo.config.colocation_checks import (
    allocator_problems,
    device_problems,
    host_problems,
    layer_problems,
)
from megatron_bapo.config.loading import dump_config
from megatron_bapo.config.logging import MismatchAlarmsConfig
from megatron_bapo.config.schema import Config
from megatron_bapo.controller.preflight import check_rollouts, check_teacher_tokens, checked_prompts
from megatron_bapo.controller.progress import ProgressDisplay
from megatron_bapo.controller.prompt_sets import TaskPrompts
from megatron_bapo.controller.restarts import Restarts
from megatron_bapo.controller.rollout_plane import create_actors, rollout_plane
from megatron_bapo.controller.run_report import accuracies, write_run_report
from megatron_bapo.controller.run_state import check_resumable
from megatron_bapo.controller.terminal import terminal
from megatron_bapo.errors import INTERRUPTED, ProbeFailed, RunError, StorageFailed
from megatron_bapo.files import replace_text
from megatron_bapo.logs import last_lines
from megatron_bapo.metrics.alarms import mismatch_alarms
from megatron_bapo.metrics.mlflow_sink import following_to_mlflow
from megatron_bapo.metrics.sinks import read_new_rows, read_rows
from megatron_bapo.model.weight_layouts import ENGINE_HOST, TRAINER_HOST
from megatron_bapo.parallel.platform import compute_capability, has_transformer_engine, visible_devices
from megatron_bapo.planning.placement import RunPlacement
from megatron_bapo.rollout.tokenization import load_tokenizer, tokenize
from megatron_bapo.run_directory import FAILURES, RunDirectory
from megatron_bapo.weight_sync.transport import WeightStore

POLL_S = 0.25
STOPPING = "stopping after the current step; press Ctrl-C again to stop now"
STOPPED = "stopped at once; the same command continues from the last complete checkpoint"


def run_training(config: Config, rollouts_from: Path | None = None, num_nodes: int | None = None) -> int:
    """Start or resume the run in `config.run_dir`; return the exit code.

    After a signal that is 130, and the state is saved, or 131 if a second signal has ended the run at once.

    `rollouts_from` is a folder of rollout files to train on without engines. With `num_nodes` the run uses the Ray
    cluster at RAY_ADDRESS, and waits until it has this number of nodes.

    Raises UserError and RunError, each with a complete message.
    """
    console = terminal()
    prompts = checked_prompts(config, engines=rollouts_from is None)
    for note in prompts.notes:
        console.print(note, soft_wrap=True)
    directory = RunDirectory(config.run_dir)
    directory.create()
    with directory.locked(), directory.reserved_space(), ExitStack() as cluster:
        placement = None
        if num_nodes is None:
            check_this_machine(config, engines=rollouts_from is None)
        else:
            placement = cluster.enter_context(joined_cluster(config, num_nodes, console))
        prepare(config, directory, prompts)
        if rollouts_from is not None:
            check_rollouts(config, rollouts_from, len(load_tokenizer(config.model_path)))
            console.print("Without engines, held-out prompts are not evaluated.")
        warm_start_steps = config.warm_start.num_steps if config.warm_start else 0
        display = ProgressDisplay(config.trainer.total_steps, num_warm_start_steps=warm_start_steps, console=console)
        restarts = Restarts(directory, config.trainer.max_restarts)
        try:
            with Interrupts() as interrupts, display, following_to_mlflow(config, directory, display.warn):
                while failure := _run_planes(
                    config, directory, display, interrupts, restarts, rollouts_from, placement
                ):
                    console.print(restarts.use(failure), soft_wrap=True)
                    if num_nodes is not None:
                        cluster.close()
                        placement = cluster.enter_context(joined_cluster(config, num_nodes, console))
        except KeyboardInterrupt:
            terminal(stderr=True).print(STOPPED, soft_wrap=True)
            exit_code = STOPPED_AT_ONCE
        else:
            exit_code = report_end(display, directory, rollouts_from)
        if num_nodes is not None:
            tell_nodes(exit_code)
        return exit_code


def report_end(display: ProgressDisplay, directory: RunDirectory, rollouts_from: Path | None) -> int:
    """Write the report of a run whose trainer ended well, say how it ended, and return the exit code."""
    report = write_run_report(directory.root)
    if directory.is_finished:
        directory.stop_request.unlink(missing_ok=True)  # it came too late, perhaps after the trainer's last look
    elif directory.stop_request.exists():
        resume = _resume_command(directory, rollouts_from)
        message = f"Stopped; the state is saved. Continue with the same command, or: {resume}"
        terminal().print(message, soft_wrap=True)
        return INTERRUPTED
    _summarise(display, directory, report)
    return 0


def check_this_machine(config: Config, *, engines: bool = True) -> None:
    """Check that this machine's devices suffice, with or without engines. Raises UserError with every broken rule."""
    devices = [
        *device_problems(config, len(visible_devices()), engines=engines),
        *(host_problems(config, num_hosts=1) if engines else ()),
    ]
    layers = layer_problems(config, compute_capability(), has_transformer_engine())
    refuse([*devices, *layers, *allocator_problems(config, os.environ)])


def prepare(config: Config, directory: RunDirectory, prompts: TaskPrompts, *, rollout_only: bool = False) -> None:
    """Check what can be checked before processes are started, and write the run directory's configuration.

    Creates the model if `model.create` asks for it. Raises UserError if the run cannot be resumed, or for prompts that
    cannot be tokenized.
    """
    check_resumable(config, directory, rollout_only=rollout_only)
    if config.model.create is not None and directory.newest_checkpoint is None:
        from megatron_bapo.model.hf_create import create_checkpoint

        texts = [prompt.messages[0]["content"] for prompt in prompts.train]
        create_checkpoint(config.model_path, config.model.create, texts, config.seed)
    tokenizer = load_tokenizer(config.model_path)
    check_teacher_tokens(config, tokenizer)
    tokenize([*prompts.train, *prompts.validation], tokenizer, config.data)
    directory.stop_request.unlink(missing_ok=True)
    replace_text(directory.config, dump_config(config))


def _run_planes(
    config: Config,
    directory: RunDirectory,
    display: ProgressDisplay,
    interrupts: Interrupts,
    restarts: Restarts,
    rollouts_from: Path | None,
    placement: RunPlacement | None,
) -> str | None:
    """Start the trainer and, without `rollouts_from`, the rollout plane, and watch them until the run ends.

    Returns None if the run has ended well, or a failure that a restart may overcome.
    """
    directory.clear_failure()
    parts = "the trainer" if rollouts_from is not None else "Ray, the engines and the trainer"
    display.phase(f"starting {parts}")
    if placement is None:
        planes = _on_this_machine(config, directory, rollouts_from)
    else:
        planes = _on_cluster(config, directory, rollouts_from, placement)
    descendants: list[psutil.Process] = []
    try:
        with ExitStack() as stack:
            # Processes that outlive their parents would keep their GPU from a restart.
            stack.callback(end_all, descendants)
            trainer, starting = stack.enter_context(planes)
            stack.callback(lambda: descendants.extend(psutil.Process().children(recursive=True)))
            try:
                exit_code = _watch(trainer, starting, config, directory, display, interrupts, restarts)
            except ActorDied:
                trainer.look_for_lost_nodes()
                raise
            if exit_code != 0:
                raise _failure(exit_code, directory, trainer.log)
    except (NodeLost, ProbeFailed, StorageFailed):
        raise
    except RunError as failure:
        directory.check_writable()  # a full disk may have shown itself in another way, for example as a dead rank
        if interrupts.requested:
            raise
        return str(failure)  # not the exception: its frames keep actors alive
    return None


class Trainer(Protocol):
    """All trainer ranks, on one machine or several."""

    log: TrainerLog

    def poll(self) -> int | None:
        """Return the exit code, or None while the trainer runs."""
        ...

    def look_for_lost_nodes(self) -> None:
        """Raise NodeLost if the loss of a node explains a failure."""
        ...


class _LocalTrainer:
    def __init__(self, process: psutil.Popen, log: TrainerLog) -> None:
        self.poll, self.log = process.poll, log

    def look_for_lost_nodes(self) -> None:
        pass


@contextmanager
def _on_this_machine(
    config: Config, directory: RunDirectory, rollouts_from: Path | None
) -> Iterator[tuple[Trainer, dict[str, Any]]]:
    """Start a run's processes on this machine.

    Yields the trainer, and by actor name the references that are ready when the actor has started.
    """
    with ExitStack() as stack:
        store = stack.enter_context(closing(WeightStore.create()))
        source, starting, engine_hosts = ("--rollouts-from", str(rollouts_from)), {}, ()
        if rollouts_from is None:
            address, starting = stack.enter_context(rollout_plane(config, directory, store))
            engine_hosts = ((TRAINER_HOST if config.weight_sync.engine_store == "shared" else ENGINE_HOST,),)
            source = ("--ray", address)
        world_size = config.parallel.world_size
        node = TrainerNode(directory.root, source, world_size, LOOPBACK, TRAINER_HOST, engine_hosts)
        log = TrainerLog(directory.trainer_log)
        process = start_trainer(node, store.folder, log.file)
        stack.callback(end, process)
        yield _LocalTrainer(process, log), starting


@contextmanager
def _on_cluster(
    config: Config, directory: RunDirectory, rollouts_from: Path | None, placement: RunPlacement
) -> Iterator[tuple[Trainer, dict[str, Any]]]:
    """Start a run's processes on the Ray cluster that this process has joined; yields as `_on_this_machine`."""
    hosts = Hosts(placement, config.weight_sync.engine_store)
    with node_agents(config, placement, directory) as agents:
        stores = create_stores(agents, placement, hosts)
        # The handles are kept, because an actor lives as long as its handle.
        _actors, starting, source = [], {}, ("--rollouts-from", str(rollouts_from))
        if rollouts_from is None:
            placements, rank_0 = engine_placements(config, placement, agents, stores, hosts), placement.trainer_nodes[0]
            teachers = teacher_placements(config, placement, agents)
            _actors, starting = create_actors(config, placements, teachers, rank_0.node_id)
            _actors += create_host_stores(config, directory, stores, len(placement.trainer_nodes))
            source = ("--ray", os.environ["RAY_ADDRESS"])
        yield start_trainers(directory, source, placement, agents, stores, hosts), starting


def _watch(
    trainer: Trainer,
    starting: dict[str, Any],
    config: Config,
    directory: RunDirectory,
    display: ProgressDisplay,
    interrupts: Interrupts,
    restarts: Restarts,
) -> int:
    """Show the run's progress until the trainer ends; return its exit code.

    Allows `restarts` once all actors and the trainer have started. Raises RunError or UserError if an actor cannot
    start.
    """
    offset = None
    while (exit_code := trainer.poll()) is None:
        time.sleep(POLL_S)
        _check_started(starting, config)
        offset = _show_progress(directory, display, offset, config.logging.mismatch_alarms)
        restarts.run_has_started |= not starting and offset is not None
        if interrupts.requested and not directory.stop_request.exists():
            directory.stop_request.touch()
            display.phase(STOPPING)
    _show_progress(directory, display, offset, config.logging.mismatch_alarms)
    return exit_code


def _show_progress(
    directory: RunDirectory, display: ProgressDisplay, offset: int | None, limits: MismatchAlarmsConfig
) -> int | None:
    """Show the metrics recorded since `offset` and return the new offset.

    Returns None until the trainer has opened the metrics, and removed the rows that a resumed run writes again. Where a
    network file system shows a file as another host has not written it, the next call tries again.
    """
    try:
        if not directory.phase.is_file():
            return None
        if offset is None:
            offset = directory.metrics.stat().st_size
        phase = directory.phase.read_text()
        rows, offset = read_new_rows(directory.metrics, offset)
    except (OSError, ValueError):
        return offset
    for row in rows:
        display.update(row)
        for alarm in mismatch_alarms(row["metrics"], limits):
            display.warn(alarm)
    if not directory.stop_request.exists():
        display.phase(phase)
    return offset


def _check_started(starting: dict[str, Any], config: Config) -> None:
    """Remove the actors that have started from `starting`; raises the error of one that failed to start."""
    for name in finished(starting):
        get_result(starting.pop(name), name, config.rollout.start_timeout_s)


def _failure(exit_code: int, directory: RunDirectory, log: TrainerLog) -> Exception:
    """Return the trainer's recorded error, or one with the end of its log; it also names a rank that was killed."""
    if directory.failure.is_file():
        failure = json.loads(directory.failure.read_text())
        message = failure["message"]
        if failure["kind"] != "run":
            return FAILURES[failure["kind"]](message)
    else:
        message = (
            f"the trainer ended with exit code {exit_code}; the same command continues from the last complete "
            f"checkpoint. {log.file} ends:\n{last_lines(log.file, 12)}"
        )
    killed = log.killed_rank()
    return RunError(message if killed is None else f"{killed}; {message}")


def _resume_command(directory: RunDirectory, rollouts_from: Path | None) -> str:
    option = [] if rollouts_from is None else ["--rollouts-from", str(rollouts_from)]
    return shlex.join(["python", "-m", "megatron_bapo", "train", str(directory.config), *option])


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
