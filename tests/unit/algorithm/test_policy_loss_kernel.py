"""The kernel against the float64 loss, on a GPU if there is one and otherwise in Triton's interpreter."""

import math
from dataclasses import fields
from pathlib import Path

import pytest
import torch
from torch import Tensor

from megatron_bapo.algorithm import policy_loss_kernel
from megatron_bapo.algorithm.loss_tokens import LossTokens
from megatron_bapo.algorithm.policy_loss import policy_loss
from megatron_bapo.config.algorithm import AlgorithmConfig, DistillationConfig
from megatron_bapo.parallel.platform import local_device
from tests.tolerances import FUSED_LOSS

NAN, INF = math.nan, math.inf
LOW, HIGH = 0.7, 1.3
BAPO = AlgorithmConfig(objective="bapo")
DISTILLATION = DistillationConfig(teacher=Path("teacher"), coef=0.5, max_ratio=1.5)
SETTINGS = {
    "bapo": BAPO,
    "dual-clip": BAPO.model_copy(update={"clip_ratio_c": 3.0}),
    "gspo": AlgorithmConfig(objective="gspo", loss_agg_mode="seq-mean-token-mean"),
    "cispo": AlgorithmConfig(objective="cispo"),
    "sapo": AlgorithmConfig(objective="sapo", tau_neg=1.4),
    "distill": AlgorithmConfig(objective="distill", distillation=DISTILLATION),
    "bapo-and-distill": BAPO.model_copy(update={"distillation": DISTILLATION, "clip_ratio_c": 3.0}),
    "function-and-distill": AlgorithmConfig(
        objective="function", function="tests.user_functions:ppo", distillation=DISTILLATION
    ),
    "entropy-and-kl": BAPO.model_copy(update={"entropy_coeff": 0.1, "kl_loss_coef": 0.2}),
    "unbiased-kl": BAPO.model_copy(update={"kl_loss_coef": 0.2, "kl_loss_unbiased": True}),
}


def random_tokens(num: int, *, corrected: bool, of_sequences: bool) -> tuple[Tensor, Tensor, LossTokens]:
    """Return current log-probs, entropy and the other inputs, float32; the first tokens have unusable values."""
    generator = torch.Generator().manual_seed(num)
    current, behaviour, advantages, weights, entropy, reference, sequence, teacher = torch.randn(
        8, num, generator=generator
    )
    behaviour = -behaviour.abs() * 3
    current, weights = (behaviour + 0.5 * current).clone(), weights.abs() + 0.1
    correction = torch.rand(num, generator=generator) * 2
    if num > 12:
        current[0], behaviour[1], advantages[2], weights[3], weights[4] = NAN, NAN, INF, NAN, 0.0
        current[5], behaviour[6], advantages[7] = -INF, -INF, 0.0
        current[8], behaviour[8], current[9], behaviour[9] = -1.0, -30.0, -30.0, -1.0
        correction[10], correction[11], advantages[12], teacher[12] = 0.0, NAN, -2.0, NAN
    return (
        current,
        entropy,
        LossTokens(
            behaviour,
            advantages,
            weights,
            correction if corrected else None,
            reference_log_probs_T=-reference.abs(),
            sequence_log_ratio_T=0.3 * sequence if of_sequences else None,
            teacher_log_probs_T=-3 * teacher.abs(),
        ),
    )


def loss_and_gradients(
    current: Tensor, entropy: Tensor, tokens: LossTokens, settings: AlgorithmConfig, dtype: torch.dtype, *, fused: bool
) -> tuple[Tensor, Tensor, Tensor]:
    device = local_device()
    current, entropy = (x.to(device, dtype).requires_grad_() for x in (current, entropy))
    columns = (getattr(tokens, field.name) for field in fields(tokens))
    tokens = LossTokens(*(None if x is None else x.to(device, dtype) for x in columns))  # pyright: ignore[reportArgumentType]
    low, high = (torch.tensor(x, device=device, dtype=dtype) for x in (LOW, HIGH))
    loss = policy_loss(current, entropy, tokens, low, high, settings, fused=fused)
    gradients = torch.autograd.grad(0.5 * loss, (current, entropy), materialize_grads=True)
    return loss.detach().double().cpu(), *(gradient.double().cpu() for gradient in gradients)


@pytest.mark.parametrize("num", [0, 1, 77])
@pytest.mark.parametrize("corrected", [False, True])
@pytest.mark.parametrize("name", SETTINGS)
def test_loss_and_gradient_match_float64(name: str, corrected: bool, num: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(policy_loss_kernel, "BLOCK", 32)
    given = random_tokens(num, corrected=corrected, of_sequences=name == "gspo")

    exact = loss_and_gradients(*given, SETTINGS[name], torch.float64, fused=False)
    found = loss_and_gradients(*given, SETTINGS[name], torch.float32, fused=True)

    for ours, theirs in zip(found, exact, strict=True):
        assert theirs.isfinite().all()
        torch.testing.assert_close(ours, theirs, rtol=FUSED_LOSS, atol=FUSED_LOSS)
    assert num < 77 or 0 < (exact[1] == 0).sum() < num


def test_the_gradient_at_a_bound_matches_torch() -> None:
    """Compare ratios exactly at the clip bounds, the dual bound and the limits of the log-ratio clamp."""
    behaviour, advantages = torch.zeros(8), torch.tensor([1.0, -1.0, 1.0, -1.0, -1.0, 1.0, -1.0, 0.0])
    log_ratios = torch.tensor([0.0, 0.0, 0.0, 0.0, 0.0, 20.0, -20.0, 0.0])
    tokens = LossTokens(behaviour, advantages, torch.ones(8))
    settings = BAPO.model_copy(update={"clip_ratio_c": 1.0})
    ends = [torch.tensor(x, device=local_device()) for x in (1.0, 1.0)]
    gradients = []
    for fused in (False, True):
        current = log_ratios.to(local_device()).requires_grad_()
        on_device = LossTokens(*(x.to(local_device()) for x in (behaviour, advantages, tokens.weights_T)))
        policy_loss(current, current, on_device, ends[0], ends[1], settings, fused=fused).backward()
        gradients.append(current.grad)
    assert torch.equal(*gradients)
