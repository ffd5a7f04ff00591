"""The rule against a worked case, the gradient of the clipped objective, and the entropy after an actual step.

Shapes: V actions of one state.
"""

import math

import pytest
import torch

from megatron_bapo.algorithm.entropy_clip_rule import Form, has_gradient, sampled_entropy_change

LOW, HIGH = 0.8, 1.2
FORMS: list[Form] = ["gradient", "printed"]


def tensor(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def entropy(logits: torch.Tensor) -> float:
    log_probs = logits.log_softmax(-1)
    return -(log_probs.exp() * log_probs).sum().item()


def objective(logits: torch.Tensor, behaviour: torch.Tensor, advantages: torch.Tensor) -> torch.Tensor:
    ratio = logits.softmax(-1) / behaviour
    return (behaviour * torch.minimum(ratio * advantages, ratio.clamp(LOW, HIGH) * advantages)).sum()


def logit_step(
    log_probs_V: torch.Tensor, advantages_V: torch.Tensor, has_gradient_V: torch.Tensor, form: Form
) -> torch.Tensor:
    """Return the step [V] of one state's logits per unit of the learning rate."""
    probs_V, gain_V = log_probs_V.exp(), advantages_V * has_gradient_V
    step_V = gain_V - (probs_V * gain_V).sum()
    return probs_V * step_V if form == "gradient" else step_V


def entropy_change(log_probs_V: torch.Tensor, step_V: torch.Tensor) -> torch.Tensor:
    """Return the first-order change of the entropy, -Cov_p(log p, step), in nats, 0-d."""
    probs_V = log_probs_V.exp()
    return -(probs_V * (log_probs_V - (probs_V * log_probs_V).sum()) * step_V).sum()


class WorkedCase:
    behaviour = tensor(0.5, 0.3, 0.15, 0.05)
    log_probs = tensor(0.44, 0.30, 0.16, 0.10).log()
    advantages = tensor(-0.44, 0.46, -0.94, 2.06)
    ratio = log_probs.exp() / behaviour


class RandomCase:
    """Create a state whose behaviour policy differs from the current policy."""

    def __init__(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        logits = torch.randn(2, 3 + seed % 20, generator=generator, dtype=torch.float64)
        self.logits, self.behaviour = logits[0], (logits[0] + 0.3 * logits[1]).softmax(-1)
        self.log_probs = self.logits.log_softmax(-1)
        probs = self.log_probs.exp()
        advantages = torch.randn(len(probs), generator=generator, dtype=torch.float64)
        self.advantages = advantages - (probs * advantages).sum()
        self.has_gradient = has_gradient(probs / self.behaviour, self.advantages, LOW, HIGH)

    def step(self, form: Form) -> torch.Tensor:
        return logit_step(self.log_probs, self.advantages, self.has_gradient, form)


CASES = [RandomCase(seed) for seed in range(200)]


def test_the_worked_case_has_the_expected_ratios_gradient_mask_and_constant() -> None:
    case = WorkedCase()
    assert case.ratio.tolist() == pytest.approx([0.88, 1.0, 1.0666667, 2.0])
    has_gradient_V = has_gradient(case.ratio, case.advantages, LOW, HIGH)
    assert has_gradient_V.tolist() == [True, True, True, False]
    assert entropy(case.log_probs) == pytest.approx(1.245895, abs=1e-6)
    step = logit_step(case.log_probs, case.advantages, has_gradient_V, "printed")
    assert (step - case.advantages * has_gradient_V).tolist() == pytest.approx([0.206] * 4)


@pytest.mark.parametrize(
    ("form", "covariance", "change"), [("printed", 0.01175951, -1.1864e-5), ("gradient", -0.00788954, 7.8795e-6)]
)
def test_the_worked_case_has_the_expected_covariance_and_entropy_change(
    form: Form, covariance: float, change: float
) -> None:
    case = WorkedCase()
    step = logit_step(case.log_probs, case.advantages, has_gradient(case.ratio, case.advantages, LOW, HIGH), form)
    assert entropy_change(case.log_probs, step).item() == pytest.approx(-covariance, abs=5e-9)
    measured = entropy(case.log_probs + 1e-3 * step) - entropy(case.log_probs)
    assert measured == pytest.approx(change, rel=1e-4)


def test_a_wider_upper_bound_increases_the_entropy_of_the_worked_case() -> None:
    case = WorkedCase()
    has_gradient_V = has_gradient(case.ratio, case.advantages, LOW, 3.0)
    assert has_gradient_V.all()
    step = logit_step(case.log_probs, case.advantages, has_gradient_V, "printed")
    assert entropy_change(case.log_probs, step).item() == pytest.approx(0.205919, abs=5e-7)


@pytest.mark.parametrize("case", CASES)
def test_the_gradient_form_is_the_clipped_objectives_gradient(case: RandomCase) -> None:
    logits = case.logits.clone().requires_grad_()
    objective(logits, case.behaviour, case.advantages).backward()
    torch.testing.assert_close(case.step("gradient"), logits.grad, rtol=0, atol=1e-14)


@pytest.mark.parametrize("form", FORMS)
def test_predictions_match_finite_differences_with_an_error_of_second_order_in_the_rate(form: Form) -> None:
    for case in CASES:
        step, before = case.step(form), entropy(case.logits)
        predicted = entropy_change(case.log_probs, step).item()
        rate = 1e-5
        central = (entropy(case.logits + rate * step) - entropy(case.logits - rate * step)) / (2 * rate)
        assert central == pytest.approx(predicted, abs=2e-9)
        small, large = (abs(entropy(case.logits + r * step) - before - r * predicted) for r in (1e-3, 2e-3))
        assert large < 2e-3**2 * 10
        assert large == pytest.approx(4 * small, rel=0.05, abs=1e-8)


def test_the_printed_form_is_wrong_for_a_plain_gradient_step() -> None:
    plain, printed = (
        torch.stack([entropy_change(case.log_probs, case.step(form)) for case in CASES]) for form in FORMS
    )
    assert 0.02 < (plain.sign() != printed.sign()).double().mean() < 0.2
    assert 3 < (printed / plain).abs().median() < 20


@pytest.mark.parametrize("form", FORMS)
def test_the_expectation_over_sampled_tokens_is_the_covariance_without_the_constant(form: Form) -> None:
    for case in CASES:
        entropies = torch.full_like(case.log_probs, entropy(case.logits))
        estimates = sampled_entropy_change(
            case.log_probs, case.behaviour.log(), entropies, case.advantages, tensor(LOW)[0], tensor(HIGH)[0], form
        )
        gain = case.advantages * case.has_gradient
        without_constant = case.log_probs.exp() * gain if form == "gradient" else gain
        expected = entropy_change(case.log_probs, without_constant)
        assert (case.behaviour * estimates).sum().item() == pytest.approx(expected.item(), abs=1e-12)
        if form == "printed":
            assert expected.item() == pytest.approx(entropy_change(case.log_probs, case.step(form)).item(), abs=1e-12)


def test_a_token_without_a_finite_estimate_contributes_zero() -> None:
    log_probs, behaviour = tensor(-1.0, math.nan, -1.0), tensor(-1.0, -1.0, -1.0)
    advantages = tensor(1.0, 1.0, math.inf)
    found = sampled_entropy_change(
        log_probs, behaviour, torch.zeros(3), advantages, tensor(LOW)[0], tensor(HIGH)[0], "printed"
    )
    assert found.tolist() == [1.0, 0.0, 0.0]
