r"""Responses that only restate their task, which math-verify would work out, and genuine ones in their many spellings.

The tasks follow the grammar of latex2sympy2_extended 1.11 (its PS.g4), construct by construct. In the tables responses
are separated by at least two spaces or by a new line.
"""

import re

import pytest

from megatron_bapo.rewards.math_answer import compute_score

# Arithmetic, functions and operators whose value is the ground truth.
TASKS = {
    "46": r"""
        12+34  50-4  2*23  2 \times 23  2 \cdot 23  92/2  92 \div 2  92:2  92÷2  2×23  2⋅23  92∕2  12∔34  2∗23
        \frac{92}{2}  \dfrac{92}{2}  \tfrac{92}{2}  \cfrac{92}{2}  \frac{46 \cdot 3}{3}  \frac{46 \cdot 1}{1}
        \frac{\frac{92}{1}}{2}  \frac{4.6}{0.1}  \frac{23}{\frac{1}{2}}  92 \cdot \frac{1}{2}  92 \cdot 0.5
        92 \cdot 50\%  (12)(34)  [12][34]  {12}{34}  12\,34  12 34  12\;34  (2)*(23)  2(23)  45\frac{2}{2}  40 6
        12 \quad 34  12~34  |12+34|  |46|  |-46|  \lvert -46 \rvert  \vert -46 \vert  \left|12+34\right|  -(-46)  --46
        46+0  46 \cdot 1  \lfloor 46.7 \rfloor  \lceil 45.2 \rceil  \llcorner 46.7 \lrcorner  \ulcorner 45.2 \urcorner
        \floor(46.7)  \ceil(45.2)  \operatorname{floor}(46.7)  \operatorname{ceil}(45.2)
        \left\lfloor \frac{93}{2} \right\rfloor  46^1  2^5+2^3+6  \sqrt{2116}  \sqrt[3]{97336}  2116^{1/2}  2116^{0.5}
        \sqrt{46}\sqrt{46}  \sqrt{46}^2  e^{\ln 46}  \exp(\ln 46)  \ln(e^{46})  \ln e^{46}  \log_{2}(2^{46})
        \log 10^{46}  \phantom{46}  46^T  46!!/46!!  \max(12,46)  \min(46,50)  \gcd(92,138)
        \operatorname{gcd}(92,138)  \lcm(2,23)  \operatorname{lcm}(2,23)  \sum_{k=1}^{46} 1  \sum_{k=4}^{8} k + 16
        \prod_{k=1}^{1} 46  \int_0^{46} 1 dx  \int_0^1 46 dx  \lim_{x \to 46} x  \lim_{x \to 0} (46+x)  x|_{x=46}
        \left. x^2 \right|_{x=6} + 10  \frac{d}{dx} 46x  \begin{vmatrix} 12 & -2 \\ 17 & 1 \end{vmatrix}
        \det\begin{pmatrix} 12 & -2 \\ 17 & 1 \end{pmatrix}  \det(\begin{bmatrix} 46 \end{bmatrix})
        \operatorname{trace}(\begin{pmatrix} 12 & 0 \\ 0 & 34 \end{pmatrix})
        \operatorname{tr}(\begin{pmatrix} 12 & 0 \\ 0 & 34 \end{pmatrix})  46\sin\frac{\pi}{2}  46\cos 0  46\cos(0)
        46\tan\frac{\pi}{4}  46\cosh 0  46e^0  46\pi/\pi  \frac{46\pi}{\pi}  46\sqrt{2}/\sqrt{2}  46+x-x
        \frac{46x}{x}  46(\sin^2 1+\cos^2 1)  12+34=12+34  46=12+34  12+34+0i  \left(12+34\right)  12+34 \text{ cm}
        12+34^\circ  x=12+34  y = 2\cdot 23  f(2)=12+34  a+b=12+34  x \in \{12+34\}  \{12+34\}  x=12+34 \approx 46
        12+34 \approx 46  12+34 \pmod{100}  x \equiv 12+34 \pmod{100}  \boxed{12+34}  (12+34, 12+34)  \frac{12+34}{1}
        4600\%+0  **12+34**  \bf 12+34.  \mbox{12+34}  \underline{12+34}  \large 12+34  \bm{12+34}
    """,
    "6": r"""
        \gcd(12,18)  \text{gcd}(12,18)  3!  \binom{4}{2}  \tbinom{4}{2}  {4 \choose 2}  \Gamma(4)  \lcm(2,3)
        \log_2 64  1+2+3  \sum_{i=1}^3 i  \prod_{i=1}^3 i  \int_0^2 (x+2) dx  \int_1^7 dx
        \left|\begin{matrix} 6 \end{matrix}\right|  \begin{vmatrix} 6 \end{vmatrix}
        \begin{vmatrix} 2 & 0 \\ 0 & 3 \end{vmatrix}  \sqrt{36}  \sqrt[3]{216}  36^{1/2}  \lim_{x \to 2} 3x
        \lim_{x \to \infty} \frac{6x+1}{x}  \frac{d}{dx}(6x)  (3)(2)(1)  (3)_{2}  \binom{6}{1}  |2-8|
        \|\begin{pmatrix} 6 \\ 0 \end{pmatrix}\|  \operatorname{rank}(\begin{pmatrix} 1 \end{pmatrix})+5  12 \mod 7+1
        \operatorname{norm}(\begin{pmatrix} 6 \\ 0 \end{pmatrix})  12\sin\frac{\pi}{6}  12\cos\frac{\pi}{3}
        2\arcsin(\sin 3)  \max(1,2,6)  \min\{6,7\}  \frac{6!}{5!}  \frac{4!}{2!2!}  \sec(0)\cdot 6
        \csc(\frac{\pi}{2})\cdot 6  2 \cdot 3 = 3!
    """,
    "5": r"""
        12 \bmod 7  12 \mod 7  \sqrt{25}  \sqrt{3^2+4^2}  \begin{vmatrix} 3 & 1 \\ 1 & 2 \end{vmatrix}  10/2
        \frac{10}{2}  \frac{-10}{-2}  \log_2 32  \lfloor \sqrt{30} \rfloor  \lfloor 5.5 \rfloor  |3+4I|
        \|\begin{pmatrix} 3 \\ 4 \end{pmatrix}\|
    """,
    "-2": r"""
        \begin{vmatrix} 1 & 2 \\ 3 & 4 \end{vmatrix}  1-3  3-5  -1-1  -(1+1)  \frac{-4}{2}  -\frac{4}{2}  -\sqrt{4}
        \lfloor -1.5 \rfloor  \log_{10} 0.01  2\cos\pi  2i^2  2 \cdot (-1)
        \det \begin{bmatrix} 1 & 2 \\ 3 & 4 \end{bmatrix}
    """,
    "1": r"""
        \int_0^1 2x dx  \int_0^1 2x\,dx  \int_{0}^{1} 2x\mathrm{d}x  \sin^2 1+\cos^2 1
        \lim_{x \to 0} \frac{\sin x}{x}  0!  \tan\frac{\pi}{4}  \cot\frac{\pi}{4}  \sin\frac{\pi}{2}  \cosh 0  \ln e
        e^0  \frac{3}{3}  \frac{x}{x}  2^0  -e^{i\pi}  \prod_{k=1}^{5} 1  \binom{7}{7}  \gcd(3,4)
        \frac{1}{2}+\frac{1}{2}  0.5+0.5  50\%+50\%  \frac{\pi}{\pi}  (-1)^2
    """,
    "5050": r"\sum_{k=1}^{100} k  \sum_{k=1}^{100}k  \frac{100 \cdot 101}{2}  50 \cdot 101  \binom{101}{2}",
    "7006652": r"\frac{1234\cdot5678}{1}  1234 \cdot 5678  1234*5678  (1234) \times (5678)  1{,}234 \cdot 5{,}678",
    "20": r"(5)_{2}  5 \cdot 4  \frac{5!}{3!}  4^2+2^2",
    "1024": r"2^{10}  2^10  (2)^{10}  32^2  4^5  \left(2^5\right)^2  2 \cdot 2^9  2^{5+5}",
    "300000": r"3 \cdot 100000  300 \cdot 1000  3 \times 10^2 \times 10^3  3 \cdot 10^{2+3}  30 \cdot 10 \cdot 10^3",
    r"\frac{1}{2}": r"""
        \frac{1}{3}+\frac{1}{6}  1-\frac{1}{2}  \frac{3}{2}-1  \frac{1}{4} \cdot 2  \frac{3}{4} \cdot \frac{2}{3}
        0.25+0.25  \frac{1+1}{4}  \frac{3}{2 \cdot 3}  \frac{\frac{1}{4}}{\frac{1}{2}}  1/4*2  \frac{0.5}{1}  2^{-1}
        4^{-1/2}  \sqrt{\frac{1}{4}}  \frac{\sqrt{2}}{2\sqrt{2}}  \sin\frac{\pi}{6}  \cos\frac{\pi}{3}  \log_4 2
        \int_0^1 x dx  \lim_{x \to 2} \frac{1}{x}  \left(\frac{1}{2}\right)^1  25\%+25\%  1\frac{1}{2}-1
        \sum_{k=2}^{\infty} \frac{1}{2^k}  \frac{2!}{4}  |-\frac{1}{2}|
    """,
    "0.75": r"\frac{1}{2}+\frac{1}{4}  0.5+0.25  3 \cdot 0.25  1-0.25  50\%+25\%  \frac{1.5}{2}  \sqrt{0.5625}",
    r"2\sqrt{3}": r"""
        \sqrt{3}+\sqrt{3}  \sqrt{2}\sqrt{6}  \sqrt{2} \cdot \sqrt{6}  \sqrt{27}-\sqrt{3}  \frac{\sqrt{24}}{\sqrt{2}}
        \sqrt{5+7}  \sqrt{3 \cdot 4}  \frac{4\sqrt{3}}{2}  2 \cdot 3^{1/2} \cdot 1  4\sin\frac{\pi}{3}
        2\tan\frac{\pi}{3}  |-2\sqrt{3}|  (1+1)\sqrt{3}  \int_0^2 \sqrt{3} dx  \sqrt[4]{12^2}  3\sqrt{3}-\sqrt{3}
        (\sqrt{6})(\sqrt{2})
    """,
    r"1+\sqrt{2}": r"\sqrt{2}+3-2  2+\sqrt{2}-1  (1+\sqrt{2})^1  1+\sqrt{1+1}  \frac{(1+\sqrt{2})^2}{1+\sqrt{2}}",
    r"\frac{7\pi}{12}": r"""
        \frac{\pi}{3}+\frac{\pi}{4}  \pi-\frac{5\pi}{12}  7 \cdot \frac{\pi}{12} \cdot 1  \int_0^{7/12} \pi dx
    """,
    r"46\pi": r"""
        12\pi+34\pi  2 \cdot 23\pi  46\pi+0  \frac{92\pi}{2}  46\arccos(-1)  46\cdot 4\arctan 1  \pi(12+34)
        \pi \cdot 2 \cdot 23
    """,
    r"\ln 2": r"\int_1^2 \frac{1}{x} dx  \ln(1+1)  \ln 2 \cdot 2 - \ln 2  \lim_{x \to 2} \ln x  \ln(2 \cdot 1)",
    "e^2": r"e \cdot e  e^{1+1}  e^{\ln 2}e^2/2  \lim_{x \to 2} e^x  \int_{-\infty}^2 e^x dx  \exp(2)",
    "5+7i": "3i+4i+5  2+3+7i  5+(3+4)i  (2+3i)+(3+4i)",
}

