import numpy as np
import pytest

from megatron_bapo.rollout.answer_lengths import lognormal_lengths, recorded_lengths


@pytest.mark.parametrize(
    ("mean", "sigma", "limit"), [(100.0, 0.5, 10_000), (300.0, 1.0, 1024), (16_000.0, 1.2, 65_536)]
)
def test_lognormal_lengths_have_the_mean_that_is_asked_for_after_they_are_cut(mean: float, sigma: float, limit: int):
    lengths = lognormal_lengths(mean, sigma, limit)

    assert lengths.mean() == pytest.approx(mean, rel=0.01)
    assert lengths.max() <= limit
    assert np.log(lengths[lengths < limit]).std() <= sigma


def test_recorded_lengths_have_the_tail_that_the_run_had():
    rng = np.random.default_rng(0)
    batches = np.exp(rng.normal(4.0, 0.8, (400, 32)))

    lengths = recorded_lengths(batches.mean(), batches.max(1).mean(), 0.0, 32, 100_000)

    drawn = rng.choice(lengths, (400, 32))
    assert drawn.mean() == pytest.approx(batches.mean(), rel=0.05)
    assert drawn.max(1).mean() == pytest.approx(batches.max(1).mean(), rel=0.05)


def test_recorded_lengths_that_were_cut_off_are_cut_off_as_often():
    lengths = recorded_lengths(200.0, 512.0, 0.1, 32, 512)

    assert (lengths == 512).mean() == pytest.approx(0.1, abs=0.01)
    assert lengths.mean() == pytest.approx(200.0, rel=0.01)
