"""Rollouts from files instead of engines, for `train --rollouts-from`."""

from __future__ import annotations

import asyncio
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

from megatron_bapo.config.architecture import read_architecture
from megatron_bapo.config.schema import Config
from megatron_bapo.controller.prompt_sets import load_task_prompts, prompt_stream
from megatron_bapo.data.rollout_files import RolloutHeader, longest, read_header, read_rollouts, rollout_files
from megatron_bapo.errors import UserError
from megatron_bapo.records import Group, Trajectory
from megatron_bapo.rollout.generation import ScoredGroups
from megatron_bapo.rollout.sft_demonstrations import SftDemonstrations
from megatron_bapo.rollout.tokenization import load_tokenizer, tokenize


class RecordedRollouts:
    """Reads one batch per file for the trainer; exists on the main rank only."""

    def __init__(self, config: Config, folder: Path, step: int) -> None:
        """`step` is the number of batches already trained on.

        Raises UserError if files of the remaining steps are missing or do not fit the configuration.
        """
        self._config, self._folder, self._step = config, folder, step
        self._tokenizer = load_tokenizer(config.model_path)
        check_files(config, folder, step, len(self._tokenizer))
        self._prompts = load_task_prompts(config).train
        self._stream = prompt_stream(config, self._prompts)

    def sft_demonstrations(self, num: int) -> list[Trajectory]:
        """Return demonstrations of the next training prompts, as the rollout service does."""
        prompts = tokenize(self._stream.take(num), self._tokenizer, self._config.data)
        with closing(SftDemonstrations(self._config, self._tokenizer)) as demonstrations:
            return asyncio.run(demonstrations.for_prompts(prompts))

    def take(self) -> tuple[ScoredGroups, dict[str, float]]:
        """Return the next file's batch. Raises UserError for an invalid file and for sequences that are too long."""
        self._step += 1
        path = rollout_files(self._folder)[self._step]
        header, groups = read_rollouts(path)
        _check_lengths(self._config, path, longest(groups))  # headers of earlier versions have no lengths
        if not self._config.algorithm.keep_sampling_mask:  # the file may have kept tokens nevertheless
            groups = [_without_kept_tokens(group) for group in groups]
        version = header.policy_version if header.has_trainer else None
        return ScoredGroups(groups, header.num_reward_timeouts, policy_version=version, sampling=header.sampling), {}

    def begin_saving(self, folder: Path) -> dict[str, Any]:
        """Return the prompt stream's position; the position in the files follows from the step."""
        return {"stream": self._stream.state_dict()}

    def finish_saving(self) -> None:
        """Return at once, because there are no files to write."""

    def restore_data_state(self, state: dict[str, Any], checkpoint: Path) -> None:
        """Restore the prompt stream's position; the checkpoint's rollouts in flight are ignored."""
        self._stream.load_state_dict(state["stream"])


def _without_kept_tokens(group: Group) -> Group:
    return Group(group.prompt, tuple(replace(trajectory, kept_tokens=None) for trajectory in group.trajectories))


def check_files(config: Config, folder: Path, step: int, vocab_size: int) -> None:
    """Check that the folder has the batches after `step` that the configuration asks for.

    `vocab_size` is that of the model's tokenizer. Raises UserError if it does not.
    """
    files, total = rollout_files(folder), config.trainer.total_steps
    if not files:
        raise UserError(
            f"{folder} holds no step-*.parquet; give the rollouts folder of a run with logging.dump_rollouts=true or "
            "of train --rollout-only"
        )
    remaining = range(step + 1, total + 1)
    missing = next((number for number in remaining if number not in files), None)
    if missing is not None:
        fewer = f"set trainer.total_steps={missing - 1}, or " if missing > step + 1 else ""
        raise UserError(
            f"{folder} has no rollouts of step {missing}; its files go from step {min(files)} to {max(files)}, and "
            f"trainer.total_steps={total}; {fewer}generate the missing files"
        )
    for number in remaining:
        header = read_header(files[number])
        if (header.num_groups, header.n) != (config.prompts_per_step, config.rollout.n):
            raise UserError(
                f"{files[number]} has {header.num_groups} prompts x {header.n} responses, but the configuration trains "
                f"on {config.prompts_per_step} x {config.rollout.n}; set rollout.n={header.n} and "
                f"trainer.train_batch_size={header.num_groups * header.n}, or give another folder"
            )
        if header.vocab_size != vocab_size:
            raise UserError(
                f"{files[number]} was written with a tokenizer of {header.vocab_size} tokens, but the one in "
                f"{config.model_path} has {vocab_size}; use the model that sampled the responses, or give another "
                "folder"
            )
        _check_sampling(config, files[number], header)
        _check_kept_tokens(config, files[number], header)
        _check_routes(config, files[number], header)
        _check_teacher(config, files[number], header)
        _check_lengths(config, files[number], (header.longest_prompt, header.longest_response))


