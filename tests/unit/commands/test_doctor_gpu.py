from megatron_bapo.commands import doctor_gpu
from megatron_bapo.parallel.telemetry import read_gpu
from tests.unit.parallel.nvml import ScriptedNvml

SOUND, BAD, SLICE = (read_gpu(ScriptedNvml(index), handle=None) for index in range(3))


def test_a_gpu_that_torch_cannot_use_is_a_problem() -> None:
    finding = doctor_gpu.accelerator(False, [SOUND], "580.95", "2.13.0+cpu")
    assert finding.status == "problem"
    assert finding.found.startswith("1 GPU: NVIDIA H200 with 140 GiB; driver 580.95, but torch 2.13.0+cpu")
    assert "requirements.txt" in finding.advice
    assert doctor_gpu.accelerator(True, [SOUND], "580.95", "2.13.0").status == "ok"
    assert doctor_gpu.accelerator(True, None, None, "2.13.0").status == "ok"
    assert "CPU cores (gloo)" in doctor_gpu.accelerator(False, None, None, "2.13.0+cpu").found


def test_every_unhealthy_gpu_has_a_row_with_advice() -> None:
    problem, warning, sound = doctor_gpu.gpu_health([SOUND, BAD, SLICE])
    assert (problem.name, problem.status, warning.status, sound.status) == ("GPU 1", "problem", "warning", "ok")
    assert BAD.uuid in problem.found
    assert "2 uncorrected ECC errors" in problem.found
    assert f"--gpu-reset -i {BAD.uuid}" in problem.advice
    assert "too hot" in warning.found
    assert sound.found.startswith("2 of 3 ")
    assert list(doctor_gpu.gpu_health([])) == []


def test_fused_paths_are_named_by_what_is_installed() -> None:
    everything = {"transformer-engine": "2.20.2", "triton": "3.7.1"}
    found = doctor_gpu.fused_paths(everything, gpu=True, apex=True).found
    assert found.startswith("Adam: Transformer Engine 2.20.2; norms: Transformer Engine 2.20.2 or")
    assert found.endswith("loss: Triton 3.7.1")
    assert "Adam: apex; norms: torch;" in doctor_gpu.fused_paths({}, gpu=True, apex=True).found
    on_cpu = doctor_gpu.fused_paths(everything, gpu=False, apex=True).found
    assert on_cpu == "Adam: torch; norms: torch; log-probs, entropy and loss: torch"