# Tasks in sets, tuples, intervals, matrices, equations and inequalities, and tasks with variables.
NESTED_TASKS = {
    "(46,5)": r"""
        (12+34,5)  (46,2+3)  (12+34,2+3)  (2 \cdot 23,5)  (|46|,5)  (46,\sqrt{25})  (x,y)=(12+34,5)
        \left(\frac{92}{2},5\right)  (\gcd(46,92),5)  (46,\binom{5}{1})  (46,12 \mod 7)  (46)(1),5  (46+0,5)  (46;2+3)
        [12+34,5)  (46,5!/24)
    """,
    r"\{1,2,3\}": r"""
        \{1,2,1+2\}  \{1,2\} \cup \{3\}  \{1,2,3,4\} \setminus \{4\}  \{1,2,3,4\} \cap \{1,2,3\}  1,2,1+2
        \{1,2,\sqrt{9}\}  \{1,2\} \cup \{2,3\}  x \in \{1,2,1+2\}  x=1, x=2, x=1+2  \{0!,2,3\}  \{\gcd(1,2),2,3\}
        x=1 \text{ or } x=2 \text{ or } x=1+2
    """,
    "[1,5]": r"""
        [1,2+3]  [1,3] \cup [2,5]  [0,5] \cap [1,8]  [1,5] \cup [2,3]  [0,5] \setminus [0,1)  [\sin^2 1+\cos^2 1,5]
        x \in [1,2+3]
    """,
    r"(-\infty,2) \cup (3,\infty)": r"""
        (-\infty,1+1) \cup (3,\infty)  (-\infty,2) \cup (2+1,\infty)  (-\infty,0) \cup (-1,2) \cup (3,\infty)
    """,
    r"\begin{pmatrix} 6 \\ 8 \end{pmatrix}": r"""
        \begin{pmatrix} 1+5 \\ 8 \end{pmatrix}
        \begin{pmatrix} 1 \\ 2 \end{pmatrix}+\begin{pmatrix} 5 \\ 6 \end{pmatrix}
        2\begin{pmatrix} 3 \\ 4 \end{pmatrix}  \begin{pmatrix} 3 \\ 4 \end{pmatrix} \cdot 2
        \frac{1}{2}\begin{pmatrix} 12 \\ 16 \end{pmatrix}
        \begin{pmatrix} 7 \\ 9 \end{pmatrix}-\begin{pmatrix} 1 \\ 1 \end{pmatrix}
        \begin{pmatrix} 3! \\ 8 \end{pmatrix}
        \begin{pmatrix} 2 & 0 \\ 0 & 2 \end{pmatrix}\begin{pmatrix} 3 \\ 4 \end{pmatrix}
        \begin{pmatrix} 6 & 8 \end{pmatrix}^T
        \begin{pmatrix} 6 \\ 0 \end{pmatrix}+\begin{pmatrix} 0 \\ 8 \end{pmatrix}
        \left(\begin{array}{c} 12/2 \\ 8 \end{array}\right)  \begin{pmatrix} 3 \\ 8 \end{pmatrix} \xrightarrow{2r_1}
        \operatorname{vstack}(6,8)  \begin{pmatrix} 2 \cdot 3 \\ 2 \cdot 4 \end{pmatrix}
    """,
    r"\begin{pmatrix} 1 & 0 \\ 0 & 1 \end{pmatrix}": r"""
        \operatorname{eye}(2)  \operatorname{diag}(1,1)  \begin{pmatrix} 1 & 0 \\ 0 & 1 \end{pmatrix}^2
    """,
    r"\pm 6": r"\pm 2 \cdot 3  \pm \sqrt{36}  0 \pm 6  \pm (2+4)  x = \pm \sqrt{36}  \pm 3!",
    "46,-22": r"12 \pm 34  \{12+34,12-34\}  12+34, -22  12+34 \text{ and } -22",
    "x=46": r"12+34  x=12+34  x=2 \cdot 23  x=\frac{92}{2}  x=\sqrt{2116}  x=46+y-y",
    "x>46": r"x>12+34  x>2 \cdot 23  x>\sqrt{2116}  12+34<x  x \in (12+34,\infty)",
    r"12 < x \le 34": r"12 < x \le 30+4  3 \cdot 4 < x \le 34  12 < x \le \sqrt{1156}  (12,30+4]",
    "x^2": r"""
        \int_0^x 2t dt  \frac{d}{dx} \frac{x^3}{3}  \lim_{h \to 0} (x+h)^2  \sum_{k=1}^{x} (2k-1)
        \begin{vmatrix} x & 0 \\ 0 & x \end{vmatrix}
    """,
    "2x": r"""
        \frac{d}{dx} x^2  \frac{d}{dx}(x^2)  \frac{d(x^2)}{dx}  \frac{\partial}{\partial x} x^2  \int 2 dx
        \frac{dx^2}{dx}  y=\frac{d}{dx}x^2
    """,
    r"\frac{n(n+1)}{2}": r"""
        \sum_{k=1}^{n} k  \sum_{k=1}^n k  \lim_{x \to n} \frac{x(x+1)}{2}  \int_0^n (x+\frac{1}{2}) dx
    """,
}