def _check_sampling(config: Config, path: Path, header: RolloutHeader) -> None:
    """Refuse a batch whose log-probs are of another distribution than the trainer's; files of old say nothing."""
    if not config.algorithm.compares_with_engines:
        return
    for name, value in config.rollout.sampling.items():
        if (recorded := header.sampling.get(name, value)) != value:
            raise UserError(
                f"{path} was sampled with rollout.{name}={recorded}, and the configuration has rollout.{name}={value}: "
                "its log-probs are of another distribution than the trainer's, and no ratio of the two would be 1; set "
                f"rollout.{name}={recorded}, or have the trainer compute the ratios' denominators: "
                "algorithm.behaviour_policy=recomputed without rollout_correction and off_policy_mask_threshold"
            )


def _check_kept_tokens(config: Config, path: Path, header: RolloutHeader) -> None:
    """Refuse a batch without the tokens that truncated sampling has kept, if the trainer is to keep the same ones."""
    if config.algorithm.keep_sampling_mask and not header.has_kept_tokens:
        raise UserError(
            f"{path} has no kept_tokens, which algorithm.keep_sampling_mask=true needs; generate the batches with it, "
            "or set it to false with algorithm.behaviour_policy=recomputed"
        )


def _check_routes(config: Config, path: Path, header: RolloutHeader) -> None:
    """Refuse a batch without the routes that the trainer is to replay, or with those of another model."""
    if config.algorithm.routing_replay != "rollout":
        return
    model = read_architecture(config.model_path)
    expected = len(model.moe_layers), model.num_experts_per_tok, model.route_item_bytes
    if header.route_shape != expected:
        found = f"routes of the shape {header.route_shape}" if header.route_shape else "no routes"
        raise UserError(
            f"{path} has {found}, and algorithm.routing_replay=rollout needs those of {config.model_path}, {expected} "
            "(layers with experts, experts of a token, bytes of a number); generate the batches with "
            "algorithm.routing_replay=rollout, or set it to trainer or none"
        )


def _check_teacher(config: Config, path: Path, header: RolloutHeader) -> None:
    """Refuse a batch without the log-probs of the configuration's teacher at the temperature of the trainer."""
    teacher, temperature = config.algorithm.recorded_teacher, config.rollout.temperature
    if not teacher:
        return
    found = f"log-probs of the teacher {header.teacher}" if header.teacher else "no teacher's log-probs"
    recorded = header.sampling.get("temperature", temperature)
    if header.teacher != teacher or recorded != temperature:
        raise UserError(
            f"{path} has {found}, at rollout.temperature={recorded}, and algorithm.distillation.engines needs those of "
            f"algorithm.distillation.teacher={teacher} at {temperature}; have the trainer score the responses, by "
            "removing the section engines, or generate the batches with these settings"
        )


def _check_lengths(config: Config, path: Path, lengths: tuple[int, int]) -> None:
    """Refuse a batch whose longest prompt or response is too long for the trainer's micro-batches."""
    limits = {
        "data.max_prompt_length": config.data.max_prompt_length,
        "rollout.max_response_length": config.rollout.max_response_length,
    }
    for (key, limit), length in zip(limits.items(), lengths, strict=True):
        if length > limit:
            raise UserError(f"{path} has a sequence of {length} tokens, but {key}={limit}; raise it to {length}")
