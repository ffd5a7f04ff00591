"""Creates a small, randomly initialized Hugging Face checkpoint with its own tokenizer, as used by the quickstart."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from transformers.utils.logging import disable_progress_bar

from megatron_bapo.config.model import CreateModelConfig
from megatron_bapo.files import replace_folder
from megatron_bapo.garbage_collection import collector_paused

END_OF_SEQUENCE = "<|endoftext|>"


def byte_tokenizer(prompts: Sequence[str]) -> PreTrainedTokenizerFast:
    """Return a tokenizer with one token per byte and one token for the common prefix of all prompts.

    It can encode any text, and a small model sees every digit and letter as a separate token.
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={byte: index for index, byte in enumerate(alphabet)}, merges=[]))
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = byte_level  # pyright: ignore[reportAttributeAccessIssue]
    tokenizer.decoder = decoders.ByteLevel()  # pyright: ignore[reportAttributeAccessIssue]
    first, last = min(prompts), max(prompts)
    num_common = next((i for i, (a, b) in enumerate(zip(first, last, strict=False)) if a != b), len(first))
    beginning = first[:num_common].rstrip("0123456789")
    if len(beginning) > 1:
        tokenizer.add_tokens([AddedToken(beginning, normalized=False)])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=END_OF_SEQUENCE,
        pad_token=END_OF_SEQUENCE,
        clean_up_tokenization_spaces=False,
    )


def create_checkpoint(folder: Path, settings: CreateModelConfig, prompts: Sequence[str], seed: int) -> None:
    """Write a Qwen3-shaped checkpoint to `folder` atomically; the same arguments give the same bytes."""
    with collector_paused():  # seconds, which a dry run that needs only the tokenizer does not spend
        import torch
        from transformers import Qwen3Config, Qwen3ForCausalLM

    tokenizer = byte_tokenizer(prompts)
    end_of_sequence = int(tokenizer.convert_tokens_to_ids(END_OF_SEQUENCE))  # pyright: ignore[reportArgumentType]
    torch.manual_seed(seed)
    model = Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=settings.vocab_size,
            hidden_size=settings.hidden_size,
            intermediate_size=settings.intermediate_size,
            num_hidden_layers=settings.num_hidden_layers,
            num_attention_heads=settings.num_attention_heads,
            num_key_value_heads=settings.num_key_value_heads,
            head_dim=settings.head_dim,
            max_position_embeddings=settings.max_position_embeddings,
            tie_word_embeddings=settings.tie_word_embeddings,
            initializer_range=settings.initializer_range,
            bos_token_id=None,
            eos_token_id=end_of_sequence,
            pad_token_id=end_of_sequence,
        )
    )
    partial = folder.with_name(folder.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    disable_progress_bar()
    model.save_pretrained(partial)
    tokenizer.save_pretrained(partial)
    replace_folder(folder, partial)
