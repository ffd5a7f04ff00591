"""The tokens that vLLM has sampled from. Only the engine's own process imports this file."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from vllm.logprobs import FlatLogprobs
from vllm.outputs import CompletionOutput

from megatron_bapo.errors import RunError
from megatron_bapo.kept_tokens import kept_tokens_of


@dataclass(frozen=True)
class KeptTokenReader:
    """Reads the kept tokens of vLLM's outputs: those that it returns, or on CPUs those that have a finite log-prob."""

    vocab_size: int
    by_log_probs: bool

    def num_log_probs(self, top_k: int) -> int:
        """Return how many log-probs to ask for, beside that of the sampled token.

        On CPUs top-k keeps all tokens that are as likely as the last one. With logits in bfloat16 they are a few per
        cent of `top_k`.
        """
        return min(top_k + top_k // 8 + 16, self.vocab_size) if self.by_log_probs else 0

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
                    f"vLLM samples from more than the {end - start - 1} most likely tokens whose log-probs it returns, "
                    "because many are as likely as the last one of top_k; set another top_k, or "
                    "algorithm.keep_sampling_mask=false"
                )
        return sets