# Results as the responses and solutions of AIME and MATH write them.
GENUINE = {
    "204": r"""
        204  204.  204.0  +204  (204)  {204}  0204  \text{204}  \mathbf{204}  m+n=204  x = 204  f(2)=204
        12 \cdot 17 = 204  x = 200+4 = 204  \frac{408}{2}=204  \approx 204  x \approx 204  x_1 \approx 204
        N \equiv 204 \pmod{1000}  204 \text{ minutes}  204\ \text{minutes}  204 minutes  \text{Area} = 204  AB = 204
        204_{10}  \displaystyle 204  \bf 204  {\bf 204}  \bf{204}  \large 204  \textstyle 204  \boldsymbol{204}  **204**
        \boxed{204}  2.04 \times 10^2  \$204  204^\circ  204^{\circ}  20400\%  \mbox{204}  \hbox{ 204 }  \underline{204}
        \textcolor{red}{204}  \color{blue} 204
    """,
    "025": r"25  025  25 \text{ cm}^2  25\,\text{cm}  25 \text{ square units}  25 \mathrm{~cm}  m + n = 25",
    "-7": "-7  -7.0  x=-7  (-7)  −7  3-10=-7",
    "1234": r"1,234  1{,}234  1\,234  1 234  1,\!234  \$1,234  \$1{,}234.00  1.234 \times 10^3",
    "300000": r"""
        3 \times 10^5  3 \cdot 10^5  3\times10^{5}  3*10^5  3×10^5  3·10^5  300,000  300{,}000  3.0 \times 10^5  3E5
    """,
    "0.00047": r"4.7 \times 10^{-4}  4.7 \cdot 10^{-4}  0.00047  .00047  0.047\%  \frac{47}{100000}",
    "100000": r"10^5  10^{5}  100,000  1 \times 10^5",
    r"\frac{1}{2}": r"""
        \frac{1}{2}  \frac12  \dfrac{1}{2}  \tfrac12  1/2  0.5  .5  50\%  \frac{2}{4}  \frac{17}{34}  (\frac{1}{2})
        P = \frac{1}{2}  \frac{1}{4}+\frac{1}{4}=\frac{1}{2}  1:2  50 \%  \textbf{\frac{1}{2}}  \mathbf{\dfrac{1}{2}}
    """,
    r"-\frac{3}{4}": r"-\frac{3}{4}  \frac{-3}{4}  \frac{3}{-4}  -0.75  -3/4  x = -\frac{3}{4}",
    r"\frac{7}{3}": r"\frac{7}{3}  2\frac{1}{3}  2 \frac{1}{3}  7/3  \frac{14}{6}",
    r"\frac{3}{56}": r"\frac{3}{56}  3/56  \frac{6}{112}",
    "12.5": r"12.5  12.50  \frac{25}{2}  12\frac{1}{2}  \$12.50  12.5 \text{ m/s}",
    r"35\%": r"35\%  0.35  35  \frac{7}{20}  35 \text{ percent}",
    r"60^\circ": r"60^\circ  60^{\circ}  60  60°  \angle ABC = 60^\circ  60 \text{ degrees}",
    r"\$18.50": r"\$18.50  18.5  18.50 \text{ dollars}",
    r"\sqrt{2}": r"\sqrt{2}  \sqrt2  2^{1/2}  2^{\frac{1}{2}}  \frac{2}{\sqrt{2}}  AB = \sqrt{2}",
    r"3\sqrt{2}": r"3\sqrt{2}  3 \sqrt 2  \sqrt{18}  3\cdot\sqrt{2}  \frac{6}{\sqrt{2}}",
    r"\frac{\sqrt{3}}{2}": r"""
        \frac{\sqrt{3}}{2}  \frac{\sqrt3}{2}  \sqrt{3}/2  \frac{1}{2}\sqrt{3}  \frac{3}{2\sqrt{3}}  \sqrt{\frac{3}{4}}
    """,
    r"1+\sqrt{2}": r"1+\sqrt{2}  \sqrt{2}+1  \left(1+\sqrt{2}\right)  \frac{1}{\sqrt{2}-1}",
    r"\frac{1+\sqrt{5}}{2}": r"""
        \frac{1+\sqrt{5}}{2}  \frac{\sqrt5+1}{2}  \frac{1}{2}+\frac{\sqrt{5}}{2}  \frac12(1+\sqrt{5})  (1+\sqrt{5})/2
    """,
    r"\sqrt[3]{4}": r"\sqrt[3]{4}  4^{1/3}  2^{2/3}",
    r"\sqrt{2}+\sqrt{3}": r"\sqrt{2}+\sqrt{3}  \sqrt3+\sqrt2  \sqrt{5+2\sqrt{6}}",
    r"2\pi": r"2\pi  2 \pi  2\cdot\pi  2\pi \text{ cm}",
    r"\frac{\pi}{4}": r"\frac{\pi}{4}  \pi/4  \frac{1}{4}\pi  0.25\pi  \theta = \frac{\pi}{4}",
    r"9\pi - 18": r"9\pi-18  9(\pi-2)  -18+9\pi",
    r"\ln 2": r"\ln 2  \ln{2}  \ln(2)  -\ln\frac{1}{2}  \ln 4 - \ln 2  \frac{1}{2}\ln 4",
    r"\log_2 3": r"\log_2 3  \log_{2} 3  \log_2(3)  \frac{\ln 3}{\ln 2}  \frac{\log 3}{\log 2}",
    "e^2": r"e^2  e^{2}  \frac{1}{e^{-2}}",
    r"\frac{1}{e}": r"\frac{1}{e}  e^{-1}  1/e",
    r"\cos\frac{\pi}{7}": r"""
        \cos\frac{\pi}{7}  \cos(\frac{\pi}{7})  \cos\left(\frac{\pi}{7}\right)  \cos{\frac{\pi}{7}}
    """,
    r"\arctan 2": r"\arctan 2  \arctan(2)  \tan^{-1} 2",
    "3+4i": "3+4i  4i+3",
    "z^*": "z^*",
    "2^{10}": "2^{10}  2^10  1024  4^5",
    r"\binom{5}{2}": r"\binom{5}{2}  10",
    "5!": "5!  120",
    r"\frac{100!}{2^{50}}": r"\frac{100!}{2^{50}}  100!/2^{50}  \frac{100!}{2^{50}}.",
    "2^{2024}-1": "2^{2024}-1  -1+2^{2024}",
    "1-(5/6)^{10}": r"1-\left(\frac{5}{6}\right)^{10}  1 - (5/6)^{10}",
    r"2 \cdot 3 \cdot 7": r"2 \times 3 \times 7  42",
    "3:4": r"3:4  \frac{3}{4}  3/4",
    "4:2": "4:2",
    "(3,4)": r"(3,4)  (3, 4)  \left(3,4\right)  (x,y)=(3,4)  (3.0, 4)",
    r"(\frac{1}{2},-\sqrt{3})": r"\left(\frac{1}{2}, -\sqrt{3}\right)  (0.5,-\sqrt3)  (1/2, -\sqrt{3})",
    r"(3, \frac{\pi}{2})": r"\left( 3, \frac{\pi}{2} \right)  (3,\pi/2)",
    "(45,2),(-10,-9)": r"(45,2),(-10,-9)  (45,2) \text{ and } (-10,-9)",
    r"\{1,2,3\}": r"\{1,2,3\}  \{3, 1, 2\}  1,2,3  1, 2 \text{ and } 3  x \in \{1,2,3\}  x=1,2,3",
    "1,-2": r"1,-2  -2, 1  x=1, x=-2  x = 1 \text{ or } x = -2  \{1,-2\}",
    r"\pm 3": r"\pm 3  \pm3  3,-3  x = \pm 3  \{-3,3\}",
    r"1 \pm \sqrt{2}": r"1 \pm \sqrt{2}  1\pm\sqrt2  1+\sqrt{2}, 1-\sqrt{2}  x = 1 \pm \sqrt{2}",
    "[2,5)": r"[2,5)  \left[2,5\right)  x \in [2,5)  [2, 5)",
    r"(-\infty,2)": r"(-\infty,2)  (-\infty, 2.0)  x \in (-\infty, 2)",
    r"(-\infty,1)\cup(1,\infty)": r"""
        (-\infty,1)\cup(1,\infty)  (-\infty, 1) \cup (1, +\infty)  \mathbb{R} \setminus \{1\}
    """,
    r"\mathbb{R}": r"\mathbb{R}",
    r"\emptyset": r"\emptyset",
    "x>46": "x>46  x > 46  46 < x",
    r"2 \le x < 5": r"2 \le x < 5  2 \leq x<5  [2,5)",
    "x=46": "46  x=46  x = 46.0",
    "y=2x+3": "y=2x+3  y = 2x + 3  y=3+2x  2x - y + 3 = 0  2x+3",
    "x^2+y^2=25": "x^2+y^2=25  x^2 + y^2 = 5^2  x^2+y^2-25=0",
    "x^2+2x+1": r"x^2+2x+1  (x+1)^2  1+2x+x^2  x^2 + 2 \cdot x + 1  f(x)=x^2+2x+1",
    r"\frac{x+2}{x-3}": r"\frac{x+2}{x-3}  (x+2)/(x-3)  1+\frac{5}{x-3}",
    "6x": r"6x  2 \cdot 3 \cdot x  6 \cdot x",
    r"\frac{n(n+1)}{2}": r"\frac{n(n+1)}{2}  \frac{n^2+n}{2}  \binom{n+1}{2}",
    "3x^2": r"3x^2  3 x^{2}  3 \cdot x^2",
    r"2\sin x \cos x": r"2\sin x\cos x  \sin 2x",
    r"\sum_{k=1}^{n} k^2": r"\sum_{k=1}^{n} k^2",
    r"\int_0^1 f(x) dx": r"\int_0^1 f(x) dx",
    r"\begin{pmatrix} 6 \\ 8 \end{pmatrix}": r"""
        \begin{pmatrix} 6 \\ 8 \end{pmatrix}  \begin{bmatrix} 6 \\ 8 \end{bmatrix}
        \left(\begin{array}{c} 6 \\ 8 \end{array}\right)  \vec{v} = \begin{pmatrix} 6 \\ 8 \end{pmatrix}
    """,
    r"\begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix}": r"""
        \begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix}  \begin{bmatrix} 1 & 2 \\ 3 & 4 \end{bmatrix}
        A = \begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix}
    """,
    r"\begin{pmatrix} 1/5 & 2/5 \\ 3/5 & 4/5 \end{pmatrix}": r"""
        \begin{pmatrix} \frac{1}{5} & \frac{2}{5} \\ \frac{3}{5} & \frac{4}{5} \end{pmatrix}
        \frac{1}{5}\begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix}
    """,
    r"\text{(C)}": r"\text{(C)}  C  \bf C  \text{C}  (C)  \textbf{(C)}  \mbox{(C)}",
    "E": r"E  \text{E}  \text{(E)}",
    r"\text{even}": r"\text{even}  even",
    r"\text{Tuesday}": r"\text{Tuesday}",
    "1101_2": "1101_2  1101_{2}  1101",
    r"\text{no solution}": r"\text{no solution}  \text{No solution}",
}

