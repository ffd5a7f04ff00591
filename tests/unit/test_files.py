import contextlib
import errno
import os
import re
import shutil
from pathlib import Path

import pytest

from megatron_bapo.errors import UserError
from megatron_bapo.files import make_folder, read_json_object, replace_folder, storage_failure


def test_a_folder_is_made_with_those_above_it_and_kept(tmp_path: Path) -> None:
    for _ in range(2):
        make_folder(tmp_path / "a" / "b", "run_dir=a/b")
    assert (tmp_path / "a" / "b").is_dir()


def test_a_folder_that_is_there_and_read_only_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: mode == os.R_OK)  # root, who runs tests, may write anywhere
    with pytest.raises(UserError, match=rf"^run_dir=x cannot be written to: {tmp_path} is read-only here; choose"):
        make_folder(tmp_path, "run_dir=x")


def test_a_file_in_place_of_the_folder_is_named_with_the_systems_reason(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=rf"^--output x cannot be written to \(File exists: {tmp_path}/file\); choose"):
        make_folder(tmp_path / "file", "--output x")


def test_a_folder_whose_replacement_is_interrupted_is_complete(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, complete = tmp_path / "hf", tmp_path / "hf.partial"
    files = ("a", "b")

    def write(content: str) -> None:
        complete.mkdir()
        for name in files:
            (complete / name).write_text(content)

    def half_deleted(old: Path, *, ignore_errors: bool) -> None:
        if old.exists():
            (old / "a").unlink()
            raise KeyboardInterrupt

    for content in ("first", "second", "third"):
        write(content)
        with monkeypatch.context() as patch, contextlib.suppress(KeyboardInterrupt):
            if content == "second":
                patch.setattr(shutil, "rmtree", half_deleted)
            replace_folder(folder, complete)
        assert {name: (folder / name).read_text() for name in files} == dict.fromkeys(files, content)
    assert list(tmp_path.iterdir()) == [folder]


def test_a_json_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=rf"^cannot read {tmp_path}/state\.json: No such file or directory"):
        read_json_object(tmp_path / "state.json")


def test_an_object_with_a_byte_order_mark_is_read(tmp_path: Path) -> None:
    (tmp_path / "state.json").write_bytes(b'\xef\xbb\xbf{"step": 3}')
    assert read_json_object(tmp_path / "state.json") == {"step": 3}


def test_a_full_disk_is_found_behind_other_errors_and_named_with_its_free_space(tmp_path: Path) -> None:
    try:
        try:
            raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT), "weights/rank-0.safetensors")
        except OSError as error:
            raise RuntimeError("the writer failed") from error
    except RuntimeError as error:
        found = storage_failure(error, tmp_path)

    assert str(found).startswith("Disk quota exceeded for weights/rank-0.safetensors on host ")
    assert re.search(rf": {tmp_path} has \d+ MiB free of \d+ MiB, ", str(found))


def test_an_error_that_may_go_away_is_not_taken_for_a_full_disk(tmp_path: Path) -> None:
    assert storage_failure(TimeoutError(errno.ETIMEDOUT, "timed out"), tmp_path) is None


def test_errors_that_are_each_others_causes_are_no_storage_failure(tmp_path: Path) -> None:
    """Ray's error has the callee's error as an attribute, and the callee's error is then raised from Ray's."""
    callee, rays = ValueError("failed"), RuntimeError("a task failed")
    rays.cause = callee  # pyright: ignore[reportAttributeAccessIssue]
    callee.__cause__ = rays
    assert storage_failure(callee, tmp_path) is None
