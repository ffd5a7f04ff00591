r"""Responses with several boxes, and with text around them."""

import pytest

from megatron_bapo.rewards.boxes import last_boxed
from megatron_bapo.rewards.math_answer import compute_score

LOOP = "So we get \\[ x = \\frac{1}{2}\n" + "The answer is \\boxed{5}.\n" * 20_000


@pytest.mark.parametrize(
    ("text", "content"),
    [
        (r"First we get \boxed{41}, but that is wrong: \boxed{42}", "42"),
        (r"\boxed{41}; hmm, no, recomputing, \boxed{42}", "42"),
        (r"\boxed{41} or rather, after a check, \boxed{42}", "42"),
        (r"\boxed{42}. The final answer is $43$", "42"),
        (r"The final answer is $42$. I hope it is correct. No wait: \boxed{43}", "43"),
        (r"$x = \boxed{1}$ and $y_{2} = \boxed{-2}$", "1,-2"),
        (r"\boxed{1}, \boxed{2} and \boxed{3}", "1,2,3"),
        (r"\boxed{3}\text{ or }\boxed{4}", "3,4"),
        (r"\boxed{3} and \boxed{3}", "3"),
        (r"\boxed{1} papers and \boxed{2} bins", "1,2"),
        (r"$$\boxed{(3, 3)} \text{ for part (a) and } \boxed{(1, 1)}$$", "(3, 3),(1, 1)"),
        (r"\boxed{41} is not right and \boxed{42}", "42"),
        (r"\boxed{41} papers. And I check and \boxed{42}", "42"),
        (r"\boxed{42} \boxed{43}", "42,43"),
        (r"\boxed{6 \cdot 7} = \boxed{42}", "42"),
        (r"\boxed{\boxed{5}}", "5"),
        (r"\fbox{5}", "5"),
        (r"\boxed {\left\{ 5 \right.}", r"\left\{ 5 \right."),
        (r"$\boxed{50}$ \%", r"50\%"),
        (r"$\boxed{50\%}$ of", r"50\%"),
        (r"\boxed{5} \text{ cm}", "5"),
        (r"\boxed{42} so \boxed{}", ""),
        (r"\boxed{42} so \boxed{4", ""),
        (f"\\boxed{{{'{' * 10}5{'}' * 10}}}", ""),
        ("42", None),
        (r"\boxed 5", None),
        (LOOP, "5"),
        ("\\boxed{" * 20_000, ""),
        ("\\boxed{1} " * 20_000, "1"),
        (f"\\boxed{{{'x ' * 20_000}}}", ""),
    ],
)
def test_the_last_box_is_found_with_those_of_its_list(text, content):
    assert last_boxed(text) == content


def test_a_response_that_repeats_its_box_behind_an_open_formula_is_read():
    assert compute_score("math", LOOP, "5")["score"] == 1.0
