"""Weights in GPU memory, without an engine: shared with another process, quantized, and offloaded to the host."""

import multiprocessing
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from time import perf_counter

import numpy as np
import pytest
import torch

from megatron_bapo.errors import RunError
from megatron_bapo.parallel.platform import (
    free_memory_bytes,
    local_device,
    open_storage,
    release_cached_memory,
    share_storage,
)
from megatron_bapo.trainer.offload import Storages
from megatron_bapo.weight_sync.plan_files import withdraw
from megatron_bapo.weight_sync.shared_parameters import SharedParameters, offer_parameters
from tests.fp8_blocks import quantise
from tests.unit.weight_sync.examples import reading, whole_tensors

GIB = 2**30
SHAPES = {"larger than a bucket": (4096, 512), "odd": (77, 33), "vector": (512,)}
BUCKET_BYTES = 1 << 20
WAIT_S = 120
Figures = Callable[..., None]


def as_bytes(tensor: torch.Tensor) -> np.ndarray:
    return tensor.detach().cpu().flatten().view(torch.uint8).numpy()


def take(folder: Path, version: int, pause_s: float) -> dict[str, np.ndarray]:
    """Read all parameters in an engine process some time after comparing their checksums."""
    source = SharedParameters(folder, 0, open_storage, local_device())
    source.verify(version)
    time.sleep(pause_s)
    found = {name: as_bytes(tensor) for name, tensor in source.read(version)}
    release_cached_memory()
    return found


def test_another_process_reads_every_version_in_place_and_rejects_changed_parameters(
    tmp_path: Path, figures: Figures
) -> None:
    generator = torch.Generator(local_device()).manual_seed(0)
    parameters = {
        name: torch.randn(shape, device=local_device(), generator=generator).bfloat16()
        for name, shape in SHAPES.items()
    }
    plan, free, seconds = whole_tensors(parameters, BUCKET_BYTES), [], 0.0
    assert parameters["larger than a bucket"].nbytes > BUCKET_BYTES
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as engine:
        for version in (1, 2, 3, 4):
            for parameter in parameters.values():
                parameter.normal_(generator=generator)
            offer_parameters(tmp_path, version, plan, 0, reading(parameters), share_storage)
            if version == 4:
                parameters["odd"][76, 32] += 1
                with pytest.raises(RunError, match=r"odd of policy version 4, .* differs from that rank's parameter"):
                    engine.submit(take, tmp_path, version, 0.0).result(WAIT_S)
                break
            start = perf_counter()
            found = engine.submit(take, tmp_path, version, 0.5).result(WAIT_S)
            seconds = perf_counter() - start
            withdraw(tmp_path, version, 0)
            for name, parameter in parameters.items():
                assert np.array_equal(found[name], as_bytes(parameter)), name
            release_cached_memory()
            free.append(free_memory_bytes())
    figures(last_version_s=seconds, memory_kept_mib=(free[0] - free[-1]) / 2**20)
    assert free[0] - free[-1] < 2**20  # the first reading includes the context of the other process


@pytest.mark.parametrize("power_of_two", [False, True])
def test_the_quantizer_gives_the_same_result_on_gpu_and_cpu(power_of_two: bool) -> None:
    """Quantize a matrix with ragged edges and a block of zeros.

    On a GPU, torch divides by a number by multiplying with its reciprocal, so scales differ in the last bit, unless
    they are powers of two. A weight halfway between two numbers then becomes its neighbour.
    """
    weight = torch.randn(1000, 900, generator=torch.Generator().manual_seed(0)) * torch.logspace(-3, 3, 900)
    weight[128:256, 128:256] = 0
    weight = weight.bfloat16()
    numbers, scales = quantise(weight.to(local_device()), power_of_two=power_of_two)
    expected, expected_scales = quantise(weight, power_of_two=power_of_two)
    last_bit = 0.0 if power_of_two else torch.finfo(torch.float32).eps
    torch.testing.assert_close(scales.cpu(), expected_scales, rtol=last_bit, atol=0.0)
    steps = (numbers.cpu().view(torch.uint8).int() - expected.view(torch.uint8).int()).abs()
    assert steps.max() <= (0 if power_of_two else 1)
    assert steps.float().mean() < 0.01


def test_offload_empties_the_gpu_and_restores_every_bit(figures: Figures) -> None:
    release_cached_memory()
    before = torch.cuda.memory_reserved()
    tensors = [torch.randn(GIB // 4, device=local_device()) for _ in range(4)]
    views, copies = [tensor[7:] for tensor in tensors], [tensor.cpu() for tensor in tensors]
    storages, seconds = Storages(tensors), {}
    for _ in range(2):
        start = perf_counter()
        storages.offload()
        seconds["offload"] = perf_counter() - start
        assert torch.cuda.memory_reserved() <= before
        start = perf_counter()
        storages.onload()
        seconds["onload"] = perf_counter() - start
    for tensor, view, copy in zip(tensors, views, copies, strict=True):
        assert torch.equal(tensor.cpu(), copy)
        assert torch.equal(view.cpu(), copy[7:])
    figures(**{f"{name}_gb_s": storages.num_bytes / 1e9 / value for name, value in seconds.items()})
