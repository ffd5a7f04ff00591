"""Hidden states, output weights and labels, and the results of float64 autograd on the logits of the whole vocabulary.

Legend: T tokens, H hidden size, V the whole vocabulary, without padding.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

HIDDEN_SIZE = 24


@dataclass(frozen=True)
class TokenExample:
    hidden_TH: Tensor
    weight_VH: Tensor
    labels_T: Tensor
    coefficients_T: Tensor

    def loss_of(self, log_probs_C: Tensor, entropy_C: Tensor, tokens: slice) -> Tensor:
        """Return a sum over tokens with different gradients for each, by the log-probs and by the entropy."""
        coefficients_C = self.coefficients_T[tokens].to(log_probs_C)
        return (coefficients_C * log_probs_C.exp()).sum() + (coefficients_C.cos() * entropy_C.square()).sum()


def make_token_example(num_tokens: int, vocab_size: int, scale: float = 1.0) -> TokenExample:
    """Create inputs whose logits have a standard deviation of `scale`."""
    generator = torch.Generator().manual_seed(0)
    return TokenExample(
        torch.randn(num_tokens, HIDDEN_SIZE, generator=generator),
        torch.randn(vocab_size, HIDDEN_SIZE, generator=generator) * (scale / HIDDEN_SIZE**0.5),
        torch.randint(vocab_size, (num_tokens,), generator=generator),
        torch.randn(num_tokens, generator=generator),
    )


def exact_results(example: TokenExample, temperature: float, *, entropy_requires_grad: bool) -> dict[str, Tensor]:
    """Return loss, log-probs, entropy and gradients in float64."""
    hidden_TH, weight_VH = (x.double().requires_grad_() for x in (example.hidden_TH, example.weight_VH))
    all_log_probs_TV = torch.log_softmax(hidden_TH @ weight_VH.T / temperature, -1)
    log_probs_T = all_log_probs_TV.gather(1, example.labels_T[:, None]).squeeze(1)
    entropy_T = -(all_log_probs_TV.exp() * all_log_probs_TV).sum(-1)
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
