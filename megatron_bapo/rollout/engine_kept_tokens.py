"""The tokens that vLLM has sampled from. Only the engine's own process imports this file."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from vllm.logprobs import FlatLogprobs
from vllm.outputs import CompletionOutput

from megatron_bapo.errors import RunError
from megatron_bapo.kept_tokens import kept_tokens_of

MAX_TIES = 16
"""Tokens beyond `top_k` whose log-probs a CPU engine returns: top-k keeps all that are as likely as the last one."""


@dataclass(frozen=True)
class KeptTokenReader:
    """Reads the kept tokens of vLLM's outputs: those that it returns, or on CPUs those that have a finite log-prob."""

    vocab_size: int
    by_log_probs: bool

    def num_log_probs(self, top_k: int) -> int:
        """Return how many log-probs to ask for, beside that of the sampled token."""
        return min(top_k + MAX_TIES, self.vocab_size) if self.by_log_probs else 0

    def of(self, output: CompletionOutput) -> np.ndarray | None:
        """Return the kept tokens of the output's tokens, if it has any. Raises RunError if some may be missing."""
        if not output.token_ids:
            return None
        if not self.by_log_probs:
            assert output.sampling_mask is not None, "vLLM returns kept tokens"
            return kept_tokens_of(output.token_ids, output.sampling_mask.token_ids)
        assert isinstance(output.logprobs, FlatLogprobs)
        return kept_tokens_of(output.token_ids, self.with_log_probs(output.logprobs))

    def with_log_probs(self, found: FlatLogprobs) -> list[set[int]]:
        """Return the tokens with a finite log-prob, for each sampled token. Raises RunError if some may be missing."""
        sets = list[set[int]]()
        for start, end in zip(found.start_indices, found.end_indices, strict=True):
            pairs = zip(found.token_ids[start:end], found.logprobs[start:end], strict=True)
            sets.append({token for token, log_prob in pairs if log_prob > -math.inf})
            if len(sets[-1]) < self.vocab_size and found.logprobs[end - 1] > -math.inf:
                raise RunError(
                    f"more than {MAX_TIES} tokens are as likely as the last one of rollout.top_k, so that vLLM returns "
                    "only a part of those that it samples from; set another top_k, or "
                    "algorithm.keep_sampling_mask=false"
                )
        return sets
