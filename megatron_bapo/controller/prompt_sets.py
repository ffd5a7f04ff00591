"""The run's training and held-out prompts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megatron_bapo.config.schema import Config
from megatron_bapo.data.curriculum import Curriculum
from megatron_bapo.data.prompt_stream import PromptStream
from megatron_bapo.data.prompts import load_prompts, without
from megatron_bapo.errors import UserError
from megatron_bapo.records import Prompt


@dataclass(frozen=True)
class TaskPrompts:
    """A run's prompts."""

    train: list[Prompt]
    validation: list[Prompt]
    """Empty when none are configured."""
    notes: tuple[str, ...]
    """Notes for the user on skipped lines and removed training prompts."""


def load_task_prompts(config: Config) -> TaskPrompts:
    """Load training and held-out prompts; prompts in both sets are removed from training.

    Raises UserError for data that cannot be read, or if too few training prompts remain for one rollout batch.
    """
    data = config.data
    train = load_prompts(data.train, name="train", system_prompt=data.system_prompt)
    notes = _skipped("data.train", train.num_skipped, train.skipped_reasons)
    validation: list[Prompt] = []
    prompts = train.prompts
    if data.validation is not None:
        held_out = load_prompts(data.validation, name="validation", system_prompt=data.system_prompt)
        notes += _skipped("data.validation", held_out.num_skipped, held_out.skipped_reasons)
        validation = held_out.prompts
        prompts, num_removed = without(prompts, validation)
        if num_removed:
            notes += (f"{num_removed} training prompts are also held out; they are left out of training",)
    if len(prompts) < config.prompts_per_step:
        raise UserError(
            f"there are {len(prompts)} training prompts, but a batch takes trainer.train_batch_size / rollout.n "
            f"= {config.prompts_per_step}; lower the batch or add data"
        )
    return TaskPrompts(prompts, validation, notes)


def prompt_stream(config: Config, prompts: Sequence[Prompt]) -> PromptStream:
    """Return the stream of training prompts. Raises UserError for an invalid file of pass rates."""
    curriculum = None
    if config.data.curriculum is not None:
        curriculum = Curriculum(config.data.curriculum, (prompt.prompt_id for prompt in prompts))
    return PromptStream(prompts, seed=config.seed, shuffle=config.data.shuffle, curriculum=curriculum)


def _skipped(section: str, num: int, reasons: tuple[str, ...]) -> tuple[str, ...]:
    return (f"{section}: {num} malformed lines skipped, first: {reasons[0]}",) if num else ()
