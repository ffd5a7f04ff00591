"""The BAPO loss and the chunked log-probs and entropy on a GPU, with torch operators and Triton kernels."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from bench import gpu_kernels
from bench.gpu import copy_bytes_per_s
from megatron_bapo.algorithm.loss_tokens import LossTokens
from megatron_bapo.algorithm.policy_loss import policy_loss
from megatron_bapo.config.algorithm import AlgorithmConfig
from megatron_bapo.model.vocab_parallel import OutputLayer, token_loss
from megatron_bapo.parallel.platform import local_device, runs_triton
from megatron_bapo.trainer.fused_paths import kernel_problem
from tests.tolerances import BF16_GRADIENT_ROUNDING, BF16_LOGITS_ENTROPY, FUSED_LOSS

Figures = Callable[..., None]
NUM_TOKENS = 100_003
SETTINGS = {
    "bapo": AlgorithmConfig(objective="bapo"),
    "dual-clip": AlgorithmConfig(objective="bapo", clip_ratio_c=3.0),
    "sapo": AlgorithmConfig(objective="sapo"),
    "cispo": AlgorithmConfig(objective="cispo"),
}
FUSED = pytest.mark.parametrize("fused", [False, True], ids=["torch", "triton"])
QWEN = gpu_kernels.Size(num_tokens=2048, chunk_size=1024, vocab_size=151_936, hidden_size=1536, num_loss_tokens=0)


def entropy_of(logits_TV: Tensor) -> Tensor:
    log_probs_TV = logits_TV.log_softmax(-1)
    return -(log_probs_TV.exp() * log_probs_TV).sum(-1)


def poison(num_bytes: int = 1 << 30) -> None:
    """Fill the memory from which the next tensors are allocated with NaN."""
    torch.full((num_bytes // 4,), float("nan"), device=local_device())


def test_triton_is_installed_and_its_kernels_agree_with_torch() -> None:
    assert runs_triton()
    assert kernel_problem(torch.bfloat16) is None


@FUSED
@pytest.mark.parametrize("name", SETTINGS)
def test_the_policy_loss_matches_float64_on_fresh_inputs_and_poisoned_memory(
    name: str, fused: bool, figures: Figures
) -> None:
    worst_loss = worst_gradient = 0.0
    for seed in range(3):
        generator = torch.Generator(local_device()).manual_seed(seed)
        noise_T, behaviour_T, advantages_T = torch.randn(3, NUM_TOKENS, device=local_device(), generator=generator)
        behaviour_T = -3 * behaviour_T.abs()
        columns = (behaviour_T, advantages_T, torch.full_like(advantages_T, 1 / NUM_TOKENS))
        results = []
        for dtype, with_kernel in ((torch.float64, False), (torch.float32, fused)):
            current_T = (behaviour_T + 0.3 * noise_T).to(dtype).requires_grad_()
            tokens = LossTokens(*(x.to(dtype) for x in columns))
            low, high = torch.tensor([0.8, 1.2], device=local_device(), dtype=dtype)
            poison()
            loss = policy_loss(current_T, current_T, tokens, low, high, SETTINGS[name], fused=with_kernel)
            (gradient_T,) = torch.autograd.grad(loss, current_T)
            results.append((loss.double(), gradient_T.double()))
        (exact, exact_T), (found, found_T) = results
        # The terms of the sum are about 1 / NUM_TOKENS each and cancel, so their size bounds the error, not the sum's.
        worst_loss = max(worst_loss, (found - exact).abs().item())
        # A ratio within rounding of a bound may fall on either side of it; there are few such tokens.
        differs_T = (found_T - exact_T).abs() * NUM_TOKENS > 10 * FUSED_LOSS * (1 + exact_T.abs() * NUM_TOKENS)
        assert differs_T.sum() <= 10
        worst_gradient = max(worst_gradient, ((found_T - exact_T).abs() * ~differs_T).max().item() * NUM_TOKENS)
    figures(loss_error=worst_loss, gradient_error=worst_gradient)
    assert worst_loss < 10 * FUSED_LOSS


@FUSED
def test_log_probs_entropy_and_gradients_at_a_vocabulary_of_152k_match_float64(fused: bool, figures: Figures) -> None:
    num, device = 256, local_device()
    generator = torch.Generator(device).manual_seed(0)
    hidden_TH = torch.randn(num, QWEN.hidden_size, device=device, generator=generator).bfloat16()
    weight_VH = torch.randn(QWEN.vocab_size, QWEN.hidden_size, device=device, generator=generator)
    weight_VH = weight_VH.mul_(2 * QWEN.hidden_size**-0.5).bfloat16()
    labels_T = torch.randint(QWEN.vocab_size, (num,), device=device, generator=generator)

    def loss_of(log_probs: Tensor, entropy: Tensor) -> Tensor:
        return (log_probs.cos() + 0.1 * entropy.square()).sum()

    exact = [x.double().requires_grad_() for x in (hidden_TH, weight_VH)]
    logits_TV = exact[0] @ exact[1].T
    exact_log_probs_T = logits_TV.log_softmax(-1).gather(1, labels_T[:, None]).squeeze(1)
    exact_gradients = torch.autograd.grad(loss_of(exact_log_probs_T, entropy_of(logits_TV)), exact)
    rounded_entropy_T = entropy_of(logits_TV.detach().bfloat16().double())
    del logits_TV

    poison(8 << 30)
    ours = [x.clone().requires_grad_() for x in (hidden_TH, weight_VH)]
    layer = OutputLayer(ours[1], QWEN.vocab_size, gpu_kernels.ALONE, 100, fused)
    loss, log_probs_T, entropy_T = token_loss(
        ours[0], layer, labels_T, lambda *of: loss_of(*of[:2]), temperature=1.0, entropy_requires_grad=True
    )
    gradients = torch.autograd.grad(loss, ours)
    errors = {
        "log_prob_error": (log_probs_T - exact_log_probs_T).abs().max().item(),
        "entropy_error": (entropy_T - rounded_entropy_T).abs().max().item(),
    }
    for name, found, expected in zip(("hidden", "weight"), gradients, exact_gradients, strict=True):
        errors[f"grad_{name}_error"] = ((found - expected).abs().max() / expected.abs().max()).item()
    figures(**errors)
    # Logits of size up to 10 are rounded to 8 bits of mantissa, a few to the other side than the exact ones.
    assert errors["log_prob_error"] < 10 * 2**-8
    assert errors["entropy_error"] < BF16_LOGITS_ENTROPY
    assert errors["grad_hidden_error"] < BF16_GRADIENT_ROUNDING
    assert errors["grad_weight_error"] < BF16_GRADIENT_ROUNDING


def test_a_chunk_needs_one_tensor_of_logits_and_its_kernels_run_at_memory_bandwidth(figures: Figures) -> None:
    copied, speeds = copy_bytes_per_s(), gpu_kernels.kernel_bytes_per_s(QWEN)
    seconds, peaks = gpu_kernels.token_losses(QWEN)
    logits = QWEN.chunk_size * QWEN.vocab_size * 2
    weights = QWEN.vocab_size * QWEN.hidden_size
    figures(
        copy_gb_s=copied / 1e9,
        sums_gb_s=speeds["sums"] / 1e9,
        gradient_gb_s=speeds["gradient"] / 1e9,
        peak_gib=peaks["Triton"] / 2**30,
        peak_of_torch_gib=peaks["torch"] / 2**30,
        time_of_torch=seconds["Triton"] / seconds["torch"],
    )
    # Besides the logits: the weight twice (its bfloat16 gradient and the product of a chunk) and its gradient in fp32.
    assert peaks["Triton"] - weights * (2 + 2 + 2 + 4) < 1.5 * logits
    assert peaks["Triton"] < peaks["torch"]
    assert min(speeds.values()) > 0.5 * copied
