import math

import pytest
import torch

from tests.fp8_blocks import BLOCK, LARGEST, dequantise, quantise, scale_shape

E4M3 = [torch.tensor([bits], dtype=torch.uint8).view(torch.float8_e4m3fn).item() for bits in range(0x7F)]
"""All finite non-negative numbers of e4m3."""


def nearest(value: float) -> float:
    """Return the e4m3 number nearest to a value, with ties to even."""
    bits = min(range(len(E4M3)), key=lambda i: (abs(E4M3[i] - abs(value)), i % 2))
    return math.copysign(E4M3[bits], value)


@pytest.mark.parametrize("power_of_two", [False, True])
def test_every_value_is_rounded_to_the_nearest_number_at_the_scale_of_its_block(power_of_two: bool) -> None:
    """Quantize a ragged matrix and compare block by block in float64."""
    weight = torch.randn(130, 257, generator=torch.Generator().manual_seed(0))
    weight[:128, 128:256] *= 100
    numbers, scales = quantise(weight, power_of_two=power_of_two)
    assert tuple(scales.shape) == scale_shape(130, 257) == (2, 3)
    for i in range(2):
        for j in range(3):
            place = slice(i * BLOCK, (i + 1) * BLOCK), slice(j * BLOCK, (j + 1) * BLOCK)
            block = weight[place].double()
            expected = block.abs().max().item() / LARGEST
            if power_of_two:
                expected = 2.0 ** math.ceil(math.log2(expected))
            assert scales[i, j].item() == pytest.approx(expected, rel=1e-6)
            found = numbers[place].float().flatten().tolist()
            scaled = (block / scales[i, j].double()).flatten().tolist()
            for number, value in zip(found[::41], scaled[::41], strict=True):
                assert abs(number - value) <= abs(nearest(value) - value) * (1 + 1e-5) + 1e-9


def test_a_block_of_zeros_stays_zero_and_has_a_finite_scale() -> None:
    weight = torch.zeros(256, 128)
    weight[:128] = 1.0
    numbers, scales = quantise(weight)
    assert numbers[128:].float().abs().max() == 0
    assert 0 < scales[1, 0] < math.inf
    assert torch.equal(dequantise(numbers, scales), weight)


def test_power_of_two_scales_clip_nothing_and_are_powers_of_two() -> None:
    weight = torch.randn(256, 256, generator=torch.Generator().manual_seed(1)) * torch.logspace(-3, 3, 256)
    weight[0, 128] = 448 * (2**13 + 2**-10)  # its scale is one bit above a power of two
    numbers, scales = quantise(weight, power_of_two=True)
    assert scales[0, 1] == 2**14
    assert torch.equal(torch.frexp(scales).mantissa, torch.full_like(scales, 0.5))
    assert numbers.float().abs().max() <= LARGEST
    # Half a unit in the last of three bits, and the smallest number for values far below the maximum of the block.
    bound = weight.abs() * 2**-4 + scales.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1) * 2**-10
    assert ((dequantise(numbers, scales) - weight).abs() <= bound).all()


def test_scales_of_another_matrix_are_refused() -> None:
    numbers, scales = quantise(torch.ones(129, 128))
    with pytest.raises(AssertionError, match="do not fit a matrix"):
        dequantise(numbers[:128], scales)
