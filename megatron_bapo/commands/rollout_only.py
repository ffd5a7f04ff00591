"""Generate and write rollout batches with the initial model, without a trainer."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

from megatron_bapo.cluster.interrupts import Interrupts
from megatron_bapo.config.schema import Config
from megatron_bapo.controller.evaluation import rollout_metrics
from megatron_bapo.controller.launcher import check_this_machine, prepare
from megatron_bapo.controller.preflight import checked_prompts
from megatron_bapo.controller.progress import ProgressDisplay
from megatron_bapo.controller.rollout_client import RolloutClient
from megatron_bapo.controller.rollout_plane import rollout_plane
from megatron_bapo.controller.terminal import terminal
from megatron_bapo.data.rollout_files import (
    RolloutHeader,
    read_header,
    rollout_files,
    write_rollouts,
)
from megatron_bapo.errors import INTERRUPTED
from megatron_bapo.metrics.sinks import truncate_after
from megatron_bapo.metrics.values import scalars
from megatron_bapo.rollout.tokenization import load_tokenizer
from megatron_bapo.run_directory import RunDirectory
from megatron_bapo.weight_sync.transport import WeightStore


def run_rollouts(config: Config) -> int:
    """Write `trainer.total_steps` batches to `config.run_dir`/rollouts, continuing after the last existing one.

    Returns the exit code, 130 after an interruption. Raises UserError and RunError, each with a complete message.
    """
    console = terminal()
    prompts = checked_prompts(config)
    for note in prompts.notes:
        console.print(note, soft_wrap=True)
    for note in without_trainer(config):
        console.print(note, soft_wrap=True)
    directory = RunDirectory(config.run_dir)
    directory.create()
    with directory.locked(), directory.reserved_space():
        check_this_machine(config)
        prepare(config, directory, prompts, rollout_only=True)
        display = ProgressDisplay(config.trainer.total_steps, console=console)
        with Interrupts() as interrupts, display:
            if max(rollout_files(directory.rollouts), default=0) < config.trainer.total_steps:
                _generate(config, directory, display, interrupts)
        written = len(rollout_files(directory.rollouts))
    console.print(f"{written} of {config.trainer.total_steps} batches are in {directory.rollouts}", soft_wrap=True)
    if written < config.trainer.total_steps:
        console.print("Stopped; continue with the same command.")
        return INTERRUPTED
    console.print(f"Train on them with --rollouts-from {directory.rollouts} and another run_dir", soft_wrap=True)
    return 0


def without_trainer(config: Config) -> Iterator[str]:
    """Yield the settings that a trainer would apply to the model before its first rollouts, one line each."""
    if config.warm_start is not None:
        yield "There is no warm start without a trainer: the initial model generates the rollouts."
    if config.model.lora is not None and config.model.lora.path is not None:
        yield (
            f"The adapters in model.lora.path={config.model.lora.path} need a trainer that sends them to the engines: "
            f"the model in {config.model_path} generates the rollouts without them. To sample with them, merge them "
            "into a Hugging Face folder and set model.path to it."
        )


def _generate(config: Config, directory: RunDirectory, display: ProgressDisplay, interrupts: Interrupts) -> None:
    """Generate the missing batches until an interrupt requests a stop."""
    vocab_size, files = len(load_tokenizer(config.model_path)), rollout_files(directory.rollouts)
    done, start = max(files, default=0), time.monotonic()
    truncate_after(directory.requests, done)
    display.phase("starting Ray and the engines")
    # The rollouts are what such a run is for, with the texts of all responses.
    dumping = config.model_copy(update={"logging": config.logging.model_copy(update={"dump_rollouts": True})})
    with closing(WeightStore.create()) as store, rollout_plane(dumping, directory, store):
        client = RolloutClient(config)
        if files:
            client.restore_data_state(read_header(files[done]).data_state, _in_flight_folder(directory, done))
        client.wait_for_engines()
        for step in range(done + 1, config.trainer.total_steps + 1):
            if interrupts.requested:
                return
            display.phase("generating responses")
            taken = client.take()
            assert taken is not None, "engines need no weights without a trainer"
            scored, _ = taken
            shutil.rmtree(_in_flight_folder(directory, step), ignore_errors=True)  # left by an interrupted attempt
            data_state = client.begin_saving(_in_flight_folder(directory, step))
            client.finish_saving()
            for name in ("records", "response_lengths"):  # they depend on timing; the batch's file is reproducible
                del data_state[name]
            header = RolloutHeader(
                step=step,
                policy_version=0,
                num_groups=len(scored.groups),
                n=config.rollout.n,
                vocab_size=vocab_size,
                num_reward_timeouts=scored.num_reward_timeouts,
                data_state=data_state,
                sampling=config.rollout.sampling,
                teacher=config.algorithm.recorded_teacher,
            )
            write_rollouts(directory.rollouts, header, scored.groups, advantages=None)
            shutil.rmtree(_in_flight_folder(directory, step - 1), ignore_errors=True)
            metrics = scalars(rollout_metrics(scored))
            display.update({"step": step, "phase": "train", "time_s": time.monotonic() - start, "metrics": metrics})


def _in_flight_folder(directory: RunDirectory, step: int) -> Path:
    """Return the folder of the in-flight state for the batches after this one."""
    return directory.rollouts / f"in-flight-{step:08d}"
