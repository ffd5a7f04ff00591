import time

import pytest

from megatron_bapo.parallel.telemetry import GpuReading, Telemetry, open_nvml, read_gpu
from tests.unit.parallel.nvml import ScriptedNvml


def reading(index: int = 0) -> GpuReading:
    return read_gpu(ScriptedNvml(index), handle=None)


def test_a_reading_has_every_number_in_its_unit() -> None:
    assert reading() == GpuReading(
        uuid="GPU-6f9c1c56-0c4d-4f3e-9a52-7d1a6f0f2b11",
        name="NVIDIA H200",
        utilization=0.98,
        memory_used_gib=pytest.approx(101.339, abs=1e-3),
        memory_total_gib=pytest.approx(140.4014, abs=1e-3),
        power_w=pytest.approx(642.31),
        temperature_c=61.0,
        sm_clock_mhz=1755.0,
        corrected_ecc=3,
        uncorrected_ecc=0,
        repair_pending=False,
        repair_failed=False,
        slowdowns=(),  # its power limit is the only reason for its clocks
    )


def test_values_that_a_gpu_does_not_report_are_none() -> None:
    sliced, without_ecc = reading(2), reading(3)
    assert (sliced.power_w, sliced.sm_clock_mhz, sliced.uncorrected_ecc) == (pytest.approx(67.03), 1275.0, 0)
    assert (sliced.utilization, sliced.repair_pending, sliced.repair_failed) == (None, None, None)
    assert (without_ecc.utilization, without_ecc.repair_pending) == (0.0, False)
    assert (without_ecc.corrected_ecc, without_ecc.uncorrected_ecc) == (None, None)
    assert sliced.slowdowns == without_ecc.slowdowns == ()


def test_slow_clocks_carry_their_reason() -> None:
    assert reading(1).slowdowns == ("too hot (hardware slowdown)",)


def test_a_gpu_is_read_between_two_calls_of_take_and_not_after_closing() -> None:
    telemetry = Telemetry(reading, every_s=0.005)
    deadline = time.monotonic() + 10
    while len(taken := telemetry.take()) == 0:
        assert time.monotonic() < deadline, "no reading in 10 s"
        time.sleep(0.01)
    telemetry.close()
    telemetry.take()
    time.sleep(0.02)
    assert taken[0] == reading()
    assert telemetry.take() == []


def test_without_a_driver_there_is_no_telemetry() -> None:
    nvml = open_nvml()
    assert nvml is None or nvml.nvmlDeviceGetCount() > 0
