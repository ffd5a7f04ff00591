"""The section `data`: where prompts come from and how they become tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal, Self

from pydantic import Field, JsonValue, PositiveInt, model_validator

from megatron_bapo.config.section import Fraction, PositiveFraction, Section


class PromptSourceConfig(Section):
    """Source of prompts: exactly one of `path` and `reasoning_gym`."""

    path: Path | None = None
    """A `.jsonl` or `.parquet` file with verl's columns, slime's keys or plain {"prompt", "answer"}."""
    prompt_key: str = "prompt"
    """Column of the prompt."""
    label_key: str | None = None
    """Column of the ground truth; null: the first of `reward_model.ground_truth`, `answer` and `label` that exists."""
    choices_key: str | tuple[str, ...] | None = None
    """Column with the choices of a multiple-choice task, or several columns with one choice each, whose order is then
    shuffled. The choices are added to the prompt as lines `A. ...`, and the ground truth, which is the right choice's
    letter, text or number from 0, becomes its letter."""
    reasoning_gym: dict[str, dict[str, Any]] | None = None
    """Names of reasoning-gym tasks with the parameters of their generators, such as {chain_sum: {max_terms: 2}}. Tasks
    are mixed evenly."""
    size: PositiveInt | None = None
    """Number of prompts: required with `reasoning_gym`, which generates as many; of a file the first ones are used, and
    null uses all."""
    seed: int = 0
    """Seed of the reasoning-gym generators."""
    distinct: bool = True
    """Skip questions that a reasoning-gym generator repeats. With `false`, a question may come with several answers, so
    that a warm start does not show the same answer to it again and again."""
    on_bad_line: Literal["stop", "skip"] = "stop"
    """Handling of malformed lines: `stop` refuses the file, `skip` skips them and reports their number."""

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        if (self.path is None) == (self.reasoning_gym is None):
            raise ValueError(
                "give exactly one of path (a .jsonl or .parquet file) and reasoning_gym (task names); null removes one "
                "that another file sets, such as reasoning_gym: null"
            )
        if self.reasoning_gym is not None and self.size is None:
            raise ValueError("size is required with reasoning_gym, because its generators are endless; set it")
        return self


class CurriculumConfig(Section):
    """Sample prompts by measured difficulty.

    In each epoch a prompt is used with a probability that depends on its pass rate, and otherwise skipped and counted.
    The pass rate is the share of its responses with a reward of 1 or more. A prompt without a pass rate is always used.
    """

    weighting: Literal["variance", "band"] = "variance"
    """Probability for a pass rate p: `variance` uses 4 p (1 - p); `band` uses 1 from `min_pass_rate` to `max_pass_rate`
    and 0 outside."""
    min_pass_rate: Fraction = 0.1
    """Lowest pass rate of the band."""
    max_pass_rate: Fraction = 0.9
    """Highest pass rate of the band."""
    min_probability: PositiveFraction = 0.1
    """Lowest probability of any prompt, so that prompts that were too easy or too hard are measured again."""
    num_groups: PositiveInt = 1
    """Number of a prompt's latest groups over which its pass rate is measured."""
    pass_rates: Path | None = None
    """A `.jsonl` file of {"prompt_id", "pass_rate"} with initial pass rates, used until a prompt has groups of its
    own."""

    @model_validator(mode="after")
    def _is_band(self) -> Self:
        if self.min_pass_rate > self.max_pass_rate:
            raise ValueError(f"need min_pass_rate <= max_pass_rate, got {self.min_pass_rate}, {self.max_pass_rate}")
        return self


class PromptConfig(Section):
    """Rendering of prompts to tokens."""

    max_prompt_length: PositiveInt = 1024
    """Maximum length of a prompt in tokens. A longer prompt is an error before the run starts."""
    chat_template: bool = True
    """Render prompts with the tokenizer's chat template; `false` joins the contents of the messages as plain text."""
    chat_template_kwargs: dict[str, JsonValue] = Field({})
    """Further variables of the chat template, such as `enable_thinking: false` for Qwen3, and `tools`."""
    system_prompt: str | None = None
    """System message for conversations that have none; null: no message is added."""


class DataConfig(PromptConfig):
    """Training prompts (`train`) and held-out prompts (`validation`).

    Training prompts that also occur in `validation` are excluded from training."""

    train: PromptSourceConfig
    validation: PromptSourceConfig | None = None
    shuffle: bool = True
    """Shuffle the training prompts anew in every epoch."""
    curriculum: CurriculumConfig | None = None
