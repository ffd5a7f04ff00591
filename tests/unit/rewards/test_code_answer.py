"""Programs in responses against tests, in the real sandbox."""

import asyncio
import json
from typing import Any

import pytest

from megatron_bapo.config.reward import RewardConfig
from megatron_bapo.errors import FunctionFailed
from megatron_bapo.functions.user_function import load
from megatron_bapo.rewards.code_answer import last_program
from megatron_bapo.rewards.scorer import RewardRequest, RewardResult, Scorer, reward_target
from tests.sandboxes import needs_sandbox

DOUBLE = {"inputs": ["1", "2", "3"], "outputs": ["2\n", "4\n", "6\n"]}
SORTED = {"fn_name": "ordered", "inputs": ["[3, 1, 2]", "[]"], "outputs": ["[1, 2, 3]", "[]"]}
ASSERTIONS = ["assert double(1) == 2", "assert double('a') == 'aa'"]


def score(program: str, tests: Any, **config: Any) -> float:
    function = load(reward_target(RewardConfig(type="code", **config))).call
    return asyncio.run(
        function(data_source="d", solution_str=f"```python\n{program}\n```", ground_truth=json.dumps(tests))
    )


@needs_sandbox
@pytest.mark.parametrize(
    ("program", "tests", "share"),
    [
        ("print(2 * int(input()))", DOUBLE, 1.0),
        ("for line in sys.stdin: print(2.0 * int(line))", DOUBLE, 1.0),
        ("n = int(input())\nprint(n * n)", DOUBLE, 1 / 3),
        ("if __name__ == '__main__':\n    print(2 * int(input()))\n    exit(1)", DOUBLE, 1.0),
        ("print(2 * int(input()))\n1 / 0", DOUBLE, 0.0),
        ("print(2 * int(input())", DOUBLE, 0.0),
        ("class Solution:\n    def ordered(self, a: List[int]) -> List[int]:\n        return sorted(a)", SORTED, 1.0),
        ("def ordered(a):\n    print('[1, 2, 3]')\n    return tuple(sorted(a))", SORTED, 1.0),
        ("def ordered(a):\n    return []", SORTED, 0.5),
        ("def ordered(a):\n    return {1, 2, 3}", SORTED, 0.0),
        ("def other(a):\n    return sorted(a)", SORTED, 0.0),
        ("def ordered(a):\n    return sorted(a)\nif __name__ == '__main__':\n    ordered(input())", SORTED, 1.0),
        ("def double(x): return x + x", ASSERTIONS, 1.0),
        ("def double(x): return 2 + 0 * x", ASSERTIONS, 0.5),
        ("import os\nos._exit(0)", ASSERTIONS, 0.0),
        ("raise SystemExit", ASSERTIONS, 0.0),
        ("print('passed')", ASSERTIONS, 0.0),
    ],
)
def test_the_score_is_the_share_of_passed_tests(program: str, tests: Any, share: float) -> None:
    assert score(program, tests) == pytest.approx(share)


@needs_sandbox
def test_the_number_of_tests_can_be_limited() -> None:
    assert score("n = int(input())\nprint(n * n)", {**DOUBLE, "inputs": ["2", "1", "3"]}, max_tests=1) == 0.0
    assert score("print(2)", DOUBLE, max_tests=1) == 1.0


@needs_sandbox
def test_a_program_does_not_find_the_expected_output() -> None:
    """The program prints the expected text if it finds it in any file or argument."""
    program = """
import os, sys
expected = "".join(reversed("123456789"))
found = [*sys.argv, *os.environ.values()]
for folder, folders, names in os.walk("/"):
    known = ("/usr", "/dev", "/lib", "/lib32", "/lib64", sys.prefix, sys.base_prefix)
    folders[:] = [name for name in folders if os.path.join(folder, name) not in known]
    found += [open(os.path.join(folder, name), errors="replace").read() for name in names]
assert any("import os, sys" in text for text in found)
print(expected if any(expected in text for text in found) else "not found")
"""
    assert score(program, {"inputs": ["given"], "outputs": ["not found"]}) == 1.0
    assert score(program, {"inputs": ["given"], "outputs": ["987654321"]}) == 0.0


@needs_sandbox
@pytest.mark.slow
def test_the_scorer_runs_programs_side_by_side_and_limits_them() -> None:
    config = RewardConfig(type="code", partial_credit=False, timeout_s=120.0, sandbox={"cpu_s": 1.0})  # pyright: ignore[reportArgumentType]
    programs = ["print(2 * int(input()))", "while True: pass", "bytearray(2 << 30)", "n = int(input())\nprint(n * n)"]
    texts = [f"```python\n{program}\n```" for program in programs] + ["no program", ""]

    async def main() -> list[RewardResult]:
        scorer = Scorer(config)
        try:
            requests = [RewardRequest("train:0", "d", text, json.dumps(DOUBLE)) for text in texts]
            return await asyncio.gather(*map(scorer.score, requests))
        finally:
            scorer.close()

    assert asyncio.run(main()) == [RewardResult(reward) for reward in (1.0, 0.0, 0.0, 0.0, 0.0, 0.0)]


@needs_sandbox
@pytest.mark.slow
def test_a_ground_truth_without_tests_fails() -> None:
    async def main() -> None:
        scorer = Scorer(RewardConfig(type="code"))
        try:
            with pytest.raises(FunctionFailed, match="the tests '42' are not a list"):
                await scorer.score(RewardRequest("train:0", "d", "", "42"))
        finally:
            scorer.close()

    asyncio.run(main())


@pytest.mark.parametrize(
    ("text", "program"),
    [
        ("Text\n```python\na\nb\n```\nmore", "a\nb\n"),
        ("```python\na\n```\n```python\nb\n```", "b\n"),
        ("```\na\n```\n```\nb\n```", "b\n"),
        ("```py\na\n```\nwith the input\n```\n3\n```\nprints\n```\n6\n```", "a\n"),
        ("```python\na\n```\n```output\n7\n```", "a\n"),
        ("```python\nunfinished\n</think>\n```python\na\n```", "a\n"),
        ("```Python\n  a\n  ```", "  a\n"),
        ("```python\na", None),
        ("```cpp\na\n```", None),
        ("a ```b``` c", None),
        ("```python\n```", ""),
        ("", None),
    ],
)
def test_the_last_closed_block_of_python_is_the_program(text: str, program: str | None) -> None:
    assert last_program(text) == program
