import pytest

from megatron_bapo.config.schema import OptimizerConfig, WarmStartConfig
from megatron_bapo.trainer.optimizer import learning_rate, warm_start_learning_rate


def test_the_learning_rate_rises_linearly_and_then_stays():
    settings = OptimizerConfig(lr=1.0, lr_warmup_steps=4)

    assert [learning_rate(settings, update) for update in range(7)] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0, 1.0, 1.0])


def test_without_warm_up_the_first_update_has_the_full_rate():
    assert learning_rate(OptimizerConfig(lr=3e-4, lr_warmup_steps=0), 0) == 3e-4


def test_the_warm_starts_rate_peaks_after_a_tenth_and_falls_towards_zero():
    settings = WarmStartConfig(num_steps=100, lr=1.0)

    rates = [warm_start_learning_rate(settings, step) for step in range(100)]

    assert rates.index(max(rates)) == 10
    assert rates[10] == 1.0
    assert rates[:11] == sorted(rates[:11])
    assert rates[10:] == sorted(rates[10:], reverse=True)
    assert 0.0 < rates[-1] < 1e-3


def test_a_warm_start_of_one_step_learns_at_the_full_rate():
    assert warm_start_learning_rate(WarmStartConfig(num_steps=1, lr=1.0), 0) == 1.0
