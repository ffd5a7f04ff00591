"""Hidden states, output weights and labels, and the results of float64 autograd on the logits of the whole vocabulary.

Legend: T tokens, H hidden size, V the whole vocabulary, without padding.
"""

from dataclasses import dataclass, replace
from itertools import chain

import numpy as np
import torch
from torch import Tensor

from megatron_bapo.model.vocab_shard import KeptTokens
from tests.kept_sets import kept_sets, only_kept

HIDDEN_SIZE = 24


@dataclass(frozen=True)
class TokenExample:
    hidden_TH: Tensor
    weight_VH: Tensor
    labels_T: Tensor
    coefficients_T: Tensor
    sets: list[list[int]] | None = None
    """Tokens that truncated sampling has kept for each of T."""

    @property
    def kept(self) -> KeptTokens | None:
        if self.sets is None:
            return None
        sizes = np.array([len(each) for each in self.sets], np.int64)
        return KeptTokens(np.array([*chain(*self.sets)], np.int32), sizes)

    def loss_of(self, log_probs_C: Tensor, entropy_C: Tensor, tokens: slice) -> Tensor:
        """Return a sum over tokens with different gradients for each, by the log-probs and by the entropy."""
        coefficients_C = self.coefficients_T[tokens].to(log_probs_C)
        return (coefficients_C * log_probs_C.exp()).sum() + (coefficients_C.cos() * entropy_C.square()).sum()


def make_token_example(
    num_tokens: int, vocab_size: int, scale: float = 1.0, *, truncated: bool = False
) -> TokenExample:
    """Create inputs whose logits have a standard deviation of `scale`."""
    generator = torch.Generator().manual_seed(0)
    example = TokenExample(
        torch.randn(num_tokens, HIDDEN_SIZE, generator=generator),
        torch.randn(vocab_size, HIDDEN_SIZE, generator=generator) * (scale / HIDDEN_SIZE**0.5),
        torch.randint(vocab_size, (num_tokens,), generator=generator),
        torch.randn(num_tokens, generator=generator),
    )
    return replace(example, sets=kept_sets(example.labels_T.tolist(), vocab_size)) if truncated else example


def exact_results(example: TokenExample, temperature: float, *, entropy_requires_grad: bool) -> dict[str, Tensor]:
    """Return loss, log-probs, entropy and gradients in float64."""
    hidden_TH, weight_VH = (x.double().requires_grad_() for x in (example.hidden_TH, example.weight_VH))
    logits_TV = hidden_TH @ weight_VH.T / temperature
    kept_TV = logits_TV if example.sets is None else only_kept(logits_TV, example.sets)
    all_log_probs_TV = torch.log_softmax(kept_TV, -1)
    log_probs_T = all_log_probs_TV.gather(1, example.labels_T[:, None]).squeeze(1)
    entropy_T = -(all_log_probs_TV.exp() * all_log_probs_TV.masked_fill(kept_TV.isinf(), 0.0)).sum(-1)
    used_entropy_T = entropy_T if entropy_requires_grad else entropy_T.detach()
    loss = example.loss_of(log_probs_T, used_entropy_T, slice(None))
    loss.backward()
    assert hidden_TH.grad is not None
    assert weight_VH.grad is not None
    return {
        "loss": loss.detach(),
        "log_probs": log_probs_T.detach(),
        "entropy": entropy_T.detach(),
        "grad_hidden": hidden_TH.grad,
        "grad_weight": weight_VH.grad,
    }
