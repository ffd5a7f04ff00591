"""The weight store: policy versions in a shared-memory folder, written by trainer ranks and read by a host's engines.

    <folder>/plan-<digest>.json             slices of each bucket
             00000007/weights.safetensors   whole tensors; every writer fills in its slices
                      rank-0.json           checksums of one writer's buckets, written after the buckets
                      COMMITTED.json        checksums of all buckets; the version exists once this file does
             spare.safetensors              file of a discarded version, reused by the next one
             spare.json                     committed version whose bytes it was given, if any

Both kinds of manifest are written to a temporary file and renamed, and every bucket has an XXH3 checksum. A process
may therefore be killed at any moment: incomplete data is never read. Two files alternate, because fresh shared memory
costs several times as much as a copy. A discarded version first loses its manifest, and every reader checks for the
manifest again after reading. Nothing is flushed to disk, because nothing needs to outlive the host.
"""

from __future__ import annotations

import fcntl
import json
import os
import platform
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, TypeVar

import torch
from xxhash import xxh3_128

from megatron_bapo.errors import RunError
from megatron_bapo.owned_folder import OwnedFolder
from megatron_bapo.weight_sync.plan import NUM_THREADS, Slice, WeightPlan
from megatron_bapo.weight_sync.plan_files import read_plan, write_json, write_plan
from megatron_bapo.weight_sync.version_file import (
    MappedFile,
    MappedFiles,
    VersionReader,
    VersionWriter,
    create,
    file_bytes,
    raw_bytes,
)

SHARED_MEMORY = Path("/dev/shm")
PREFIX = "megatron-bapo-"
COMMITTED = "COMMITTED.json"
WEIGHTS = "weights.safetensors"
SPARE = "spare.safetensors"
PREPARED = "spare.json"
FILES = "FILES.lock"

T = TypeVar("T")
Read = Callable[[Slice], torch.Tensor]
Checksums = dict[int, str]
"""Bucket number in the plan -> XXH3-128 digest of the bytes of its slices, hex."""


@dataclass(frozen=True)
class Manifest:
    """Contents of a committed version."""

    version: int
    plan: str
    """Digest of the plan."""
    host: int
    """Number of this store's host in the plan."""
    checksums: Checksums


class BucketWriter:
    """Writes buckets into the file of a version, from several threads if needed, and records their checksums."""

    def __init__(self, plan: WeightPlan, file: VersionWriter, base: int | None) -> None:
        """`base` is the version of the same plan whose bytes the file has before anything is written, if any."""
        self._plan, self._file, self.mapped, self.base = plan, file, file.mapped, base
        self.checksums: Checksums = {}

    def write(self, number: int, tensors: Iterable[torch.Tensor]) -> int:
        """Write the slices of a bucket, copying one at a time, and return the number of bytes."""
        hasher, num_bytes = xxh3_128(), 0
        for part, tensor in zip(self._plan.buckets[number].slices, tensors, strict=True):
            value = tensor.detach().cpu().contiguous()
            assert str(value.dtype) == f"torch.{self._plan.dtype}", (
                f"{part.name} is {value.dtype}, not the plan's dtype"
            )
            assert value.shape == part.box.shape, f"{part} has the shape {list(value.shape)}"
            hasher.update(raw_bytes(value))
            self._file.write(part, value)
            num_bytes += value.nbytes
        self.checksums[number] = hasher.hexdigest()
        return num_bytes


