"""Files and folders: writing safely to disk, reserved space, and errors for those that cannot be used."""

from __future__ import annotations

import json
import os
import shutil
import socket
import tempfile
from errno import EDQUOT, EFBIG, ENOSPC, EROFS
from pathlib import Path
from typing import Any

from megatron_bapo.errors import StorageFailed, UserError

_PERMANENT = (ENOSPC, EDQUOT, EROFS)
"""Errors of a write that fails however often it is repeated: no space, quota exceeded, read-only file system."""


def flush(path: Path) -> None:
    """Flush a file's contents, or a folder's entries, to the disk, so that they survive a power failure."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def replace_text(path: Path, text: str) -> None:
    """Write the file atomically: write, sync and rename a temporary file in the same folder."""
    temporary = path.with_name(path.name + ".tmp")
    # A response can contain an unpaired surrogate, which UTF-8 cannot encode.
    with temporary.open("w", encoding="utf-8", errors="replace") as file:
        file.write(text)
    flush(temporary)
    temporary.replace(path)


def replace_folder(folder: Path, complete: Path) -> None:
    """Rename the complete folder to `folder`. A folder that has this name is renamed and then deleted.

    So a folder with this name is complete, wherever the replacement is interrupted. The next one removes what is left.
    """
    old = folder.with_name(folder.name + ".old.partial")
    shutil.rmtree(old, ignore_errors=True)
    if folder.exists():
        folder.rename(old)
    complete.rename(folder)
    if old.exists():
        flush(folder.parent)  # the new name, before the old folder is deleted
        shutil.rmtree(old, ignore_errors=True)


def make_folder(folder: Path, label: str) -> None:
    """Create a folder and its parents unless they exist. Raises UserError if the folder cannot be written to.

    `label` names it in messages, such as run_dir=runs/mine.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise unwritable(label, error) from None
    if not os.access(folder, os.W_OK | os.X_OK):
        raise UserError(f"{label} cannot be written to: {folder} is read-only here; {_WAY_OUT}")


def unwritable(label: str, error: OSError) -> UserError:
    """Return the error for a file or folder that the system refused to write, with the system's reason."""
    name = error.filename2 or error.filename  # of a copy, the second file is the one that is written
    place = "" if name is None else f": {name}"
    way_out = _WAYS_OUT.get(error.errno or 0, _WAY_OUT)
    return UserError(f"{label} cannot be written to ({error.strerror or error}{place}); {way_out}")


_WAY_OUT = "choose another folder, or make this one writable"
_WAYS_OUT = {
    ENOSPC: "free disk space, or choose a folder on another disk",
    EDQUOT: "delete other files, or choose a folder with another quota",
    EFBIG: "raise the limit on the size of a file (ulimit -f), or choose a folder on another file system",
}


def reserve(path: Path, size: int) -> None:
    """Create a file of `size` bytes, whose space can be written to, or freed, when the disk is full."""
    with path.open("wb") as file:
        file.write(b" " * size)
    flush(path)


def storage_failure(error: BaseException, folder: Path) -> StorageFailed | None:
    """Return the error for a disk that takes no more writes if it is the cause of `error`, else None.

    `folder` is where this process mainly writes. The message shows the free space there and in the system's folders.
    """
    cause: BaseException | None = error
    seen: set[int] = set()
    while cause is not None and id(cause) not in seen:
        seen.add(id(cause))  # an error that is raised from Ray's error for it makes a cycle
        if isinstance(cause, StorageFailed):
            return cause
        if isinstance(cause, OSError) and cause.errno in _PERMANENT:
            places = dict.fromkeys([folder, Path(tempfile.gettempdir()), Path("/dev/shm")])
            free = ", ".join(map(_free_space, places))
            file = "" if cause.filename is None else f" for {cause.filename}"
            return StorageFailed(f"{os.strerror(cause.errno)}{file} on host {socket.gethostname()}: {free}")
        # Ray's errors have the callee's error as an attribute.
        cause = getattr(cause, "cause", None) or cause.__cause__ or cause.__context__
    return None


def _free_space(folder: Path) -> str:
    try:
        usage = shutil.disk_usage(folder)
    except OSError as error:
        return f"{folder} cannot be read ({error.strerror})"
    return f"{folder} has {usage.free >> 20} MiB free of {usage.total >> 20} MiB"


def read_json_object(path: Path) -> dict[str, Any]:
    """Read a JSON file that contains one object. Raises UserError if it cannot be read or is not one whole object."""
    try:
        value = json.loads(path.read_bytes())
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror or error}") from None
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} must be JSON ({error}); download or write it again") from None
    if not isinstance(value, dict):
        raise UserError(f"{path} must be a JSON object, not a {type(value).__name__}; download or write it again")
    return value
