r"""Answers on which math-verify 0.9, verl's scorers, Qwen2.5-Math's grader and Hendrycks' comparison disagree.

A wrong response that scores 1 is worse than a right one that scores 0, because a policy learns to write it.
"""

import pytest

from megatron_bapo.rewards.math_answer import compute_score
from tests.unit.rewards.answers import pairs, score

EQUAL = r"""
0.\overline{3} | \frac{1}{3}
\frac{1}{3} | 0.\overline{3}
\frac{41}{333} | 0.\overline{123}
0.1\overline{6} | 1/6
\frac{1}{3} | 0.\bar{3}
1 | 0.\overline{9}
-\frac{7}{3} | -2.\overline{3}
12.5\% | 12.5
12.5 | 12.5\%
12.5\% | 0.125
33\frac{1}{3}\% | \frac{100}{3}
\textbf{(D)}\ 5 | D
\textbf{(D)}\ 5 | 5
\textbf{(D)}\ 5 | \text{(D)}
\textbf{(D) } 12\sqrt{3} | 12\sqrt{3}
D | \textbf{(D)}\ 5
D | \text{D. } 5
5 | \textbf{(D)}\ 5
\textbf{(C)}\ -3 | -3
\textbf{(A)}\ \frac{1}{2} | 0.5
\text{(C) Paris} | C
C | \text{(C) Paris}
(A)\ 17 | A
(A)\ 17 | 17
B | B) 7
B | (B) 7
B | B: 7
B | \textbf{(B)}~7
B | \mathsf{B}
B | B. A cell divides
B | \text{B. A cell divides}
B | (B) I and III
B | B. Vitamin C
B | B: only I
\angle BCA | \angle ACB
\triangle ABC | \triangle BCA
\overline{AB} | BA
\text{BCA} | BCA
\text{A, C} | A, C
A,C | C,A
A,C | AC
ABD | A, B, D
\mathrm{C}_5^2 | \mathrm{C}_5^2
2516_8 | 2516_{8}
\emptyset | \varnothing
\emptyset | \{\}
\mathbb{R} | (-\infty,\infty)
x \ge 3 | [3,\infty)
3+4i | 3+4\mathrm{i}
5i | 5\mathrm{i}
2e | 2\mathrm{e}
3\mathbf{i}+4\mathbf{j} | 3i+4j
204 | \pmb{204}
204 | \mathsf{204}
204 | \mathtt{204}
204 | \texttt{204}
204 | \textsf{204}
204 | \emph{204}
204 | \colorbox{yellow}{204}
204 | \textbf{Answer: } 204
204 | £204
204 | 204€
10 | ¥10
10 | US\$10
10 | \text{\$}10
10 | \pounds 10
\infty | ∞
A | \text{Option A}
101, 102, 103 | 101,102,103
101,102,103 | 101, 102, 103
101,102,103 | 101102103
2:3:4 | 4:6:8
5:3 | 5 \colon 3
5;$\frac{1}{2}$ | 5;\frac{1}{2}
y=c\begin{pmatrix}1\\2\end{pmatrix} | y=c\begin{pmatrix}1\\2\end{pmatrix}
"""
DIFFERENT = r"""
\frac{1}{3} | 0.3\overline{4}
0.\overline{3} | 0.3
1 | 3 \times 0.\overline{3}
12.5 | 0.125
7.5\% | 75
0.5 | 0.5\%
\textbf{(D)}\ 5 | \textbf{(C)}\ 5
\textbf{(D)}\ 5 | C
\textbf{(D)}\ 5 | 4
\textbf{(C)}\ -3 | 3
5 | \textbf{(D)}\ 4
D | \textbf{(D)}\ 5 \textbf{(E)}\ 6
D | \text{(D) or (E)}
D | (A) (B) (C) (D)
D | D. E
D | D. A and E
D | D. A cell, or E. A virus
D | D. 5 or E
D | D: 5, E: 6
D | \text{D. A cell or E}
D | \text{D / E}
D | D) C
5 | (A) 5 (B) 6
E | 2.718281828
\angle BCA | \angle CAB
\angle ABC | \angle BAC
BCA | CAB
ACD | ADC
A,C | A,B
x,y | xy
2516_8 | 2516_7
5 | 101_2
(1,2) | 2,1
\text{even} | neve
0 | \frac{1}{\infty}
3\mathbf{i}+4\mathbf{j} | 3\mathbf{i}-7\mathbf{j}
3\mathbf{i}+4\mathbf{j} | 3
3+4\mathrm{i} | 7
2 | 2\mathrm{e}^2
101, 102, 103 | 101102103
101,102,103 | 103, 102, 104
2:3:4 | 2:3:5
2:3:4 | 2:3
2:3:4 | 1:6
2:3:4 | \frac{1}{6}
1=1 | 2=2
y=c\begin{pmatrix}1\\2\end{pmatrix} | y=c\begin{pmatrix}1\\3\end{pmatrix}
"""
EXPLOITS = [
    (r"The answer is 42, so \boxed{}", "42"),
    (r"\boxed{42} and \boxed{ }", "42"),
    (" ".join(f"\\boxed{{{number}}}" for number in range(50)), "42"),
    (r"\boxed{1,2,3,4,5,6,7,8,9,10,42}", "42"),
    (r"\boxed{\{40,41,42,43\}}", "42"),
    (r"\boxed{42 or 41}", "42"),
    (r"\boxed{A \text{ or } B}", "A"),
    (r"\boxed{A or B}", "A"),
    (r"\boxed{ABCD}", "A"),
    (r"\boxed{\{A,B,C,D\}}", "A"),
    (r"\boxed{A/B/C/D}", "A"),
    (r"\boxed{\textbf{(A)}\ 1 \textbf{(B)}\ 2 \textbf{(C)}\ 3}", "A"),
    (r"\boxed{(A) 5 or 6}", "5"),
    (r"\boxed{x}", "42"),
    (r"\boxed{\frac{42x}{x}}", "42"),
    (r"\boxed{[0,100]}", "42"),
    (r"\boxed{42\%}", "0.5"),
    (r"\boxed{1=2=3=42}", "3"),
]


@pytest.mark.parametrize(("ground_truth", "answer"), pairs(EQUAL))
def test_the_same_answer_in_another_spelling_scores_one(ground_truth, answer):
    assert score(answer, ground_truth) == 1.0


@pytest.mark.parametrize(("ground_truth", "answer"), pairs(DIFFERENT))
def test_an_answer_that_only_looks_alike_scores_zero(ground_truth, answer):
    assert score(answer, ground_truth) == 0.0


@pytest.mark.parametrize(("response", "ground_truth"), EXPLOITS)
def test_a_response_that_covers_many_answers_scores_zero(response, ground_truth):
    assert compute_score("math", response, ground_truth)["score"] == 0.0


@pytest.mark.parametrize(
    "answer", [r"\boxed{5" + "!" * 200 + "}", r"\boxed{1_{" + "1" * 4400 + "}}"], ids=["5!!!", "1_111"]
)
def test_a_degenerate_answer_scores_zero(answer):
    assert compute_score("math", answer, "1101_2")["score"] == 0.0


def test_a_box_with_more_nested_braces_than_are_read_in_a_second_has_no_answer():
    nested = f"\\boxed{{{'{' * 3000}5{'}' * 3000}}}"
    assert compute_score("math", nested, "5") == {"score": 0.0, "pred": None}
