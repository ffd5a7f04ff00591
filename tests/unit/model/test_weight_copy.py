from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from bench.allocated_bytes import peak_allocated_bytes
from megatron_bapo.errors import UserError
from megatron_bapo.model.hf_import import SafetensorsFolder
from megatron_bapo.model.weight_copy import CopyResult, copy_tensors, first_difference, plan_files

SHAPES = {str(i): (8, 16) for i in range(5)}
TENSOR_BYTES = 8 * 16 * 4


def nothing(_: int) -> None:
    pass


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tmp_path / "source"
    folder.mkdir()
    generator = torch.Generator().manual_seed(0)
    tensors = {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}
    tensors["0"][0, :4] = torch.tensor([torch.nan, -0.0, torch.inf, 1e-40])
    save_file(tensors, folder / "model.safetensors")
    (tmp_path / "target").mkdir()
    return folder


def copy(source: Path, dtype: torch.dtype = torch.float32, num_tensors_a_file: int = 2, advance=nothing) -> CopyResult:
    limit = num_tensors_a_file * TENSOR_BYTES
    with SafetensorsFolder(source) as tensors:
        target = source.parent / "target"
        return copy_tensors(tensors, SHAPES, target, dtype, max_file_bytes=limit, advance=advance)


def bits(folder: Path) -> dict[str, bytes]:
    files = folder.glob("*.safetensors")
    return {name: x.view(torch.uint8).numpy().tobytes() for file in files for name, x in load_file(file).items()}


def test_files_are_filled_in_order_up_to_the_limit():
    shapes = {"a": (10,), "b": (2, 5), "c": (1,), "d": (100,), "e": (3,)}

    assert [list(file) for file in plan_files(shapes, 4, 80)] == [["a", "b"], ["c"], ["d"], ["e"]]


def test_every_bit_is_copied_including_nan_and_minus_zero(source):
    assert copy(source) == CopyResult(num_tensors=5, num_bytes=5 * TENSOR_BYTES, num_files=3, num_kept_files=0)
    assert bits(source.parent / "target") == bits(source)


def test_values_that_float16_cannot_represent_are_refused(source):
    copy(source, torch.float16)  # infinities of the source are copied
    save_file({name: torch.full(shape, 65520.0) for name, shape in SHAPES.items()}, source / "model.safetensors")
    with pytest.raises(UserError, match="0 has values above 65504, which float16 cannot represent; write bfloat16"):
        copy(source, torch.float16)


def test_a_narrower_dtype_is_rounded_to_nearest_even(source):
    copy(source, torch.bfloat16)

    found, original = bits(source.parent / "target"), bits(source)
    for name in SHAPES:
        wide = np.frombuffer(original[name], np.uint32).astype(np.uint64)
        nearest = (wide + 0x7FFF + (wide >> 16 & 1)) >> 16
        is_nan = (wide & 0x7FFFFFFF) > 0x7F800000
        narrow = np.frombuffer(found[name], np.uint16)
        np.testing.assert_array_equal(narrow[~is_nan], nearest[~is_nan])
        assert ((narrow[is_nan] & 0x7FFF) > 0x7F80).all()


@pytest.mark.parametrize("num_advances", range(1, 11))
def test_an_interrupted_copy_continues(source, num_advances):
    def interrupt(_: int) -> None:
        nonlocal num_advances
        num_advances -= 1
        if num_advances == 0:
            raise KeyboardInterrupt

    num_whole = (num_advances - 1) // 4  # the two tensors of a file are written, then compared
    with pytest.raises(KeyboardInterrupt):
        copy(source, advance=interrupt)
    sizes: list[int] = []
    copied = copy(source, advance=sizes.append)

    assert copied.num_kept_files == num_whole
    assert sum(sizes) == 2 * copied.num_bytes
    assert bits(source.parent / "target") == bits(source)
    assert len(list((source.parent / "target").iterdir())) == 3


@pytest.mark.parametrize("damage", ["flip", "cut", "garbage"])
def test_a_damaged_file_of_an_earlier_copy_is_written_again(source, damage):
    copy(source)
    file = source.parent / "target" / "model-00002-of-00003.safetensors"
    content = bytearray(file.read_bytes())
    content[-5] ^= 1
    file.write_bytes({"flip": content, "cut": content[:-7], "garbage": b"no tensors"}[damage])

    assert copy(source).num_kept_files == 2
    assert bits(source.parent / "target") == bits(source)


def test_leftover_files_of_another_size_are_removed(source):
    copy(source, num_tensors_a_file=1)

    assert copy(source, num_tensors_a_file=5).num_kept_files == 0
    assert [path.name for path in (source.parent / "target").iterdir()] == ["model-00001-of-00001.safetensors"]


def test_the_first_difference_is_named(source):
    copy(source)
    other = source.parent / "other"
    other.mkdir()
    tensors = load_file(source / "model.safetensors")
    tensors["3"][1, 1] += 1e-6
    save_file(tensors, other / "model.safetensors")

    with SafetensorsFolder(source.parent / "target") as written, SafetensorsFolder(other) as changed:
        assert first_difference(written, changed, SHAPES, torch.float32, nothing) == "3"
        assert first_difference(written, written, SHAPES, torch.float32, nothing) is None
        assert first_difference(written, written, {"0": (8, 16)}, torch.float32, nothing) in {"1", "2", "3", "4"}


def test_memory_usage_is_one_tensor_written_and_one_read_back(tmp_path):
    (tmp_path / "source").mkdir()
    (tmp_path / "target").mkdir()
    shapes = {str(i): (64, 1024) for i in range(10)}
    tensors = {name: torch.ones(shape, dtype=torch.bfloat16) for name, shape in shapes.items()}
    save_file(tensors, tmp_path / "source" / "x.safetensors")

    def task() -> None:
        with SafetensorsFolder(tmp_path / "source") as folder:
            target = tmp_path / "target"
            copy_tensors(folder, shapes, target, torch.float32, max_file_bytes=2**19, advance=nothing)

    peak = peak_allocated_bytes(task, (file for file in tmp_path.glob("*/*")))

    assert peak < 2.5 * 64 * 1024 * 4
