from dataclasses import replace

import pytest
import torch

from megatron_bapo.parallel import device_check
from megatron_bapo.parallel.device_check import Trial, count_problem, reading_problems, reading_warnings, trial_problems
from megatron_bapo.parallel.platform import local_device
from megatron_bapo.parallel.telemetry import read_gpu
from tests.unit.parallel.nvml import ScriptedNvml

SOUND = read_gpu(ScriptedNvml(0), handle=None)
BAD = read_gpu(ScriptedNvml(1), handle=None)


def test_a_sound_gpu_passes() -> None:
    assert list(reading_problems(SOUND)) == list(reading_warnings(SOUND)) == []


@pytest.mark.parametrize("index", [2, 3])
def test_values_that_a_gpu_does_not_report_are_no_problem(index: int) -> None:
    found = read_gpu(ScriptedNvml(index), handle=None)
    assert list(reading_problems(found)) == list(reading_warnings(found)) == []


def test_errors_and_pending_repairs_disqualify_a_gpu_and_heat_gives_a_warning() -> None:
    assert list(reading_problems(BAD)) == [
        "2 uncorrected ECC errors since the driver was loaded",
        "a faulty memory row needs a GPU reset to be remapped",
    ]
    assert list(reading_problems(replace(SOUND, repair_failed=True))) == ["remapping a faulty memory row failed"]
    assert list(reading_warnings(BAD)) == ["its clocks are reduced: too hot (hardware slowdown)"]


@pytest.mark.parametrize(
    ("local_rank", "ranks_per_host", "num_visible", "fine"),
    [(0, 1, 1, True), (7, 8, 8, True), (0, 4, 8, True), (7, 8, 7, False), (0, 8, 7, False), (8, 8, 8, False)],
)
def test_every_rank_needs_a_gpu_of_its_own(local_rank: int, ranks_per_host: int, num_visible: int, fine: bool) -> None:
    problem = count_problem(local_rank, ranks_per_host, num_visible)
    assert (problem is None) == fine
    if problem is not None:
        assert f"{ranks_per_host} trainer ranks on this host, but local rank {local_rank} sees {num_visible}" in problem


def test_a_device_that_computes_correctly_passes_the_self_test() -> None:
    trial = device_check.run_trial(local_device(), num_bytes=1 << 20)
    assert trial == Trial(0, device_check.NUM_PRODUCTS * device_check.MATRIX_SIZE**2, 0, 2 << 20)
    assert list(trial_problems(trial)) == []


def test_one_wrong_bit_of_a_product_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    right = torch.Tensor.float

    def broken(tensor: torch.Tensor) -> torch.Tensor:
        values = right(tensor).clone()
        if tensor.dtype == torch.bfloat16:
            values[17, 4] += 1
        return values

    monkeypatch.setattr(torch.Tensor, "float", broken)
    trial = device_check.run_trial(local_device(), num_bytes=1 << 10)
    assert trial.num_wrong_products == device_check.NUM_PRODUCTS
    assert list(trial_problems(trial)) == [
        f"{trial.num_wrong_products} of {trial.num_products} elements of matrix products are wrong"
    ]
    assert list(trial_problems(replace(trial, num_wrong_products=0, num_wrong_bytes=8))) == [
        "8 of 2048 bytes of its memory differ from what was written"
    ]
