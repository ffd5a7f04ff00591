from typing import Any

import pytest
import torch

from megatron_bapo.model import vocab_kernels
from megatron_bapo.parallel.platform import has_gpu, runs_triton
from megatron_bapo.trainer.fused_paths import kernel_problem

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)


@DTYPES
def test_the_kernels_agree_with_torch_on_this_device(dtype: torch.dtype) -> None:
    assert kernel_problem(dtype) is None


@DTYPES
@pytest.mark.parametrize("fault", ["wrong", "nan", "raises"])
def test_kernels_that_do_not_work_are_detected_and_reported(
    fault: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = vocab_kernels.FusedShard.sums

    def broken(*arguments: Any) -> torch.Tensor:
        if fault == "raises":
            raise RuntimeError("no kernel image is available for execution on the device")
        own_4C = right(*arguments)
        own_4C[2, 3] += 1e-2 if fault == "wrong" else float("nan")
        return own_4C

    monkeypatch.setattr(vocab_kernels.FusedShard, "sums", broken)
    problem = kernel_problem(dtype)
    expected = {
        "wrong": "loss differs by",
        "nan": "differs by nan",
        "raises": "RuntimeError: no kernel image",
    }
    assert problem is not None
    assert expected[fault] in problem


def test_the_triton_interpreter_does_not_enable_the_kernels() -> None:
    assert not runs_triton() or has_gpu()
