"""The weight store: policy versions in a folder of shared memory, from the trainer's ranks to a host's engines.

    <folder>/00000007/stage-0-00000.safetensors    one bucket
                      stage-0.json                 one writer's buckets, written after them
                      COMMITTED.json               all writers' buckets: from here on the version exists

Both kinds of manifest appear whole or not at all (written aside, then renamed) and every bucket carries a BLAKE3
checksum, so a process may be killed at any moment: what it left is never read. Nothing is flushed to disk, because
nothing needs to outlive the host.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

from blake3 import blake3
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from megatron_bapo.errors import RunError
from megatron_bapo.weight_sync.buckets import buckets

SHARED_MEMORY = Path("/dev/shm")
PREFIX = "megatron-bapo-"
COMMITTED = "COMMITTED.json"
OWNER = "OWNER.lock"
HEADER_BYTES = 1 << 20
"""Room kept for a bucket's safetensors header."""


@dataclass(frozen=True)
class TensorInfo:
    shape: tuple[int, ...]
    dtype: str
    """As PyTorch spells it, without `torch.`."""


@dataclass(frozen=True)
class Bucket:
    """One safetensors file of a version."""

    file: str
    num_bytes: int
    checksum: str
    """BLAKE3 of the whole file, hex."""
    tensors: dict[str, TensorInfo]


@dataclass(frozen=True)
class Manifest:
    """What a committed version consists of."""

    version: int
    total_bytes: int
    buckets: tuple[Bucket, ...]

    def tensors(self) -> dict[str, TensorInfo]:
        return {name: info for bucket in self.buckets for name, info in bucket.tensors.items()}


