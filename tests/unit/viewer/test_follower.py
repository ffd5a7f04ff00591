"""Reading JSON lines that a run appends, cuts and replaces, and lines that are damaged."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from megatron_bapo.viewer.follower import Follower
from tests.unit.viewer.made_live_runs import append


def test_a_finished_part_is_not_read_again(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    append(path, ({"step": step} for step in range(1000)))
    follower = Follower(path, dict)
    assert len(follower.read().rows) == 1000
    with path.open("r+") as file:  # what was read is no JSON any more
        file.write("x" * 5000)
    append(path, [{"step": 1000}])
    with path.open("a") as file:
        file.write('{"step": 10')
    new = follower.read()
    assert (new.rows, new.from_start, new.is_all) == ([{"step": 1000}], False, True)
    with path.open("a") as file:
        file.write("01}\n")
    assert follower.read().rows == [{"step": 1001}]


def test_a_file_that_was_cut_and_written_on_is_read_anew(tmp_path: Path) -> None:
    path = tmp_path / "requests.jsonl"
    append(path, ({"step": step} for step in range(100)))
    follower = Follower(path, dict)
    version = follower.read() and follower.version
    path.write_text("")
    append(path, ({"step": step, "again": True} for step in range(200)))
    new = follower.read()
    assert (len(new.rows), new.from_start) == (200, True)
    assert follower.version != version
    path.unlink()
    assert (follower.read().from_start, follower.read().rows) == (True, [])


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("{", "it is not JSON (Expecting property name enclosed in double quotes at character 3)"),
        ("", "it is not JSON (Expecting value at character 2)"),
        ("[1]", "it is not a JSON object but a list"),
        ('{"stop": 1}', "it has no step"),
        ('{"step": "x"}', "invalid literal for int() with base 10: 'x'"),
    ],
)
def test_a_damaged_line_is_left_out_and_named(tmp_path: Path, line: str, reason: str) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(f'{{"step": 1}}\n{line}\n{{"step": 3}}\n')
    follower = Follower(path, lambda row: int(row["step"]))
    assert follower.read().rows == [1, 3]
    assert follower.problems == [f"{path}, line 2 is left out: {reason}; repair or delete that line"]
    append(path, [{"step": 4}, {}])
    assert follower.read().rows == [4]
    assert follower.problems[1] == f"{path}, line 5 is left out: it has no step; repair or delete that line"


def test_a_repaired_line_is_read(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    text = "".join(f'{{"step": {step}}}\n' for step in range(100))
    path.write_text(text.replace('{"step": 7}', '{"step" 77}'))  # far from the end, and as long as before
    follower = Follower(path, dict)
    assert len(follower.read().rows) == 99
    path.write_text(text)
    new = follower.read()
    assert (len(new.rows), new.from_start, follower.problems) == (100, True, [])


def test_of_many_damaged_lines_the_first_are_named(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text("x\n" * 1000)
    follower = Follower(path, dict)
    assert follower.read().rows == []
    assert [re.findall(r"line (\d+)", problem) for problem in follower.problems[:-1]] == [[str(n)] for n in range(1, 6)]
    assert follower.problems[-1] == f"{path} has 995 more lines that are left out"
