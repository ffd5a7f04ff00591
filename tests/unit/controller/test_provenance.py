import subprocess
from pathlib import Path

import pytest

from megatron_bapo.controller.provenance import commit, record_start
from megatron_bapo.metrics.sinks import read_rows
from megatron_bapo.run_directory import RunDirectory

IDENTITY = ("-c", "user.name=a", "-c", "user.email=a@example.com")


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    folder = tmp_path / "checkout"
    folder.mkdir()
    (folder / "file").write_text("1")
    for command in (["init", "--quiet"], ["add", "file"], [*IDENTITY, "commit", "--quiet", "-m", "first"]):
        subprocess.run(["git", "-C", str(folder), *command], check=True)
    return folder


def test_the_commit_of_a_checkout_says_whether_files_were_changed(checkout: Path):
    head = subprocess.check_output(["git", "-C", str(checkout), "rev-parse", "HEAD"], text=True)

    assert commit(checkout) == head[:12]
    (checkout / "file").write_text("2")
    assert commit(checkout) == f"{head[:12]}-dirty"


def test_a_package_inside_another_project_has_no_commit(checkout: Path):
    installed = checkout / "site-packages"
    installed.mkdir()

    assert commit(installed) is None
    assert commit(checkout.parent) is None


@pytest.mark.parametrize(("device", "hardware"), [("NVIDIA H100", "4 × NVIDIA H100"), (None, "CPU cores")])
def test_each_start_is_recorded(tmp_path: Path, device: str | None, hardware: str):
    starts = RunDirectory(tmp_path).starts
    record_start(RunDirectory(tmp_path), device, 4)
    starts.write_text(starts.read_text() + '{"time_s"')  # the machine lost power while a start was written
    record_start(RunDirectory(tmp_path), device, 4)

    rows = read_rows(starts)
    assert len(rows) == 2
    assert rows[0].keys() == {"time_s", "version", "commit", "hardware"}
    assert hardware in rows[0]["hardware"]