class WeightStore:
    """A view of one store's folder. Every process opens its own; the one that created the folder closes it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._owner_lock: int | None = None

    @classmethod
    def create(cls, parent: Path | None = None) -> Self:
        """A new, private folder under `parent`: by default shared memory, or the temporary folder where there is none.

        Folders of owners that were killed are removed from there first, because they hold whole models in memory.
        """
        if parent is None:
            parent = SHARED_MEMORY if os.access(SHARED_MEMORY, os.W_OK) else Path(tempfile.gettempdir())
        _remove_abandoned(parent)
        store = cls(Path(tempfile.mkdtemp(prefix=PREFIX, dir=parent)))
        store._owner_lock = _try_lock(store.folder / OWNER)
        return store

    def close(self) -> None:
        """Remove the folder. What engines have mapped stays readable to them."""
        shutil.rmtree(self.folder, ignore_errors=True)
        if self._owner_lock is not None:
            os.close(self._owner_lock)
            self._owner_lock = None

    def versions(self) -> list[int]:
        """The committed versions, oldest first."""
        return sorted(int(manifest.parent.name) for manifest in self.folder.glob(f"*/{COMMITTED}"))

    def write(
        self, version: int, writer_name: str, named_tensors: Iterable[tuple[str, Tensor]], bucket_bytes: int
    ) -> list[Bucket]:
        """Write one writer's part of a version; at most `bucket_bytes`, or one larger tensor, is held at a time.

        Raises RunError when the version is not newer than the committed ones, or memory does not suffice.
        """
        self._refuse_stale(version)
        folder = self._version_folder(version)
        folder.mkdir(mode=0o700, exist_ok=True)
        manifest = folder / f"{writer_name}.json"
        # A writer that starts over must not be taken for complete meanwhile.
        manifest.unlink(missing_ok=True)
        written = []
        for index, bucket in enumerate(buckets(named_tensors, bucket_bytes)):
            written.append(_write_bucket(folder / f"{writer_name}-{index:05d}.safetensors", bucket))
        _write_json(manifest, [asdict(bucket) for bucket in written])
        return written

    def commit(self, version: int, writers: Sequence[str]) -> Manifest:
        """Make a version readable, once all its writers are done.

        Raises RunError when the version is not newer than the committed ones, a writer's manifest is missing, or two
        tensors have one name.
        """
        self._refuse_stale(version)
        folder = self._version_folder(version)
        missing = [writer for writer in writers if not (folder / f"{writer}.json").is_file()]
        if missing:
            raise RunError(
                f"policy version {version} is incomplete: nothing complete from {', '.join(missing)}; every writer "
                "must have returned from its write before the commit"
            )
        parts = [_bucket(entry) for writer in writers for entry in _read_json(folder / f"{writer}.json")]
        twice = [name for name, count in Counter(name for part in parts for name in part.tensors).items() if count > 1]
        if twice:
            raise RunError(f"policy version {version} has tensor {twice[0]} twice; every name belongs to one writer")
        manifest = Manifest(version, sum(part.num_bytes for part in parts), tuple(parts))
        _write_json(folder / COMMITTED, asdict(manifest))
        return manifest

    def manifest(self, version: int) -> Manifest:
        """What a version consists of; RunError when it is not committed."""
        try:
            content = _read_json(self._version_folder(version) / COMMITTED)
        except FileNotFoundError:
            raise RunError(
                f"policy version {version} is not committed; {self.folder} holds {self.versions()}"
            ) from None
        return Manifest(content["version"], content["total_bytes"], tuple(map(_bucket, content["buckets"])))

    def read(self, version: int) -> Iterator[tuple[str, Tensor]]:
        """The tensors of a committed version, memory-mapped, in the order in which they were written.

        Raises RunError when the version is not committed, and, on reaching it, for a bucket that is damaged.
        """
        return _read_buckets(self._version_folder(version), self.manifest(version).buckets)

    def discard_before(self, version: int) -> None:
        """Delete older versions, unfinished ones included; the newest committed one always stays."""
        keep = min([version, *self.versions()[-1:]])
        for folder in self.folder.iterdir():
            if folder.is_dir() and int(folder.name) < keep:
                # Half a deletion must not look like a version.
                (folder / COMMITTED).unlink(missing_ok=True)
                shutil.rmtree(folder)

    def _version_folder(self, version: int) -> Path:
        return self.folder / f"{version:08d}"

    def _refuse_stale(self, version: int) -> None:
        newest = max(self.versions(), default=None)
        if newest is not None and version <= newest:
            raise RunError(f"policy version {version} is stale: the store already has {newest}, and versions only grow")


def _write_bucket(path: Path, bucket: dict[str, Tensor]) -> Bucket:
    num_bytes = sum(tensor.nbytes for tensor in bucket.values())
    free_bytes = shutil.disk_usage(path.parent).free
    if free_bytes < num_bytes + HEADER_BYTES:
        raise RunError(
            f"the weight store needs {num_bytes / 2**20:.0f} MiB for {path.name}, {path.parent} has "
            f"{free_bytes / 2**20:.0f} MiB left; give shared memory more room (in a container: --shm-size, at least "
            "twice the model's size)"
        )
    save_file({name: tensor.contiguous() for name, tensor in bucket.items()}, path)
    tensors = {name: TensorInfo(tuple(t.shape), str(t.dtype).removeprefix("torch.")) for name, t in bucket.items()}
    return Bucket(path.name, num_bytes, _checksum(path), tensors)


def _read_buckets(folder: Path, parts: Iterable[Bucket]) -> Iterator[tuple[str, Tensor]]:
    for part in parts:
        path = folder / part.file
        found = _checksum(path) if path.is_file() else "no file"
        if found != part.checksum:
            raise RunError(
                f"{path} is damaged: expected BLAKE3 {part.checksum}, found {found}; publish the weights again"
            )
        with safe_open(path, "pt") as file:
            for name in part.tensors:
                yield name, file.get_tensor(name)


def _checksum(path: Path) -> str:
    return blake3().update_mmap(path).hexdigest()


def _write_json(path: Path, content: object) -> None:
    aside = path.with_suffix(".partial")
    aside.write_text(json.dumps(content))
    aside.replace(path)


def _read_json(path: Path) -> Any:
    return json.loads(path.read_text())


def _bucket(entry: dict[str, Any]) -> Bucket:
    tensors = {name: TensorInfo(tuple(info["shape"]), info["dtype"]) for name, info in entry["tensors"].items()}
    return Bucket(entry["file"], entry["num_bytes"], entry["checksum"], tensors)


def _remove_abandoned(parent: Path) -> None:
    for folder in parent.glob(f"{PREFIX}*"):
        with suppress(FileNotFoundError):  # another process may be tidying up, too
            if folder.is_symlink() or folder.stat().st_uid != os.getuid() or not (folder / OWNER).is_file():
                continue
            lock = _try_lock(folder / OWNER)
            if lock is not None:
                shutil.rmtree(folder, ignore_errors=True)
                os.close(lock)


def _try_lock(path: Path) -> int | None:
    """An exclusive lock that the kernel releases with the process, or None when another process holds it."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    return descriptor
