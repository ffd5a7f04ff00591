import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from megatron_bapo.errors import RunError, StorageFailed
from megatron_bapo.metrics.row_writer import RowWriter


@pytest.fixture
def paths(tmp_path: Path) -> list[Path]:
    return [tmp_path / "requests.jsonl", tmp_path / "other.jsonl"]


def rows(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_rows_are_written_in_the_order_of_the_calls_and_all_of_them_at_the_end(paths):
    writer = RowWriter(paths)
    for i in range(1000):
        writer.write(paths[i % 2], {"i": i})
    writer.close()

    assert [row["i"] for row in rows(paths[0])] == [*range(0, 1000, 2)]
    assert [row["i"] for row in rows(paths[1])] == [*range(1, 1000, 2)]


def test_no_file_is_opened_in_the_calling_thread(paths, monkeypatch):
    threads, open_path = set(), Path.open

    def recorded(path, *args, **kwargs):
        threads.add(threading.get_ident())
        return open_path(path, *args, **kwargs)

    monkeypatch.setattr(Path, "open", recorded)
    writer = RowWriter(paths)
    for i in range(100):
        writer.write(paths[0], {"i": i})
    writer.close()

    assert len(threads) == 1
    assert threading.get_ident() not in threads


def test_sizes_are_those_with_the_rows_so_far_and_without_later_ones(paths):
    writer = RowWriter(paths)
    writer.write(paths[0], {"i": 0})
    before = writer.sizes()
    writer.write(paths[0], {"i": 1})
    after = writer.sizes()

    assert before.result() == {"requests.jsonl": len('{"i": 0}\n'), "other.jsonl": 0}
    assert after.result() == {"requests.jsonl": 2 * len('{"i": 0}\n'), "other.jsonl": 0}
    assert not paths[1].exists()
    writer.close()


def test_rows_are_appended_to_those_of_an_earlier_process(paths):
    paths[0].write_text('{"i": 0}\n')
    writer = RowWriter(paths)
    writer.write(paths[0], {"i": 1})
    writer.close()

    assert [row["i"] for row in rows(paths[0])] == [0, 1]


PROGRAM = """
import os, sys, time
from pathlib import Path
from megatron_bapo.metrics.row_writer import FLUSH_S, RowWriter

path = Path(sys.argv[1])
writer = RowWriter([path])
writer.write(path, {"i": 0})
if sys.argv[2] == "killed":
    while not path.exists() or not path.stat().st_size:
        time.sleep(FLUSH_S / 10)
    os.kill(os.getpid(), 9)
"""


@pytest.mark.parametrize("end", ["ended", "killed"])
def test_a_row_is_on_disk_when_its_process_ends_and_soon_after_the_call_if_it_is_killed(paths, end):
    subprocess.run([sys.executable, "-c", PROGRAM, str(paths[0]), end], check=False, timeout=60, env=os.environ)

    assert [row["i"] for row in rows(paths[0])] == [0]


def test_a_file_that_cannot_be_written_to_is_an_error_for_the_next_row_and_for_the_checkpoint(tmp_path):
    path = tmp_path / "folder"
    path.mkdir()
    writer = RowWriter([path])
    writer.write(path, {"i": 0})

    with pytest.raises(RunError, match=r"a row was not written: .*folder"):
        writer.sizes().result()
    with pytest.raises(RunError, match=r"a row was not written: .*folder"):
        writer.write(path, {"i": 1})
    writer.close()


def test_a_full_disk_is_reported_as_one():
    """/dev/full has the error of a full disk for every write."""
    path = Path("/dev/full")
    writer = RowWriter([path])
    writer.write(path, {"i": 0})

    with pytest.raises(StorageFailed, match=r"No space left on device .*free"):
        writer.sizes().result()
    writer.close()
