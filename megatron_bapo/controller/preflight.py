"""Check what a run reads, imports and writes before anything is started."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from megatron_bapo.config.schema import Config
from megatron_bapo.controller.prompt_sets import TaskPrompts, load_task_prompts, prompt_stream
from megatron_bapo.controller.recorded_rollouts import check_files
from megatron_bapo.controller.terminal import Show
from megatron_bapo.errors import RunError, UserError
from megatron_bapo.files import unwritable
from megatron_bapo.functions.user_function import Target
from megatron_bapo.functions.worker import START_LIMIT_S
from megatron_bapo.functions.worker_pool import FunctionPool
from megatron_bapo.rewards.ground_truths import check_ground_truths
from megatron_bapo.rewards.scorer import reward_target
from megatron_bapo.rollout.environment import environment_target, reply_encoder
from megatron_bapo.rollout.sft_demonstrations import demonstration_target
from megatron_bapo.rollout.tokenization import TokenizedPrompt, load_tokenizer, tokenize
from megatron_bapo.run_directory import RunDirectory

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_MAX_GROUND_TRUTHS = 256
"""Number of ground truths of the first batch that are checked, which takes a second or two. More unreadable ones than
`rollout.max_reward_failures` would end a run."""


@dataclass(frozen=True)
class Inputs:
    """What a run reads, checked."""

    prompts: TaskPrompts
    tokenizer: PreTrainedTokenizerBase
    train: list[TokenizedPrompt]
    """The training prompts, in the order of their file."""


def check_inputs(config: Config, rollouts_from: Path | None = None) -> tuple[str, ...]:
    """Check everything that can go wrong cheaply, for commands that do not train, and return notes for the user.

    Nothing stays written. Raises UserError.
    """
    return read_inputs(config, rollouts_from).prompts.notes


def read_inputs(
    config: Config, rollouts_from: Path | None = None, show: Show = lambda activity: None, *, reward: bool = True
) -> Inputs:
    """Do what `check_inputs` does, name each activity to `show`, and return what was read.

    Without `reward` the reward function is not imported, as the caller does so itself.
    """
    show("reading prompts")
    prompts = checked_prompts(config, engines=rollouts_from is None, reward=reward)
    show("loading the tokenizer")
    tokenizer = _tokenizer(config, prompts)
    check_teacher_tokens(config, tokenizer)
    check_replies(config, tokenizer)
    show(f"tokenizing {len(prompts.train) + len(prompts.validation):,} prompts")
    tokenized = tokenize([*prompts.train, *prompts.validation], tokenizer, config.data)
    if rollouts_from is not None:
        show(f"reading the rollouts in {rollouts_from}")
        check_rollouts(config, rollouts_from, len(tokenizer))
    else:
        num = min(config.prompts_per_step, _MAX_GROUND_TRUTHS)
        check_ground_truths(config.reward, prompts.train[:num], config.rollout.max_reward_failures)
    return Inputs(prompts, tokenizer, tokenized[: len(prompts.train)])


def checked_prompts(config: Config, *, engines: bool = True, reward: bool = True) -> TaskPrompts:
    """Return the prompts, after checking that the run directory can be written and the user's functions be imported.

    Without `engines` neither reward nor environment is imported, without `reward` not the reward. Raises UserError.
    """
    check_writable(config.run_dir)
    with ThreadPoolExecutor(1) as beside:
        imports = beside.submit(check_functions, config, engines=engines, reward=reward)
        prompts = load_task_prompts(config)
        imports.result()
    prompt_stream(config, prompts.train)
    return prompts


def check_rollouts(config: Config, folder: Path, vocab_size: int) -> None:
    """Check that the folder's files are those that the run still needs, and not its own. Raises UserError."""
    directory = RunDirectory(config.run_dir)
    if folder.resolve() == directory.rollouts.resolve():
        raise UserError(
            f"--rollouts-from {folder} is the run's own folder, which training writes anew; choose run_dir=<another "
            "folder>"
        )
    check_files(config, folder, directory.saved_step, vocab_size)


def check_teacher_tokens(config: Config, tokenizer: PreTrainedTokenizerBase) -> None:
    """Check that every token of the policy is the same token of the teacher, if there is one. Raises UserError."""
    if config.algorithm.distillation is None:
        return
    teacher = config.algorithm.distillation.teacher
    theirs = load_tokenizer(teacher).get_vocab()
    different = [(token, number) for token, number in tokenizer.get_vocab().items() if theirs.get(token) != number]
    if different:
        token, number = min(different, key=lambda each: each[1])
        raise UserError(
            f"algorithm.distillation.teacher={teacher} has another tokenizer than the policy: {len(different):,} "
            f"tokens of the policy are different ones of the teacher, the first is {token!r} with the number {number} "
            f"(the teacher's: {theirs.get(token, 'none')}); choose a teacher with the policy's tokenizer"
        )


def check_replies(config: Config, tokenizer: PreTrainedTokenizerBase) -> None:
    """Check that the chat template has a place for the environment's replies, if there is one. Raises UserError."""
    if config.environment is not None:
        reply_encoder(tokenizer, config.environment.role, config.data)


def check_writable(run_dir: Path) -> None:
    """Check that the folder can be created, or written to, with a folder that is removed at once. Raises UserError."""
    nearest = next(folder for folder in (run_dir, *run_dir.parents) if os.path.exists(folder))
    try:
        TemporaryDirectory(dir=nearest).cleanup()
    except OSError as error:
        raise unwritable(f"run_dir={run_dir}", OSError(error.errno, error.strerror, str(nearest))) from None


def check_functions(config: Config, *, engines: bool = True, reward: bool = True) -> None:
    """Import each of the user's functions in a process of its own, and check the values of objectives and advantages.

    Raises UserError if a function cannot be imported or has wrong values, and RunError if its process ends.
    """
    for target in _user_functions(config, engines=engines, reward=reward):
        FunctionPool(target, num_workers=1, concurrency=1, timeout_s=1.0).close()
    for key in ("function", "adv_function"):
        if (name := getattr(config.algorithm, key)) is not None:
            _check_values(f"algorithm.{key}", name, config.rollout.n)


def _check_values(key: str, name: str, group_size: int) -> None:
    command = [sys.executable, "-m", "megatron_bapo.algorithm.user_functions", key, name, str(group_size)]
    try:
        checked = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            text=True,
            errors="replace",
            timeout=START_LIMIT_S,
        )
    except subprocess.TimeoutExpired:
        raise RunError(f"{key}={name} was not checked within {START_LIMIT_S:.0f} s") from None
    if checked.returncode == 1:
        raise UserError(checked.stdout.strip())
    if checked.returncode != 0:
        raise RunError(f"importing {key}={name} ended its process (exit code {checked.returncode})")


def _user_functions(config: Config, *, engines: bool, reward: bool) -> Iterator[Target]:
    if engines and reward and config.reward.function is not None:
        yield reward_target(config.reward)
    if engines and config.environment is not None and config.environment.function is not None:
        yield environment_target(config.environment, config.reward.secret_variables)
    if (demonstration := demonstration_target(config)) is not None:
        yield demonstration


def _tokenizer(config: Config, prompts: TaskPrompts) -> PreTrainedTokenizerBase:
    """Return the model's tokenizer, also of a model that is still to be created."""
    if config.model.create is None or config.model_path.is_dir():
        return load_tokenizer(config.model_path)
    from megatron_bapo.model.hf_create import byte_tokenizer

    return byte_tokenizer([prompt.messages[0]["content"] for prompt in prompts.train])
