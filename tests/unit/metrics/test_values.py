import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_bapo.metrics.values import Last, Max, Mean, Metric, Sum, from_vectors, merge, scalars, to_vectors

finite = st.floats(-1e6, 1e6)


def reduce_over_ranks(ranks: list[dict[str, Metric]]) -> list[dict[str, float]]:
    """Reduce the ranks' metrics with one SUM and one MAX all-reduce."""
    packed = [to_vectors(metrics) for metrics in ranks]
    sums = np.sum([vector for vector, _ in packed], axis=0)
    maxima = np.max([vector for _, vector in packed], axis=0)
    return [scalars(from_vectors(metrics, sums, maxima)) for metrics in ranks]


def test_every_metric_reduces_over_micro_batches_as_its_type_says():
    merged = merge(
        [
            {"loss": Mean(6.0, 2.0), "tokens": Sum(2.0), "longest": Max(7.0), "lr": Last(0.1)},
            {"loss": Mean(4.0, 8.0), "tokens": Sum(8.0), "longest": Max(5.0), "lr": Last(0.2)},
        ]
    )
    assert scalars(merged) == {"loss": 1.0, "tokens": 10.0, "longest": 7.0, "lr": 0.2}


def test_a_metric_of_one_micro_batch_only_is_kept():
    assert merge([{"a": Sum(1.0)}, {"b": Sum(2.0)}]) == {"a": Sum(1.0), "b": Sum(2.0)}


def test_two_reductions_under_one_name_are_refused():
    with pytest.raises(AssertionError, match="loss is Mean in one part and Sum in another"):
        merge([{"loss": Mean(1.0, 1.0)}, {"loss": Sum(1.0)}])


def test_a_mean_of_nothing_is_nan():
    assert math.isnan(scalars({"loss": Mean(0.0, 0.0)})["loss"])


@pytest.mark.parametrize("values", [(math.nan, 1.0), (1.0, math.nan)])
def test_a_maximum_does_not_hide_a_nan(values: tuple[float, float]):
    assert math.isnan(scalars(merge([{"norm": Max(value)} for value in values]))["norm"])


@given(st.lists(st.tuples(finite, st.floats(1.0, 1e3), finite, finite), min_size=1, max_size=4))
def test_reducing_over_ranks_equals_merging_on_one(parts: list[tuple[float, float, float, float]]):
    ranks: list[dict[str, Metric]] = [
        {"mean": Mean(total, weight), "sum": Sum(value), "max": Max(peak), "last": Last(0.5)}
        for total, weight, value, peak in parts
    ]
    expected = scalars(merge(ranks))
    for reduced in reduce_over_ranks(ranks):
        assert reduced == pytest.approx(expected, rel=1e-12, abs=1e-6)


def test_the_order_in_which_a_rank_recorded_its_metrics_does_not_matter():
    first: dict[str, Metric] = {"a": Sum(1.0), "b": Mean(1.0, 1.0), "c": Max(3.0)}
    second: dict[str, Metric] = {"c": Max(2.0), "b": Mean(3.0, 1.0), "a": Sum(2.0)}
    assert reduce_over_ranks([first, second]) == [{"a": 3.0, "b": 2.0, "c": 3.0}] * 2


@pytest.mark.parametrize("other", [{"b": Max(1.0)}, {"a": Last(1.0)}], ids=["other name", "other reduction"])
def test_ranks_with_different_metrics_are_detected(other: dict[str, Metric]):
    local: dict[str, Metric] = {"a": Max(1.0)}
    with pytest.raises(AssertionError, match=r"the ranks packed different metrics; this one packed \['a'\]"):
        reduce_over_ranks([local, other])
