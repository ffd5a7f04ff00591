import re

import pytest

from megatron_bapo.rewards.math_answer import compute_score


@pytest.mark.parametrize(
    ("answer", "ground_truth"),
    [
        ("42", "42"),
        ("The answer is \\boxed{42}.", "42"),
        ("First \\boxed{41}. Another look at it corrects this: \\boxed{42}", "42"),
        ("12 + 30 = 42", "42"),
        ("\\boxed{3 \\times 10^8}", "3e8"),
        ("\\boxed{300000000}", "3E+8"),
        ("\\boxed{2.75e11}", "2.75 \\times 10^{11}"),
        ("\\boxed{2e^3}", "2e^3"),
        ("\\boxed{6.63e-34}", "6.63 \\times 10^{-34}"),
        ("\\boxed{0.333333}", "\\frac13"),
        ("so it is 1,000", "1000"),
        ("\\boxed{0.5}", "\\frac{1}{2}"),
        ("$\\frac{2}{4}$", "1/2"),
        ("\\boxed{-3.5}", "-3.50"),
        ("\\boxed{(x+1)^2}", "x^2 + 2x + 1"),
        ("\\boxed{42}", "The result is $42$"),
        ("\\boxed{42}", "\\boxed{42}"),
        ("\\boxed{3 \\times 10^5}", "300000"),
        ("\\boxed{50\\%}", "0.5"),
        ("\\boxed{1 + \\sqrt{2}}", "1+\\sqrt{2}"),
        ("\\boxed{2 \\cdot 3 \\cdot x}", "6x"),
        ("\\boxed{18}", '["18"]'),
        ("\\boxed{18}", '["18", "77"]'),
        ("\\boxed{77}", '["18", "77", ""]'),
        ("\\boxed{1,2}", '["1,2"]'),
        ("\\boxed{5}", r'["5\\text{ cm}"]'),
        ("\\boxed{[1,2]}", "[1,2]"),
        ("\\boxed{[1,2)}", "[1,2)"),
        ("\\boxed{[1,2)}", '["[1,2)"]'),
    ],
)
def test_an_equal_answer_scores_one(answer, ground_truth):
    assert compute_score("math", answer, ground_truth)["score"] == 1.0


@pytest.mark.parametrize(
    ("answer", "ground_truth"),
    [
        ("", "42"),
        ("I do not know.", "42"),
        ("\\boxed{24e}", "3e8"),
        ("\\boxed{0.0000002}", "0.0000001"),
        ("\\boxed{0.0}", "\\frac{1}{10^{8}}"),
        ("\\boxed{1.6 \\times 10^{-19}}", "6.63 \\times 10^{-34}"),
        ("142", "42"),
        ("\\boxed{41}, although 42 is near", "42"),
        ("42, no: 43", "42"),
        ("\\boxed{42} \\boxed{43}", "42"),
        ("\\boxed{\\frac{1}{", "\\frac{1}{2}"),
        ("12 + 30", "42"),
        ("12 + 30 =", "42"),
        ("\\boxed{6 \\times 7}", "42"),
        ("50 - 8", "42"),
        ("\\boxed{19}", '["18", "77"]'),
        ("10 + 8", '["18", "77"]'),
        ("\\boxed{1}", "[1,2]"),
    ],
)
def test_another_answer_scores_zero(answer, ground_truth):
    assert compute_score("math", answer, ground_truth)["score"] == 0.0


@pytest.mark.parametrize("ground_truth", ["", "[]", '["", " "]'])
def test_an_unreadable_ground_truth_raises(ground_truth):
    with pytest.raises(ValueError, match=re.escape(f"no number or formula in the ground truth {ground_truth!r}")):
        compute_score("math", "42", ground_truth)


@pytest.mark.parametrize(
    ("answer", "read"),
    [
        ("It is \\boxed{\\frac{2}{4}}.", "1/2"),
        ("$0.5$", "1/2"),
        ("so 1/2", "1/2"),
        ("\\boxed{042}", "42"),
        ("\\boxed{42.0}", "42"),
        ("I do not know.", None),
        (f"\\boxed{{{'9' * 5000}}}", "9" * 5000),
    ],
)
def test_the_score_names_the_extracted_answer_in_canonical_form(answer, read):
    assert compute_score("math", answer, "7")["pred"] == read