WRONG = {
    "46": r"""
        47  -46  4.6  460  x=64  \frac{46}{3}  46,47  (46,46,46)  \{46,47\}  46x  \text{C}  \sqrt{46}  46\pi
        \approx 45.9  46 \times 10^1  56_8  46 = 47  12+34=45  46 \approx x = 47  99 \approx 46  1{,}046
        46\frac{1}{2}
    """,
    r"\frac{1}{2}": r"\frac{1}{3}  2  0.51  \frac{-1}{2}  5\%  1:3  1\frac{1}{2}",
    r"\sqrt{2}": r"\sqrt{3}  1.4  2  \sqrt[3]{2}  -\sqrt{2}",
    r"2\pi": r"2  6.28  \pi  2\pi^2",
    "(3,4)": r"(4,3)  (3,4,5)  3  \{5,6\}",
    r"\{1,2,3\}": r"\{1,2\}  \{1,2,4\}  1",
    "[2,5)": "(2,5)  [2,5]  [2,6)",
    "x^2+2x+1": "x^2+2x  (x+2)^2  x^2+1",
    "y=2x+3": "y=2x-3  y=3x+2",
    r"\begin{pmatrix} 6 \\ 8 \end{pmatrix}": r"\begin{pmatrix} 8 \\ 6 \end{pmatrix}  14",
    r"\text{(C)}": r"\text{(B)}  3",
    "3+4i": "3-4i  7",
    r"\ln 2": r"\ln 3  0.69",
    "5!": "4!  24",
}

