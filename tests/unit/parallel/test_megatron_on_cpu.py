import importlib
import importlib.util
from typing import Any

import pytest
import torch

from megatron_bapo.parallel import megatron, megatron_on_cpu
from megatron_bapo.parallel.platform import has_gpu, local_device

OFFLOAD = "megatron.core.optimizer.cpu_offloading.hybrid_optimizer"


def torch_of(megatron_module: str) -> Any:
    return importlib.import_module(megatron_module).torch


@pytest.mark.parametrize("name", ["megatron.core.tensor_parallel.layers", "megatron.core.models.gpt.gpt_model"])
def test_megatron_modules_see_cpu_replacements_only_without_a_gpu(name):
    assert megatron.GPTModel.__module__ == "megatron.core.models.gpt.gpt_model"
    assert (torch_of(name) is torch) == has_gpu()


def test_tensors_that_megatron_creates_on_its_current_device_are_on_the_local_device():
    theirs = torch_of("megatron.core.tensor_parallel.layers")

    made = theirs.zeros(2, device=theirs.cuda.current_device())

    assert made.device.type == local_device().type


def test_the_cpu_replacements_refuse_to_be_installed_after_megatron():
    with pytest.raises(AssertionError, match=r"import it through megatron_bapo\.parallel\.megatron"):
        megatron_on_cpu.install.__wrapped__()


class OnDevice(torch.Tensor):
    """A tensor that says it is on a GPU and whose copy to the host is another tensor."""

    is_cuda = True  # pyright: ignore[reportAssignmentType]

    def cpu(self, *_: Any, **__: Any) -> torch.Tensor:
        return self.as_subclass(torch.Tensor).clone()


def megatrons_own_offload() -> Any:
    """Return Megatron's offloading optimizer as the file defines it, which splits parameters by their device."""
    loaded = importlib.import_module(OFFLOAD)
    spec = importlib.util.spec_from_file_location("megatrons_own_offload", str(loaded.__file__))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.__dict__["torch"] = megatron_on_cpu._torch_for_megatron()
    return module.HybridDeviceOptimizer


def offloaded(optimizer: Any, tensor: type[torch.Tensor]) -> tuple[list[torch.Tensor], Any]:
    generator = torch.Generator().manual_seed(0)
    values = [torch.randn(shape, generator=generator) for shape in [(5, 3), (7,), (4, 4), (2, 3)]]
    dtypes = [torch.bfloat16, torch.float32, torch.bfloat16, torch.bfloat16]
    parameters = [v.to(dtype).as_subclass(tensor) for v, dtype in zip(values, dtypes, strict=True)]
    groups = [
        {"params": parameters[:2], "lr": 1e-2, "weight_decay": 0.1},
        {"params": parameters[2:], "lr": 1e-3, "weight_decay": 0.0},
    ]
    adam = torch.optim.AdamW
    return parameters, optimizer(
        groups, offload_fraction=1.0, cpu_optimizer_cls=adam, gpu_optimizer_cls=adam, param_update_in_fp32=True,
        pin_cpu_grads=False,
    )  # fmt: skip


@pytest.mark.skipif(has_gpu(), reason="with a GPU Megatron's own split is in use")
def test_the_offloaded_optimizer_splits_and_updates_parameters_as_megatrons_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: self)
    theirs, their_optimizer = offloaded(megatrons_own_offload(), OnDevice)
    ours, our_optimizer = offloaded(importlib.import_module(OFFLOAD).HybridDeviceOptimizer, torch.Tensor)
    for optimizer, parameters in ((their_optimizer, theirs), (our_optimizer, ours)):
        assert optimizer.gpu_optimizer is None
        assert len(optimizer.cpu_optimizers) == len(parameters)
        copies = [optimizer.gpu_params_map_cpu_copy[p] for p in parameters]
        assert [optimizer.cpu_copys_map_gpu_param[c] is p for c, p in zip(copies, parameters, strict=True)] == [
            True
        ] * 4
        assert [p in optimizer.param_to_fp32_param for p in parameters] == [True, False, True, True]
        assert {copy.dtype for copy in copies} == {torch.float32}
        assert all(copy.data_ptr() != p.data_ptr() for copy, p in zip(copies, parameters, strict=True))
    generator = torch.Generator().manual_seed(1)
    for _ in range(3):
        for their, our in zip(theirs, ours, strict=True):
            gradient = torch.randn(our.shape, generator=generator).to(our.dtype)
            their.grad, our.grad = gradient.clone().as_subclass(OnDevice), gradient
        before = [our.clone() for our in ours]
        their_optimizer.step()
        our_optimizer.step()
        assert not any(torch.equal(our, old) for our, old in zip(ours, before, strict=True))
        for their, our in zip(theirs, ours, strict=True):
            torch.testing.assert_close(their.as_subclass(torch.Tensor), our, rtol=0, atol=0)
            inner = their_optimizer.param_to_inner_param[their], our_optimizer.param_to_inner_param[our]
            torch.testing.assert_close(*inner, rtol=0, atol=0)
