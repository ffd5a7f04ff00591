import importlib
from typing import Any

import pytest
import torch

from megatron_bapo.parallel import megatron, megatron_on_cpu
from megatron_bapo.parallel.platform import has_gpu, local_device


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
