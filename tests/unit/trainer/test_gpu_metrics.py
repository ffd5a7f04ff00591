from megatron_bapo.metrics.values import Max, Mean, Sum, merge, scalars
from megatron_bapo.parallel.telemetry import read_gpu
from megatron_bapo.trainer.gpu_metrics import gpu_metrics, has_value, with_per_rank_metrics
from tests.unit.parallel.nvml import ScriptedNvml

GIB = 2**30
FIRST, SECOND, SLICED = (read_gpu(ScriptedNvml(index), handle=None) for index in range(3))


def test_metrics_of_ranks_reduce_to_means_maxima_and_sums_of_errors() -> None:
    ranks = [gpu_metrics([FIRST, FIRST], (3 * GIB, 4 * GIB)), gpu_metrics([SECOND], (5 * GIB, 5 * GIB))]
    found = scalars(merge(ranks))
    assert {name: round(value, 3) for name, value in found.items()} == {
        "perf/gpu_utilization": 0.987,
        "perf/gpu_memory_used_gib": 101.339,
        "perf/gpu_power_w": 528.54,
        "perf/gpu_temperature_c": 89.0,
        "perf/gpu_sm_clock_mhz": 1285.0,
        "perf/gpu_slowed": 0.333,
        "perf/gpu_ecc_corrected": 815.0,
        "perf/gpu_ecc_uncorrected": 2.0,
        "perf/max_memory_allocated_gb": 5.0,
        "perf/max_memory_reserved_gb": 5.0,
    }


def test_a_rank_without_readings_has_the_same_names_and_metrics_without_a_value_are_omitted() -> None:
    told, untold = gpu_metrics([FIRST], (0, 0)), gpu_metrics([], (0, 0))
    assert {n: type(m) for n, m in told.items()} == {n: type(m) for n, m in untold.items()}
    assert merge([told, untold])["perf/gpu_power_w"] == told["perf/gpu_power_w"]
    assert not has_value(gpu_metrics([SLICED], (0, 0))["perf/gpu_utilization"])
    assert [has_value(metric) for metric in (Mean(0.0, 0.0), Max(-float("inf")), Sum(0.0), Mean(0.0, 1.0))] == [
        False,
        False,
        True,
        True,
    ]


def test_per_rank_metrics_are_added_to_those_of_all_ranks() -> None:
    own = [gpu_metrics([FIRST], (GIB, GIB)), gpu_metrics([SECOND], (2 * GIB, 2 * GIB))]
    found = scalars(merge(with_per_rank_metrics(metrics, rank, len(own)) for rank, metrics in enumerate(own)))
    for name in own[0]:
        for rank, metrics in enumerate(own):
            assert found[f"{name}/rank_{rank}"] == scalars(metrics)[name]
    assert found["perf/gpu_temperature_c"] == 89.0
    assert with_per_rank_metrics(own[0], 0, num_ranks=1) == own[0]