WRAPPINGS = (r"So we have \[ x = %s \]", "The final answer is $%s$. I hope it is correct.", "The result is $%s$.")
BOLD = (
    "The answer is **%s**.",
    "**Answer: %s**",
    "**Answer**: **%s**",
    "So **n = %s.**\n\nThis completes the proof.",
    "There are **%s** such paths.",
    "*Answer: %s*",
    "* The answer is %s\n* That is all",
)


def table(text):
    return [entry for entry in re.split(r"\s{2,}", text.strip()) if entry]


def boxed(responses):
    return [(rf"The result is \boxed{{{entry}}}.", key) for key, text in responses.items() for entry in table(text)]


def score(response, ground_truth):
    return compute_score("math", response, ground_truth)["score"]


@pytest.mark.parametrize(("response", "ground_truth"), boxed(TASKS) + boxed(NESTED_TASKS))
def test_a_boxed_task_scores_zero(response, ground_truth):
    assert score(response, ground_truth) == 0.0


@pytest.mark.parametrize("wrapping", WRAPPINGS)
@pytest.mark.parametrize("task", table(TASKS["46"])[::8])
def test_a_task_without_a_box_scores_zero(wrapping, task):
    assert score(wrapping % task, "46") == 0.0


@pytest.mark.parametrize("wrapping", BOLD)
def test_a_bold_answer_without_a_box_counts(wrapping):
    scores = [score(wrapping % answer, "204") for answer in ("204", "204.0", "$204$", "205", "12*17", "12+192")]
    assert scores == [1.0, 1.0, 1.0, 0.0, 0.0, 0.0]


@pytest.mark.parametrize(("response", "ground_truth"), boxed(GENUINE))
def test_a_genuine_response_scores_one(response, ground_truth):
    assert score(response, ground_truth) == 1.0


@pytest.mark.parametrize(("response", "ground_truth"), boxed(WRONG))
def test_a_wrong_response_scores_zero(response, ground_truth):
    assert score(response, ground_truth) == 0.0
