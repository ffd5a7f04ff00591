import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron_bapo.cluster.ray_folder import PREFIX, ray_folder

HOLD = "from megatron_bapo.cluster.ray_folder import ray_folder\nwith ray_folder() as f: print(f, flush=True); input()"


@pytest.fixture
def parent(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A parent of the folders whose path is short enough for sockets, unlike pytest's."""
    with tempfile.TemporaryDirectory(prefix="b-", dir="/tmp") as created:
        monkeypatch.setenv("RAY_TMPDIR", created)
        yield Path(created)


def test_the_folder_is_private_and_removed_at_the_end(parent: Path) -> None:
    with ray_folder() as folder:
        assert folder.parent.name.startswith(PREFIX)
        assert oct(folder.parent.stat().st_mode)[-3:] == "700"
        folder.mkdir()
        (folder / "raylet.out").touch()
    assert list(parent.iterdir()) == []


def test_the_folder_of_a_killed_owner_is_removed_and_that_of_a_living_one_is_not(parent: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", HOLD], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env={**os.environ}
    ) as owner:
        assert owner.stdout is not None
        abandoned = Path(owner.stdout.readline().strip()).parent
        with ray_folder():
            assert abandoned.is_dir()
        owner.send_signal(signal.SIGKILL)
        owner.wait(timeout=20)
    with ray_folder():
        assert not abandoned.exists()


def test_a_parent_that_is_too_long_for_sockets_is_replaced_by_tmp(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    long = tmp_path / ("a" * 30)
    long.mkdir()
    monkeypatch.setenv("RAY_TMPDIR", str(long))
    with ray_folder() as folder:
        longest = f"{folder}/session_2026-01-01_00-00-00_000000_4194304/sockets/plasma_store"
        assert folder.parent.parent == Path("/tmp")
        assert len(longest) <= 107
