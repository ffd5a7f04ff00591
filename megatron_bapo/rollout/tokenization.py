"""Tokenize prompts once, before anything is generated."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from megatron_bapo.config.data import PromptConfig
from megatron_bapo.environment_variable import environment_variable
from megatron_bapo.errors import UserError
from megatron_bapo.garbage_collection import collector_paused
from megatron_bapo.records import Prompt
from megatron_bapo.text import without_lone_surrogates

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_SET_HERE: Final = ("messages", "add_generation_prompt")
"""Variables of chat templates that the run sets."""


@dataclass(frozen=True)
class TokenizedPrompt:
    """A prompt and its tokens."""

    prompt: Prompt
    token_ids: np.ndarray
    """int32 [P], at least one token."""


@contextmanager
def transformers_without_torch() -> Iterator[None]:
    """Import transformers in this context as on a machine without torch, for a process that needs tokenizers only.

    If transformers finds torch, loading a tokenizer imports torch, its compiler and model code: 4 s of CPU time and
    330 MB. Has no effect in a process that has imported torch or transformers already.
    """
    if "torch" in sys.modules or "transformers" in sys.modules:
        yield
        return
    with environment_variable("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1"):  # against the one that torch was not found
        sys.modules["torch"] = None  # pyright: ignore[reportArgumentType]
        try:
            yield
        finally:
            del sys.modules["torch"]


def load_tokenizer(model_path: Path) -> PreTrainedTokenizerBase:
    """Load the checkpoint's tokenizer; no code from the checkpoint is run.

    Raises UserError if the folder has no tokenizer, or one without an end-of-sequence token.
    """
    if not model_path.is_dir():
        raise UserError(
            f"there is no folder {model_path} to load the tokenizer from; give a Hugging Face folder (relative paths "
            f"start at {Path.cwd()})"
        )
    with collector_paused():
        from transformers import AutoTokenizer  # this import takes seconds; processes without a tokenizer skip it

    try:
        # Without `mistral_format`, a folder that also has Mistral's tekken.json would not be read as vLLM reads it.
        tokenizer = AutoTokenizer.from_pretrained(
            model_path, local_files_only=True, trust_remote_code=False, mistral_format=False
        )
    except Exception as error:  # tokenizers raises a plain Exception, and transformers any error for a damaged file
        raise UserError(f"no tokenizer can be loaded from {model_path}: {type(error).__name__}: {error}") from None
    if tokenizer.eos_token_id is None:
        raise UserError(f"the tokenizer in {model_path} has no eos_token; set it in tokenizer_config.json")
    return tokenizer


def tokenize(
    prompts: Sequence[Prompt], tokenizer: PreTrainedTokenizerBase, data: PromptConfig
) -> list[TokenizedPrompt]:
    """Render and encode every prompt.

    Raises UserError for a prompt that is empty or longer than `data.max_prompt_length`, and if `data.chat_template` is
    true for a tokenizer without a chat template, or with one that has no variable of `data.chat_template_kwargs`.
    """
    _check_chat_template(tokenizer, data)
    tokenized = [TokenizedPrompt(prompt, np.asarray(_encode(prompt, tokenizer, data), np.int32)) for prompt in prompts]
    unfit = [each for each in tokenized if not 0 < len(each.token_ids) <= data.max_prompt_length]
    if unfit:
        num_first, longest = len(unfit[0].token_ids), max(len(each.token_ids) for each in unfit)
        others = f" (of {len(unfit):,} such prompts the longest has {longest:,})" if len(unfit) > 1 else ""
        raise UserError(
            f"prompt {unfit[0].prompt.prompt_id}, counted from 0, has {num_first:,} tokens; data.max_prompt_length "
            f"allows 1 to {data.max_prompt_length}{others}. Raise it, with the model's context in mind, or remove such "
            "prompts, as tools/prepare_data.py does with --tokenizer and --max-prompt-length"
        )
    return tokenized


def text_of(token_ids: Sequence[int] | np.ndarray, tokenizer: PreTrainedTokenizerBase) -> str:
    """Decode a response, without special tokens."""
    text = tokenizer.decode(token_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)  # pyright: ignore[reportArgumentType]
    assert isinstance(text, str)
    return without_lone_surrogates(text)


def token_counter(model_path: Path, data: PromptConfig) -> Callable[[Prompt], int]:
    """Return a function that counts a prompt's tokens as `tokenize` does.

    Raises UserError as `load_tokenizer` and `tokenize` do.
    """
    tokenizer = load_tokenizer(model_path)
    _check_chat_template(tokenizer, data)
    return lambda prompt: len(_encode(prompt, tokenizer, data))


def _check_chat_template(tokenizer: PreTrainedTokenizerBase, data: PromptConfig) -> None:
    if not data.chat_template:
        return
    if tokenizer.chat_template is None:
        raise UserError(
            "data.chat_template is true, but the tokenizer has no chat template; set data.chat_template=false, or "
            "--no-chat-template of tools/prepare_data.py, to join the messages as plain text"
        )
    template = tokenizer.get_chat_template(tools=data.chat_template_kwargs.get("tools"))  # pyright: ignore[reportArgumentType]
    for name in data.chat_template_kwargs:
        if name in _SET_HERE or not re.search(rf"(?<![\w.]){re.escape(name)}(?!\w)", template):
            raise UserError(
                f"data.chat_template_kwargs has {name}, but must have names that the tokenizer's chat template reads, "
                f"other than {' and '.join(_SET_HERE)}; correct the name or remove it"
            )


def render(prompt: Prompt, tokenizer: PreTrainedTokenizerBase, data: PromptConfig) -> str:
    """Return the text that is encoded: the conversation in the chat template, else its messages line by line.

    Raises UserError as `in_chat_template` does, and if the conversation ends with an answer.
    """
    if data.chat_template:
        name, way_out = f"prompt {prompt.prompt_id}, counted from 0", "Change the prompt or the template"
        if prompt.messages[-1]["role"] == "assistant":
            raise UserError(
                f"{name}, ends with a message of the assistant, which the policy would see before it answers. End "
                "prompts with the question, or set data.chat_template=false to have that message continued"
            )
        return in_chat_template(prompt.messages, tokenizer, data, name, way_out)
    return "\n".join(message["content"] for message in prompt.messages)


def in_chat_template(
    messages: Sequence[dict[str, str]], tokenizer: PreTrainedTokenizerBase, data: PromptConfig, name: str, way_out: str
) -> str:
    """Return a conversation in the tokenizer's chat template, up to the start of the policy's next turn.

    Raises UserError with the conversation's `name` if the template refuses it or contains an error.
    """
    from jinja2 import TemplateError  # after transformers, which loads jinja2 itself

    variables: dict[str, Any] = {**data.chat_template_kwargs, "tokenize": False, "add_generation_prompt": True}
    try:
        return str(tokenizer.apply_chat_template(list(messages), **variables))
    except (TemplateError, TypeError, ValueError) as error:
        roles = ", ".join(message["role"] for message in messages)
        raise UserError(
            f"the tokenizer's chat template fails for {name}, whose messages have the roles {roles}: {error}. "
            f"{way_out}, or set data.chat_template=false"
        ) from None


def _encode(prompt: Prompt, tokenizer: PreTrainedTokenizerBase, data: PromptConfig) -> list[int]:
    return tokenizer.encode(render(prompt, tokenizer, data), add_special_tokens=False)
