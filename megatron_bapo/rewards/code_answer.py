"""Reward of programs by tests: the last Python code block of the response runs in a sandbox, once for each test.

Expected outputs and results stay outside the sandbox, so that a program cannot read them. Assertions are executed after
the program and in its process, where a program that is made for it can read and change them.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from megatron_bapo.functions.sandbox import PROGRAM_PATH, Limits, run_program
from megatron_bapo.rewards.code_tests import Test, read_tests

RUNNER = Path(__file__).with_name("code_runner.py").read_bytes()
RUNNER_PATH = "/runner.py"
_FENCE = re.compile(r"^[ \t]*```[ \t]*(\S*).*$", re.MULTILINE)
_LANGUAGES = frozenset({"", "python", "python3", "py"})


async def compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: str,
    extra_info: dict[str, Any] | None = None,
    *,
    cpu_s: float,
    memory_gib: float,
    max_tests: int | None,
    all_tests: bool,
) -> float:
    """Return the share of the first `max_tests` tests that the response's program passes.

    With `all_tests`, a program that fails one gets 0 without the others. Raises ValueError for a ground truth without
    readable tests, and RunError if there can be no sandbox.
    """
    tests = read_tests(ground_truth, extra_info or {})[:max_tests]
    program = last_program(solution_str)
    if program is None:
        return 0.0
    limits, num_passed = Limits(cpu_s, memory_gib), 0
    for test in tests:
        is_passed = await _passes(program, test, limits)
        num_passed += is_passed
        if all_tests and not is_passed:
            return 0.0
    return num_passed / len(tests)


def last_program(text: str) -> str | None:
    """Return the content of the last closed code block that is marked as Python, else of the last one without a mark.

    None: there is neither. A line that opens a block begins a new one, also where the block before it has no end.
    """
    programs: dict[bool, str] = {}
    start, language = None, ""
    for fence in _FENCE.finditer(text):
        if fence[1] or start is None:
            start, language = fence.end() + 1, fence[1].lower()
        else:
            if language in _LANGUAGES:
                programs[language != ""] = text[start : fence.start()]
            start = None
    return programs.get(True, programs.get(False))


async def _passes(program: str, test: Test, limits: Limits) -> bool:
    files = {PROGRAM_PATH: program.encode(errors="replace"), RUNNER_PATH: RUNNER}
    ended = await run_program([RUNNER_PATH, test.mode], files, limits, test.stdin.encode(errors="replace"))
    return ended.status == 0 and test.is_passed(ended.stdout.decode(errors="replace"))
