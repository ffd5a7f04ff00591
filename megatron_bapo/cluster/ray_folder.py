"""The temporary folder of a Ray cluster on this machine: private to its user and run, and removed at its end."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from megatron_bapo.owned_folder import OwnedFolder

PREFIX = "bapo-ray-"
"""Start of the folders' names; launch/ray_node.sh also uses it."""
_MAX_PARENT_LENGTH = 21
"""Ray's sockets lie 64 characters below its folder, and paths of sockets have at most 107 (unix(7))."""


@contextmanager
def ray_folder() -> Iterator[Path]:
    """Create a folder for Ray's sockets, logs and spilled objects, and remove it at the end of the context.

    Ray's default, /tmp/ray, belongs to the machine's first user of Ray and is never removed. Ray opens its folder to
    everybody, so it lies in a private one. Folders of killed owners are removed first.
    """
    with closing(OwnedFolder(PREFIX, _parent())) as folder:
        yield folder.path / "ray"


def _parent() -> Path:
    """Return RAY_TMPDIR or TMPDIR, or /tmp if neither can hold sockets."""
    chosen = Path(os.environ.get("RAY_TMPDIR") or os.environ.get("TMPDIR") or "/tmp")
    return chosen if chosen.is_absolute() and len(str(chosen)) <= _MAX_PARENT_LENGTH else Path("/tmp")
