"""Temporary folders that are removed with the process that owns them, or after it was killed by the next owner."""

from __future__ import annotations

import fcntl
import os
import platform
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path

LOCK = "OWNER.lock"
"""File in the folder that its owner has locked, with the name of the owner's host; launch/shared.sh also uses it."""
_LOCKING = ".locking"
_MEMORY = Path("/dev/shm")


class OwnedFolder:
    """A private folder in `parent` whose name starts with `prefix`."""

    def __init__(self, prefix: str, parent: Path) -> None:
        """Create the folder.

        Folders with the same prefix of this user whose owners on this host were killed are removed first.
        """
        _remove_abandoned(prefix, parent)
        self.path = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
        self._locks = [_lock_folder(self.path), _try_lock(self.path / _LOCKING)]
        (self.path / _LOCKING).write_text(f"{platform.node()}\n")
        (self.path / _LOCKING).rename(self.path / LOCK)  # locked before others can see it

    def close(self) -> None:
        """Remove the folder."""
        _remove(self.path)
        for lock in self._locks:
            if lock is not None:
                os.close(lock)
        self._locks = []


def is_owned(folder: Path) -> bool:
    """Return whether a process still owns the folder; a folder that this user may not read is assumed to be owned."""
    try:
        if not (folder / LOCK).is_file():
            return False
        lock = _try_lock(folder / LOCK)
    except OSError:
        return True
    if lock is None:
        return True
    os.close(lock)
    return False


def _remove(folder: Path) -> None:
    """Remove a folder in which ending processes may still be writing."""
    for _ in range(3):
        shutil.rmtree(folder, ignore_errors=True)


def _remove_abandoned(prefix: str, parent: Path) -> None:
    for folder in parent.glob(f"{prefix}*"):
        with suppress(FileNotFoundError):  # another process may be cleaning up at the same time
            if folder.is_symlink() or folder.stat().st_uid != os.getuid() or not (folder / LOCK).is_file():
                continue
            if not _is_of_this_host(folder / LOCK):
                continue
            lock = _try_lock(folder / LOCK)
            if lock is not None:
                _remove(folder)
                os.close(lock)


def _is_of_this_host(lock: Path) -> bool:
    """Return whether the owner is a process of this host: on some file systems locks count on one host only."""
    return lock.is_relative_to(_MEMORY) or lock.read_text().strip() == platform.node()


def _lock_folder(folder: Path) -> int:
    """Lock the folder itself: systemd-tmpfiles removes what is old, except in a locked folder (tmpfiles.d(5))."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    with suppress(OSError):  # not every file system can lock folders
        fcntl.flock(descriptor, fcntl.LOCK_SH)
    return descriptor


def _try_lock(path: Path) -> int | None:
    """Take an exclusive lock that the kernel releases with the process; return None if another process holds it."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    return descriptor
