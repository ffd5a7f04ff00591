"""Owners of temporary folders that start at the same time, in Python and in the scripts of launch/."""

import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from megatron_bapo.owned_folder import LOCK, OwnedFolder

PREFIX = "bapo-ray-"
SHARED = Path(__file__).parents[2] / "launch" / "shared.sh"
STARTS_AND_ENDS = f"""
import sys
from pathlib import Path
from megatron_bapo.owned_folder import OwnedFolder
while True:
    OwnedFolder({PREFIX!r}, Path(sys.argv[1])).close()
    print(flush=True)
"""
OWNS = f"""
set -euo pipefail
source {SHARED}
for _ in {{1..40}}; do
    folder=$(mktemp -d "$1/{PREFIX}XXXXXX")
    own_folder "$folder"
    [[ -f $folder/{LOCK} ]] || {{ echo "$folder is gone" >&2; exit 1; }}
done
"""
CLEANED = f"""
set -euo pipefail
source {SHARED}
folder=$(mktemp -d "$1/{PREFIX}XXXXXX")
own_folder "$folder"
mkdir -p "$folder/ray/session"
touch "$folder/ray/session/log"
sleep 1.1
systemd-tmpfiles --clean "$2"
find "$folder" -type f -printf '%P\\n' | sort
"""


def clean(parent: Path) -> None:
    """Remove what is older than a second, as systemd does every day with what is older than ten days in /tmp."""
    time.sleep(1.1)
    subprocess.run(["systemd-tmpfiles", "--clean", parent.with_name("clean.conf")], check=True, timeout=60)


@pytest.fixture
def cleaned(tmp_path: Path) -> Path:
    """A folder that `clean` may clean up; an old file of nobody in it shows that it does."""
    if shutil.which("systemd-tmpfiles") is None:
        pytest.skip("systemd-tmpfiles is not installed")
    (tmp_path / "clean.conf").write_text(f"d {tmp_path}/temporary - - - 1s\n")
    (parent := tmp_path / "temporary").mkdir()
    (parent / "old").touch()
    return parent


@contextmanager
def others_start_and_end(parent: Path) -> Iterator[None]:
    """Have another process create folders in `parent` again and again; each time it removes those without an owner."""
    with subprocess.Popen([sys.executable, "-c", STARTS_AND_ENDS, parent], stdout=subprocess.PIPE) as others:
        try:
            assert others.stdout is not None
            others.stdout.readline()
            yield
        finally:
            others.kill()


@pytest.mark.slow
def test_an_owner_keeps_its_folder_while_others_start(tmp_path: Path) -> None:
    with others_start_and_end(tmp_path):
        for _ in range(1000):
            folder = OwnedFolder(PREFIX, tmp_path)
            assert (folder.path / LOCK).is_file()
            folder.close()
            assert not folder.path.exists()


@pytest.mark.slow
def test_a_script_keeps_its_folder_while_others_start(tmp_path: Path) -> None:
    with others_start_and_end(tmp_path):
        done = subprocess.run(["bash", "-c", OWNS, "owner", tmp_path], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_the_folder_of_an_owner_outlives_the_cleanup_of_old_files(cleaned: Path) -> None:
    folder = OwnedFolder(PREFIX, cleaned)
    (folder.path / "ray").mkdir()
    (folder.path / "ray" / "log").touch()
    clean(cleaned)
    assert sorted(path.name for path in cleaned.rglob("*")) == [LOCK, folder.path.name, "log", "ray"]
    folder.close()
    assert not folder.path.exists()


@pytest.mark.slow
def test_the_folder_of_a_script_outlives_the_cleanup_of_old_files(cleaned: Path) -> None:
    conf = cleaned.with_name("clean.conf")
    done = subprocess.run(["bash", "-c", CLEANED, "owner", cleaned, conf], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (0, f"{LOCK}\nray/session/log\n"), done.stderr
    assert not (cleaned / "old").exists()
    clean(cleaned)
    assert list(cleaned.iterdir()) == []


@pytest.mark.parametrize(("host", "is_left"), [("another", True), (platform.node(), False)])
def test_the_folder_of_another_host_is_left(host: str, is_left: bool, tmp_path: Path) -> None:
    """On a shared file system whose locks count on one host only its owner may be running there."""
    (folder := tmp_path / f"{PREFIX}x1").mkdir()
    (folder / LOCK).write_text(f"{host}\n")
    OwnedFolder(PREFIX, tmp_path).close()
    assert folder.exists() == is_left


def test_scripts_and_processes_name_their_host_in_the_same_way(tmp_path: Path) -> None:
    own = OwnedFolder(PREFIX, tmp_path)
    names = f'source {SHARED}; mkdir "$1/x"; own_folder "$1/x"; cat "$1/x/{LOCK}"'
    done = subprocess.run(["bash", "-euc", names, "owner", tmp_path], capture_output=True, text=True, timeout=60)
    assert done.stdout == (own.path / LOCK).read_text() == f"{platform.node()}\n"
    own.close()
