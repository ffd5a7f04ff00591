r"""Quantities with units. math-verify 0.9 cuts an answer at its first \text, and takes single letters for units."""

import pytest

from tests.unit.rewards.answers import pairs, score

EQUAL = r"""
10 | 10~\text{m}
10 | 10~\mathrm{m}
204 | 204~\mathrm{J}
12345 | 12\,345~\mathrm{km}
\$5 | 5~\text{dollars}
20 $cm^{2}$ | 20
4.5e33 | 4.5 \times 10^{33} \mathrm{erg~s}^{-1}
5 | 5 \text{ kg m}^2 \text{ s}^{-2}
5 | 5 \mathrm{~m} / \mathrm{s}^{2}
5 | 5 m/s
5 | 5cm^2
5 | 5 square feet
5 | 5 \text{ k}\Omega
25 | 25^\circ \text{C}
2\pi | 2\pi \text{ units}
a+b | a+b \text{ meters}
3600 | 3.6 \text{ km} = 3600 \text{ m}
2 \text{ hours } 30 \text{ minutes} | 2\text{ hours } 30\text{ minutes}
2 \text{ hours } 30 \text{ minutes} | 2 hours and 30 minutes
5\text{ ft }6\text{ in} | 5 ft 6 in
10/49 meters, 20/49 seconds | \frac{10}{49} meters, \frac{20}{49} seconds
3 \text{ green}, 5 \text{ blue} | 3 green, 5 blue
2l+2w | 2w+2l
\frac{1}{2}ab | \frac{ab}{2}
\frac{a+b}{2}h | \frac{h(a+b)}{2}
x+2h | 2h+x
x^2 + c | x^2+c
\text{even} | \text{even}
n \text{ is even} | n\text{ is even}
"""
DIFFERENT = r"""
2 \text{ hours } 30 \text{ minutes} | 2 \text{ hours } 45 \text{ minutes}
2 \text{ hours } 30 \text{ minutes} | 30 \text{ hours } 2 \text{ minutes}
2 \text{ hours } 30 \text{ minutes} | 2
2 \text{ hours } 30 \text{ minutes} | 30
5\text{ ft }6\text{ in} | 5\text{ ft }9\text{ in}
3 \text{ red}, 5 \text{ blue} | 3
3 \text{ red}, 5 \text{ blue} | 5 \text{ red}, 3 \text{ blue}
n \text{ is even} | n \text{ is odd}
42 | 42 \text{ but maybe } 43 \text{ units}
42 | 42 \text{ but maybe 43}
42 | 42 \text{ or } 43 \text{ units}
2m | 2
2m | 2t
5t | 5
2a+3c | 2a+3t
\frac{1}{2}ab | \frac{1}{2}
\sqrt{2}c | \sqrt{2}
3 | 3 squared
"""


@pytest.mark.parametrize(("ground_truth", "answer"), pairs(EQUAL))
def test_the_same_quantity_scores_one(ground_truth, answer):
    assert score(answer, ground_truth) == 1.0


@pytest.mark.parametrize(("ground_truth", "answer"), pairs(DIFFERENT))
def test_another_quantity_scores_zero(ground_truth, answer):
    assert score(answer, ground_truth) == 0.0
