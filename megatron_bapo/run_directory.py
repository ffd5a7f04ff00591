"""The run directory: the paths of what a run writes, its lock, and the trainer's failure report to the launcher."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_bapo.errors import ProbeFailed, RunError, StorageFailed, UserError
from megatron_bapo.files import make_folder, read_json_object, reserve, storage_failure

FINISHED = "finished"
"""The phase after which nothing is left to do."""
FAILURES: dict[str, type[UserError | RunError]] = {
    "user": UserError,
    "probe": ProbeFailed,
    "storage": StorageFailed,
    "run": RunError,
}
"""Kinds of failure in the trainer's report to the launcher. An error has the first kind whose class it is of."""
_FAILURE_BYTES, _MESSAGE_BYTES = 1 << 16, 1 << 20


@dataclass(frozen=True)
class RunDirectory:
    """Paths of the files and folders that a run writes."""

    root: Path

    @property
    def config(self) -> Path:
        return self.root / "config.yaml"

    @property
    def metrics(self) -> Path:
        return self.root / "metrics.jsonl"

    @property
    def updates(self) -> Path:
        return self.root / "updates.jsonl"

    @property
    def tokens(self) -> Path:
        return self.root / "tokens"

    @property
    def rollouts(self) -> Path:
        """Folder of complete rollout batches, one file per step."""
        return self.root / "rollouts"

    @property
    def validation_rollouts(self) -> Path:
        """Folder of all responses to held-out prompts, one file per evaluation."""
        return self.root / "validation_rollouts"

    @property
    def sampled_rollouts(self) -> Path:
        """Folder of sampled rollouts with what the updates did with each token, one file per step."""
        return self.root / "sampled_rollouts"

    @property
    def is_rollout_only(self) -> bool:
        """Whether `train --rollout-only` wrote the rollout batches: a trainer would have opened its metrics first."""
        return any(self.rollouts.glob("step-*.parquet")) and not self.metrics.exists()

    @property
    def samples(self) -> Path:
        return self.root / "samples.jsonl"

    @property
    def quarantined(self) -> Path:
        """Quarantined prompts: engines failed at them too often, or their reward or environment failed."""
        return self.root / "quarantined.jsonl"

    @property
    def requests(self) -> Path:
        """Start and end of each request to an engine."""
        return self.root / "requests.jsonl"

    @property
    def service_records(self) -> tuple[Path, Path]:
        """Files to which the rollout service appends rows between the trainer's steps."""
        return self.requests, self.quarantined

    def cut_records(self, data: Mapping[str, Any]) -> None:
        """Truncate `service_records` to their sizes at a checkpoint, because a resumed run appends the rest again.

        `data` is the checkpoint's data; empty, for a run without a checkpoint, it removes all rows. Data without sizes
        removes none.
        """
        if data and "records" not in data:
            return
        sizes = data.get("records", {})
        for path in self.service_records:
            size = sizes.get(path.name, 0)
            if path.exists() and path.stat().st_size > size:
                os.truncate(path, size)

    @property
    def engine_events(self) -> Path:
        """Times at which engines were lost and replaced, including attempts at a step that a restart repeated."""
        return self.root / "engine_events.jsonl"

    @property
    def starts(self) -> Path:
        """Times at which a trainer started, with its version, commit and hardware."""
        return self.root / "starts.jsonl"

    @property
    def restarts(self) -> Path:
        """Times and reasons of the launcher's restarts of the run."""
        return self.root / "restarts.jsonl"

    @property
    def tensorboard(self) -> Path:
        return self.root / "tensorboard"

    @property
    def memory(self) -> Path:
        """Folder of GPU memory snapshots, one per rank."""
        return self.root / "memory"

    @property
    def profile(self) -> Path:
        """Folder of profiler traces, one per step and rank."""
        return self.root / "profile"

    @property
    def wandb_id(self) -> Path:
        """Id of the Weights & Biases run, which a resumed run continues."""
        return self.root / "wandb_id"

    @property
    def mlflow_id(self) -> Path:
        """Our id of the MLflow run, one of its tags, which a resumed run continues."""
        return self.root / "mlflow_id"

    @property
    def mlflow_database(self) -> Path:
        """Database of MLflow, if no other one and no server is configured."""
        return self.root / "mlflow.db"

    @property
    def checkpoints(self) -> Path:
        return self.root / "checkpoints"

    @property
    def newest_checkpoint(self) -> Path | None:
        """The complete checkpoint with the most updates, if any. One that is being written ends in `.partial`."""
        return max(self.checkpoints.glob(f"step-{'[0-9]' * 8}"), default=None)

    @property
    def saved_step(self) -> int:
        """Number of steps of the newest checkpoint; 0 without one."""
        newest = self.newest_checkpoint
        return 0 if newest is None else read_json_object(newest / "state.json")["step"]

    @property
    def export(self) -> Path:
        return self.root / "hf"

    @property
    def adapter(self) -> Path:
        """PEFT folder of the adapters at the end of a run with `model.lora`."""
        return self.root / "adapter"

    @property
    def reference(self) -> Path:
        """Folder of the reference model, if it is the policy after a warm start."""
        return self.root / "reference"

    @property
    def logs(self) -> Path:
        return self.root / "logs"

    @property
    def report(self) -> Path:
        return self.root / "report.html"

    @property
    def failure(self) -> Path:
        """The trainer's report of its first failure, which the launcher reads."""
        return self.logs / "failure.json"

    @property
    def failure_space(self) -> Path:
        """Reserved space for the report of a failure. The first rank that fails takes it."""
        return self.logs / "failure.reserved"

    @property
    def message_space(self) -> Path:
        """Reserved space, which the launcher frees before it prints its last messages: its log may be on this disk."""
        return self.logs / "messages.reserved"

    def clear_failure(self) -> None:
        """Remove the report of an earlier attempt and reserve the space for one."""
        for stale in (self.failure, self._partial_failure, self.phase):
            stale.unlink(missing_ok=True)
        reserve(self.failure_space, _FAILURE_BYTES)

    def record_failure(self, error: Exception) -> None:
        """Write the first failure of any rank; later ones are only its consequences."""
        full = storage_failure(error, self.root)
        if full is not None or isinstance(error, UserError | RunError):
            known = full or error
            kind = next(kind for kind, failures in FAILURES.items() if isinstance(known, failures))
            failure = {"kind": kind, "message": str(known)}
        else:
            message = f"a trainer rank failed with {type(error).__name__}: {error}; see its log in {self.logs}"
            failure = {"kind": "run", "message": message}
        with suppress(FileNotFoundError):
            self.failure_space.rename(self._partial_failure)  # only one rank succeeds
            with self._partial_failure.open("r+") as file:  # JSON may end in spaces
                json.dump(failure, file)
            self._partial_failure.rename(self.failure)

    @property
    def _partial_failure(self) -> Path:
        return self.logs / "failure.partial"

    @property
    def trainer_log(self) -> Path:
        return self.logs / "trainer.log"

    @property
    def phase(self) -> Path:
        """One line with what the trainer is doing."""
        return self.logs / "phase"

    @property
    def is_finished(self) -> bool:
        """Whether the trainer that was started last has done all steps and exported the model."""
        return self.phase.is_file() and self.phase.read_text() == FINISHED

    @property
    def stop_request(self) -> Path:
        """File whose existence makes the trainer save and stop after the current step."""
        return self.root / "stop"

    def create(self) -> None:
        """Create the directory and its folders. Raises UserError if it cannot be written to."""
        for folder in (self.root, self.checkpoints, self.logs):
            make_folder(folder, f"run_dir={self.root}")

    def remove_partial_folders(self) -> None:
        """Remove the checkpoints and exports that were not completed, or were being deleted."""
        exports = (self.export, self.adapter, self.reference)
        partial_exports = (partial for folder in exports for partial in folder.parent.glob(f"{folder.name}*.partial"))
        for partial in (*self.checkpoints.glob("*.partial"), *partial_exports):
            shutil.rmtree(partial, ignore_errors=True)

    @property
    def kept(self) -> str:
        """A clause for messages: from where the same command continues a run that has failed."""
        if self.is_rollout_only:
            return f"{len(list(self.rollouts.glob('step-*.parquet')))} batches of rollouts are kept"
        newest = self.newest_checkpoint
        if newest is None:
            return "no checkpoint is complete"
        return f"checkpoint {newest.name}, after step {self.saved_step}, is kept"

    @contextmanager
    def reserved_space(self) -> Iterator[None]:
        """Reserve space on the disk for this context, so that a full disk can be reported.

        Raises StorageFailed, with what is kept, if the disk takes no more writes.
        """
        try:
            reserve(self.message_space, _MESSAGE_BYTES)
            yield
        except (OSError, RunError) as error:
            full = storage_failure(error, self.root) or self._full_disk()
            if full is None:
                raise
            self.remove_partial_folders()
            raise StorageFailed(
                f"{full}. The run has ended; {self.kept}. Free space or raise the quota; the same command continues"
            ) from error
        finally:
            with suppress(OSError):
                for reserved in (self.message_space, self.failure_space):
                    reserved.unlink(missing_ok=True)

    def check_writable(self) -> None:
        """Raise OSError if the disk takes no more writes."""
        probe = self.logs / "probe.tmp"
        try:
            reserve(probe, _MESSAGE_BYTES)
        finally:
            probe.unlink(missing_ok=True)

    def _full_disk(self) -> StorageFailed | None:
        """Return the error for a disk that takes no more writes; other processes' errors do not always name it."""
        try:
            self.check_writable()
        except OSError as error:
            return storage_failure(error, self.root)
        return None

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Lock the directory for this process; the lock ends with the process.

        Raises UserError if another run has locked it.
        """
        descriptor = os.open(self.root / ".lock", os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(
                f"{self.root} is in use by another run; wait for it, stop it, or choose run_dir=<another folder>"
            ) from None
        except OSError as error:
            raise UserError(
                f"{self.root} cannot be locked: {error.strerror}. Mount its file system with locks (Lustre: the option "
                "flock), or choose run_dir=<another folder>"
            ) from None
        else:
            yield
        finally:
            os.close(descriptor)
