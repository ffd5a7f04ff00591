import pytest

from megatron_bapo.planning.hardware import DEVICE_NAMES, peak_flops


@pytest.mark.parametrize(
    ("device", "tflops"),
    [
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA H100 80GB HBM3", 989),
        ("NVIDIA H200", 989),
        ("NVIDIA B200", 2250),
        ("NVIDIA H20", 148),
        ("NVIDIA L40S", 362),
    ],
)
def test_a_gpus_peak_is_found_by_the_name_that_its_driver_gives(device: str, tflops: float) -> None:
    assert peak_flops(device) == tflops * 1e12


@pytest.mark.parametrize(
    "device",
    [
        "NVIDIA H100 PCIe",
        "NVIDIA H100 NVL",
        "NVIDIA GH200 480GB",
        "NVIDIA H200 NVL",
        "NVIDIA A100-SXM4-40GB MIG 1g.5gb",
        "NVIDIA L40",
        "",
    ],
)
def test_the_peak_of_an_unknown_device_is_none(device: str) -> None:
    assert peak_flops(device) is None


def test_every_type_of_gpu_has_a_device_name() -> None:
    assert set(DEVICE_NAMES.values()) == {"A100", "H100", "H200", "B200", "H20", "L40S"}
