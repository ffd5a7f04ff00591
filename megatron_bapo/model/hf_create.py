"""A small, randomly initialised Hugging Face checkpoint with its own tokenizer: the quickstart's starting point."""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from megatron_bapo.config.schema import CreateModelConfig

END_OF_SEQUENCE = "<|endoftext|>"


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """A byte-level BPE that keeps every digit a token of its own and may merge across spaces.

    Any text can be encoded; phrases that all prompts share become single tokens.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(  # pyright: ignore[reportAttributeAccessIssue]
        [
            pre_tokenizers.Split(Regex(r"[0-9]"), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()  # pyright: ignore[reportAttributeAccessIssue]
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_SEQUENCE],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=END_OF_SEQUENCE,
        pad_token=END_OF_SEQUENCE,
        clean_up_tokenization_spaces=False,
    )


def create_checkpoint(folder: Path, settings: CreateModelConfig, texts: Iterable[str], seed: int) -> None:
    """Write a Qwen3-shaped checkpoint to `folder`, whole or not at all; the same arguments give the same bytes."""
    tokenizer = train_tokenizer(texts, settings.vocab_size)
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
    model.save_pretrained(partial)
    tokenizer.save_pretrained(partial)
    partial.rename(folder)
