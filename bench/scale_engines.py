"""Modelled engines in processes of their own, for `bench.rollout_scale`: their requests and responses are real bytes.

Tokens and log-probs are random. A response's length is sampled by its first request, and a policy that continues it
reads how many tokens are left from the response's last token: the vocabulary has a token for every number of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from megatron_bapo.cluster.ray_cluster import create_actor
from megatron_bapo.config.model import CreateModelConfig
from megatron_bapo.model.hf_create import create_checkpoint
from megatron_bapo.rollout.messages import Completion, Generated, GenerationRequest, SequenceScore
from megatron_bapo.simulation.modelled_engine import EngineModel, ModelledEngine, Policy

NUM_BYTES = 256
"""Tokens of single bytes, which come first in the vocabulary and encode the prompts."""
STEP_S = 1e-3
"""Seconds of a decoding step, for any number of sequences."""


@dataclass(frozen=True)
class Linear:
    """Decoding steps that all take the same time."""

    step_s: float

    def seconds(self, num_steps: int, num_sequences: float, num_tokens: float) -> float:
        return num_steps * self.step_s

    def coarse(self, grain: int) -> Linear:
        return Linear(self.step_s * grain)


def word(index: int) -> str:
    """Return the text of a token, a space and three letters, which is as long as the tokens of English text."""
    letters = [chr(ord("a") + index // base % 26) for base in (676 * 26, 676, 26, 1)]
    return " " + "".join(letters if index >= 26**3 else letters[1:])


def create_model(folder: Path, max_length: int) -> None:
    """Write a tiny checkpoint whose vocabulary has a word for every number of tokens that a response may have left."""
    settings = CreateModelConfig(
        num_hidden_layers=1, hidden_size=32, intermediate_size=32, num_attention_heads=1, num_key_value_heads=1,
        head_dim=32, max_position_embeddings=2 * max_length, vocab_size=NUM_BYTES + max_length + 2,
    )  # fmt: skip
    create_checkpoint(folder, settings, ["a", "b"], seed=0)
    names = sorted(pre_tokenizers.ByteLevel.alphabet()) + [word(i).replace(" ", "Ġ") for i in range(max_length + 1)]
    tokenizer = Tokenizer(models.BPE(vocab={name: index for index, name in enumerate(names)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)  # pyright: ignore[reportAttributeAccessIssue]
    tokenizer.decoder = decoders.ByteLevel()  # pyright: ignore[reportAttributeAccessIssue]
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|endoftext|>", clean_up_tokenization_spaces=False
    ).save_pretrained(folder)


def responses(lengths: np.ndarray) -> Policy:
    """Return a policy that writes responses of `lengths` tokens, chosen by the request's seed."""
    words = [word(i) for i in range(int(lengths.max()) + 1)]

    def respond(request: GenerationRequest, position: int, version: int) -> Completion:
        random = np.random.default_rng((request.seed + position, version))
        left = int(request.context[-1][-1]) - NUM_BYTES
        if len(request.context) == 1:  # no part of the response is there yet
            left = int(random.choice(lengths))
        num = min(left, request.max_tokens)
        tokens = np.arange(left - 1, left - 1 - num, -1, dtype=np.int32)
        text = "".join(map(words.__getitem__, tokens.tolist())) if left == num else ""
        log_probs = random.standard_exponential(num, np.float32)
        return Completion(tokens + NUM_BYTES, -log_probs, "stop" if num == left else "length", text)

    return respond


class EngineProcess:
    """Several modelled engines in one Ray actor."""

    def __init__(self, num_engines: int, kv_tokens: int, max_num_seqs: int, lengths: np.ndarray) -> None:
        model = EngineModel(Linear(STEP_S), 0.0, 0.0, kv_tokens, max_num_seqs, load_s=0.1)
        policy = responses(lengths)
        self._engines = [ModelledEngine(f"modelled {i}", model, policy) for i in range(num_engines)]

    async def generate(self, index: int, request: GenerationRequest) -> Generated:
        return await self._engines[index].generate(request)

    async def abort(self, index: int) -> None:
        await self._engines[index].abort()

    async def load_weights(self, index: int, version: int) -> None:
        await self._engines[index].load_weights(version)

    async def progress(self, index: int) -> dict[str, Generated]:
        return await self._engines[index].progress()

    async def most_running(self) -> list[int]:
        """Return the largest number of sequences that each engine has had so far."""
        return [engine.most_running for engine in self._engines]


@dataclass
class RemoteEngine:
    """A modelled engine as the rollout service sees it."""

    name: str
    handle: Any
    """Handle of the `EngineProcess`."""
    index: int
    kv_tokens: int
    policy_version: int = 0

    async def started(self) -> int:
        await self.handle.most_running.remote()
        return self.kv_tokens

    def replacement(self) -> Self:
        raise AssertionError("a modelled engine is never lost")

    async def generate(self, request: GenerationRequest) -> Generated:
        return await self.handle.generate.remote(self.index, request)

    async def abort(self) -> None:
        await self.handle.abort.remote(self.index)

    async def load_weights(self, version: int) -> None:
        await self.handle.load_weights.remote(self.index, version)
        self.policy_version = version

    async def progress(self) -> dict[str, Generated]:
        return await self.handle.progress.remote(self.index)

    async def score(self, token_ids: np.ndarray, num_decoded: int) -> SequenceScore:
        return SequenceScore(self.policy_version, np.zeros(len(token_ids) - 1, np.float32))


def create_engines(
    num_processes: int, num_engines: int, kv_tokens: int, max_num_seqs: int, lengths: np.ndarray
) -> tuple[list[Any], list[RemoteEngine]]:
    """Return the handles of the processes and their engines, which are `num_engines` in all."""
    handles = [
        create_actor(EngineProcess, num_engines // num_processes, kv_tokens, max_num_seqs, lengths, name=f"engines {i}")
        for i in range(num_processes)
    ]
    engines = [
        RemoteEngine(f"engine {i}", handles[i % num_processes], i // num_processes, kv_tokens)
        for i in range(num_engines)
    ]
    return handles, engines
