"""Owners of temporary folders that start at the same time, in Python and in the scripts of launch/."""

import subprocess
import sys
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
