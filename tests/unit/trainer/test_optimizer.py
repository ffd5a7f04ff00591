import pytest

from megatron_bapo.trainer.optimizer import learning_rate


def rates(peak: float, num_updates: int, *, num_warmup: int, num_decay: int | None) -> list[float]:
    return [learning_rate(peak, update, num_warmup=num_warmup, num_decay=num_decay) for update in range(num_updates)]


def test_without_a_decay_the_rate_rises_linearly_and_then_stays():
    assert rates(1.0, 7, num_warmup=4, num_decay=None) == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0, 1.0, 1.0])


@pytest.mark.parametrize("num_decay", [None, 1, 100])
def test_without_a_warm_up_the_first_update_has_the_full_rate(num_decay):
    assert learning_rate(3e-4, 0, num_warmup=0, num_decay=num_decay) == 3e-4


def test_with_a_decay_the_rate_peaks_after_the_warm_up_and_falls_to_zero_along_a_cosine():
    values = rates(1.0, 101, num_warmup=10, num_decay=100)

    assert values.index(max(values)) == 10
    assert values[:11] == sorted(values[:11])
    assert values[10:] == sorted(values[10:], reverse=True)
    assert [values[10], values[55], values[100]] == pytest.approx([1.0, 0.5, 0.0])


def test_the_last_update_before_the_end_of_the_decay_still_learns():
    assert 0.0 < learning_rate(1.0, 99, num_warmup=10, num_decay=100) < 1e-3


def test_updates_beyond_the_decay_stay_at_zero():
    assert learning_rate(1.0, 150, num_warmup=10, num_decay=100) == pytest.approx(0.0)


def test_a_warm_up_as_long_as_the_run_never_falls():
    values = rates(1.0, 5, num_warmup=5, num_decay=5)

    assert values == sorted(values)
