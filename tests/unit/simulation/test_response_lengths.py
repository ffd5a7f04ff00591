import numpy as np
import pytest

from megatron_bapo.simulation.response_lengths import lognormal_lengths


@pytest.mark.parametrize(
    ("mean", "sigma", "limit"), [(100.0, 0.5, 10_000), (300.0, 1.0, 1024), (16_000.0, 1.2, 65_536)]
)
def test_clipped_lognormal_lengths_have_the_requested_mean(mean: float, sigma: float, limit: int):
    lengths = lognormal_lengths(mean, sigma, limit)

    assert lengths.mean() == pytest.approx(mean, rel=0.01)
    assert lengths.max() <= limit
    assert np.log(lengths[lengths < limit]).std() <= sigma