class WeightStore:
    """The store in one folder. Every process opens its own instance; the creator of the folder closes it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._owned: OwnedFolder | None = None
        self._mapped_files = MappedFiles()

    @classmethod
    def create(cls, parent: Path | None = None) -> Self:
        """Create a store in a new private folder under `parent`: by default shared memory or else the temporary folder.

        Folders of killed owners in `parent` are removed first, because they occupy memory for whole models.
        """
        if parent is None:
            parent = SHARED_MEMORY if os.access(SHARED_MEMORY, os.W_OK) else Path(tempfile.gettempdir())
        owned = OwnedFolder(PREFIX, parent)
        store = cls(owned.path)
        store._owned = owned
        return store

    def close(self) -> None:
        """Remove the folder. Engines can still read files that they have mapped."""
        if self._owned is None:
            shutil.rmtree(self.folder, ignore_errors=True)
        else:
            self._owned.close()

    def versions(self) -> list[int]:
        """Return the committed versions, oldest first."""
        return sorted(int(manifest.parent.name) for manifest in self.folder.glob(f"*/{COMMITTED}"))

    def write(self, version: int, plan: WeightPlan, rank: int, read: Read) -> int:
        """Write the buckets of a trainer rank to its host's store and return the number of bytes.

        `read` returns the value of a slice, on any device; `NUM_THREADS` slices are copied at a time. Raises RunError
        if the version is not newer than the committed ones, or if memory is insufficient.
        """
        with self.bucket_writer(version, plan, plan.sender_hosts[rank], f"rank-{rank}") as writer:
            return sum(in_threads(lambda i: writer.write(i, map(read, plan.buckets[i].slices)), plan.sent_by(rank)))

    @contextmanager
    def bucket_writer(self, version: int, plan: WeightPlan, host: int, writer_name: str) -> Iterator[BucketWriter]:
        """Yield a writer for the buckets of a version. They become valid when the context ends without an error."""
        self._refuse_stale(version)
        folder = self._version_folder(version)
        manifest = folder / f"{writer_name}.json"
        # A writer that starts over must not look complete in the meantime.
        manifest.unlink(missing_ok=True)
        base = self._create(version, plan, host)
        write_plan(self.folder, plan)
        path = folder / WEIGHTS
        with closing(VersionWriter(path, self._mapped_files.map(path, plan.shapes, plan.dtype))) as file:
            yield (writer := BucketWriter(plan, file, base))
        write_json(manifest, {"plan": plan.digest, "checksums": writer.checksums})

    def commit(self, version: int, plan: WeightPlan, host: int = 0) -> Manifest:
        """Make a version readable after all buckets that this host needs have been written.

        Raises RunError if the version is not newer than the committed ones, or if a bucket is missing.
        """
        self._refuse_stale(version)
        checksums = self.written(version, plan)
        if missing := sorted(set(plan.needed_on(host)) - checksums.keys()):
            senders = sorted({plan.buckets[number].sender for number in missing})
            raise RunError(
                f"policy version {version} is incomplete: buckets are missing from trainer rank "
                f"{', '.join(map(str, senders))}; every writer must finish its write before the commit"
            )
        content = {"version": version, "plan": plan.digest, "host": host, "checksums": checksums}
        write_json(self._version_folder(version) / COMMITTED, content)
        return self.manifest(version)

    def written(self, version: int, plan: WeightPlan) -> Checksums:
        """Return the buckets that are completely written under this plan, committed or not."""
        parts = [_read_json(file) for file in self._version_folder(version).glob("*.json") if file.name != COMMITTED]
        return {
            int(number): checksum
            for part in parts
            if part["plan"] == plan.digest
            for number, checksum in part["checksums"].items()
        }

    def manifest(self, version: int) -> Manifest:
        """Return the manifest of a version. Raises RunError if it is not committed."""
        try:
            content = _read_json(self._version_folder(version) / COMMITTED)
        except FileNotFoundError:
            raise RunError(
                f"policy version {version} is not committed; {self.folder} contains {self.versions()}"
            ) from None
        checksums = {int(number): checksum for number, checksum in content["checksums"].items()}
        return Manifest(content["version"], content["plan"], content["host"], checksums)

    def plan(self, version: int) -> WeightPlan:
        """Return the plan under which a committed version was written."""
        return read_plan(self.folder, self.manifest(version).plan)

    def open(self, version: int) -> VersionReader:
        """Open the file of a version, complete or not."""
        return VersionReader(self._version_folder(version) / WEIGHTS)

    def map(self, version: int) -> MappedFile:
        """Return the mapping of a committed version's file, for reading."""
        plan = self.plan(version)
        return self._mapped_files.map(self._version_folder(version) / WEIGHTS, plan.shapes, plan.dtype)

    def verify(self, version: int, reader: int | None = None) -> int:
        """Verify the checksums of the buckets that an engine rank reads, or of all buckets; return the number of bytes.

        Raises RunError if the version is not committed or a bucket is damaged.
        """
        manifest, plan = self.manifest(version), self.plan(version)
        numbers = _read_numbers(plan, manifest.host, reader)
        try:
            file = self.open(version)
        except Exception as error:  # safetensors has its own error class for truncated files
            raise self._damaged(version, "the file", error) from error

        def verify_bucket(number: int) -> int:
            found = checksum(map(file.slice, plan.buckets[number].slices))
            if found != manifest.checksums[number]:
                names = ", ".join(sorted({part.name for part in plan.buckets[number].slices})[:3])
                raise self._damaged(
                    version, f"bucket {number} ({names}, ...)", f"expected {manifest.checksums[number]}, found {found}"
                )
            return plan.buckets[number].num_bytes

        return sum(in_threads(verify_bucket, numbers))

    def read(self, version: int, reader: int | None = None) -> Iterator[tuple[str, torch.Tensor]]:
        """Iterate over the tensors of a committed version that an engine rank needs, memory-mapped and sorted by name.

        Only that rank's part of each tensor is guaranteed to be valid, or without `reader` the part that this host has.
        Call `verify` before and `manifest` after: a version that is still committed was not overwritten.
        """
        manifest, plan = self.manifest(version), self.plan(version)
        numbers = _read_numbers(plan, manifest.host, reader)
        file = self.open(version)
        for name in sorted(_names(plan, numbers)):
            yield name, file.tensor(name)

    def prepare(self, version: int) -> None:
        """Copy a committed version to the spare file, if a version was discarded before.

        The next version's file then has these bytes, so that only differences to them have to be written.
        """
        manifest, plan, spare = self.manifest(version), self.plan(version), self.folder / SPARE
        is_usable = spare.exists() and spare.stat().st_size == file_bytes(plan.shapes, plan.dtype)
        if not is_usable or self._prepared(plan) == version:
            return
        (self.folder / PREPARED).unlink(missing_ok=True)
        numbers = plan.stored_on(manifest.host)
        create(spare, plan.shapes, plan.dtype, sorted(_names(plan, numbers)))
        source, target = self.map(version), self._mapped_files.map(spare, plan.shapes, plan.dtype)

        def copy_bucket(number: int) -> None:
            for part in plan.buckets[number].slices:
                target.slice(part).copy_(source.slice(part))

        in_threads(copy_bucket, numbers)
        write_json(self.folder / PREPARED, {"version": version, "plan": plan.digest})

    def _prepared(self, plan: WeightPlan) -> int | None:
        """Return the version of this plan whose bytes the spare file has, if any."""
        with suppress(FileNotFoundError):
            content = _read_json(self.folder / PREPARED)
            return content["version"] if content["plan"] == plan.digest else None
        return None

    def discard_before(self, version: int) -> None:
        """Discard older versions, including unfinished ones; the newest committed version is always kept."""
        keep = min([version, *self.versions()[-1:]])
        with self._files_locked():
            for folder in self._before(keep):
                self._discard(folder)

    def _discard(self, folder: Path) -> None:
        # The commit marker goes first: a partial or overwritten version must not look committed.
        (folder / COMMITTED).unlink(missing_ok=True)
        for manifest in folder.glob("*.json"):
            manifest.unlink()
        (self.folder / PREPARED).unlink(missing_ok=True)
        with suppress(FileNotFoundError):
            (folder / WEIGHTS).rename(self.folder / SPARE)
        shutil.rmtree(folder)

    def _before(self, version: int) -> list[Path]:
        """Return the folders of older versions; vLLM's temporary files in the same folder are excluded."""
        return [folder for folder in self.folder.iterdir() if folder.name.isdigit() and int(folder.name) < version]

    def _create(self, version: int, plan: WeightPlan, host: int) -> int | None:
        """Create the file of a version if no other writer has; return the version whose bytes it has, if any."""
        path = self._version_folder(version) / WEIGHTS
        with self._files_locked():
            path.parent.mkdir(mode=0o700, exist_ok=True)
            if path.exists():
                return None
            for older in self._before(version):
                if not (older / COMMITTED).exists():
                    self._discard(older)  # its writers were killed
            size, spare = file_bytes(plan.shapes, plan.dtype), self.folder / SPARE
            if spare.exists() and spare.stat().st_size != size:
                spare.unlink()
            base = self._prepared(plan) if spare.exists() else None
            (self.folder / PREPARED).unlink(missing_ok=True)
            partial = spare if spare.exists() else path.with_suffix(".partial")
            try:
                create(partial, plan.shapes, plan.dtype, sorted(_names(plan, plan.stored_on(host))))
            except OSError as error:
                partial.unlink(missing_ok=True)
                free_bytes = shutil.disk_usage(self.folder).free
                raise RunError(
                    f"the weight store needs {size / 2**20:.0f} MiB for policy version {version}, but {self.folder} "
                    f"has {free_bytes / 2**20:.0f} MiB left ({error.strerror}); increase shared memory (in a "
                    "container: --shm-size, at least twice the model size)"
                ) from None
            partial.rename(path)
            return base

    @contextmanager
    def _files_locked(self) -> Iterator[None]:
        """Hold the lock of the store's files against other writer processes; the kernel releases it when one dies."""
        try:
            descriptor = os.open(self.folder / FILES, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except FileNotFoundError:
            raise RunError(
                f"the weight store {self.folder} on {platform.node()} was removed while the run used it. "
                "systemd-logind removes a user's files in /dev/shm when the user's last session on a host ends: set "
                "RemoveIPC=no in its logind.conf, or run `loginctl enable-linger`"
            ) from None
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            os.close(descriptor)

    def _version_folder(self, version: int) -> Path:
        return self.folder / f"{version:08d}"

    def _refuse_stale(self, version: int) -> None:
        newest = max(self.versions(), default=None)
        if newest is not None and version <= newest:
            raise RunError(f"policy version {version} is stale: the store already has {newest}; versions must increase")

    def _damaged(self, version: int, what: str, why: object) -> RunError:
        return RunError(
            f"policy version {version} in {self.folder} is damaged: {what}: {why}; publish the weights again"
        )


def checksum(slices: Iterable[torch.Tensor]) -> str:
    """Return the XXH3-128 digest of the concatenated bytes of slices in host memory, as hexadecimal digits."""
    hasher = xxh3_128()
    for value in slices:
        hasher.update(raw_bytes(value.contiguous()))
    return hasher.hexdigest()


def in_threads(task: Callable[[int], T], numbers: Sequence[int]) -> list[T]:
    """Run the task for each number in threads and return the results; checksums and copies release the GIL.

    Raises the first error of a task.
    """
    with ThreadPoolExecutor(NUM_THREADS) as pool:  # per call, so that a process forked later inherits no threads
        return list(pool.map(task, numbers))


def _read_numbers(plan: WeightPlan, host: int, reader: int | None) -> Sequence[int]:
    return plan.needed_on(host) if reader is None else plan.read_by(reader, host)


def _names(plan: WeightPlan, numbers: Sequence[int]) -> set[str]:
    """Return the names of the tensors in these buckets."""
    return {part.name for number in numbers for part in plan.buckets[number].slices}


def _read_json(path: Path) -> Any:
    return json.loads(path.read_text())
