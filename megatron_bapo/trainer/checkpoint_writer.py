"""Saves a run's checkpoints: in a thread while training continues, or while training waits.

    main thread     copy ─► update ─► update ─► ... ─► copy, when the thread is done ─► update ─► ...
    writer thread    └────► gather and write tensors ─► flush ─► rename    └────► gather and write tensors ─► ...

The copy is in host memory, which is allocated once. The threads of all ranks gather the tensors through a gloo group of
their own, so that they do not meet training's collectives, and write what `save_checkpoint` writes.

torch's and Megatron-Core's asynchronous savers are not used: they write a format of their own, with pickles, and not
Hugging Face's tensors, and Megatron-Core's needs CUDA.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist

from megatron_bapo.errors import RunError
from megatron_bapo.files import storage_failure
from megatron_bapo.metrics.values import Last, Metric
from megatron_bapo.parallel.collectives import gather_objects
from megatron_bapo.parallel.groups import Axis, through
from megatron_bapo.parallel.main_calls import NUM_SIGNS
from megatron_bapo.parallel.platform import host_process_group, now_s
from megatron_bapo.trainer.checkpoint import Draft, RolloutFiles, begin, commit, save_checkpoint, write_tensors
from megatron_bapo.trainer.snapshot import Snapshot
from megatron_bapo.trainer.worker import Worker

NICENESS = 10
"""Added to the niceness of the writer thread, so that training has the processors first."""


class CheckpointWriter:
    """Writes one checkpoint at a time. All ranks must make the same calls."""

    def __init__(self, worker: Worker, folder: Path, rollouts: RolloutFiles | None = None) -> None:
        """With `checkpoint.async_save`, allocate host memory for a copy of this rank's state.

        `folder` is that of the checkpoints; `rollouts` are used on rank 0 only.
        """
        config = worker.config
        self._worker, self._folder, self._keep, self._rollouts = worker, folder, config.checkpoint.keep, rollouts
        self._snapshot = None
        if config.checkpoint.async_save:
            group = host_process_group(config.trainer.collective_timeout_s)
            self._groups = through(group, worker.groups)
            self._all_ranks = Axis(group, dist.get_rank(), dist.get_world_size())
            self._snapshot = Snapshot(worker.optimizer, self._groups)
        self._thread: threading.Thread | None = None
        self._failure: RunError | None = None
        self._metrics: dict[str, Metric] = {}
        self._write_s: float | None = None

    def save(self, num_updates: int, state: dict[str, Any]) -> None:
        """Save what `save_checkpoint` saves, as it is now. A write that is under way is waited for.

        Without `async_save`, or after `finish`, the checkpoint is complete. Raises RunError if that write has failed.
        """
        start_s = now_s()
        self.finish()
        wait_s = now_s() - start_s
        if self._snapshot is None:
            save_checkpoint(self._worker, self._folder, num_updates, state, self._keep, self._rollouts)
            self._write_s = now_s() - start_s
        elif (draft := begin(self._worker, self._folder, num_updates, state, self._rollouts)) is not None:
            self._snapshot.take(draft.states)
            self._thread = threading.Thread(target=self._write, args=(draft,), name="checkpoint writer", daemon=True)
            self._thread.start()
        self._metrics |= {"checkpoint/blocked_s": Last(now_s() - start_s), "checkpoint/wait_s": Last(wait_s)}

    @property
    def is_writing(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def check(self) -> None:
        """Raise RunError if a write has failed; do not wait for one that is under way."""
        if not self.is_writing:
            self.finish()

    def finish(self) -> None:
        """Return when no write is under way. Raises RunError if the last one has failed."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._failure is not None:
            raise self._failure

    def close(self) -> None:
        """Let a write that is under way finish, for a run that has failed for another reason."""
        with suppress(RunError):
            self.finish()

    def metrics(self) -> dict[str, Metric]:
        """Return the seconds of saves and of finished writes since the last call."""
        self.check()
        if self._thread is None and self._write_s is not None:
            self._metrics["checkpoint/write_s"] = Last(self._write_s)
            self._write_s = None
        metrics, self._metrics = self._metrics, {}
        return metrics

    def _write(self, draft: Draft) -> None:
        """Write and commit the copy; any rank's failure becomes that of all ranks."""
        start_s = time.perf_counter()
        try:
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), os.nice(0) + NICENESS)
            assert self._snapshot is not None, "the copy was taken before the thread was started"
            model, read = self._worker.model, self._snapshot.read
            self._failure = self._on_any(self._attempt(partial(write_tensors, draft, model, self._groups, read)))
            if self._failure is None:
                self._failure = self._commit(draft)
        except Exception as error:  # of the ranks' communication, for example because one of them has died
            self._failure = self._failure_of(error)
        self._write_s = time.perf_counter() - start_s

    def _commit(self, draft: Draft) -> RunError | None:
        """Commit on rank 0, and return its failure on all ranks.

        It may take any time, so all ranks meet several times in the timeout of a collective until it is done.
        """
        is_main, committed = self._worker.groups.is_main, Future[RunError | None]()
        if is_main:
            commits = partial(self._attempt, partial(commit, draft, self._keep))
            threading.Thread(target=lambda: committed.set_result(commits()), name="commit", daemon=True).start()
        own, interval_s = [committed] if is_main else [], self._worker.config.trainer.collective_timeout_s / NUM_SIGNS
        try:
            while not any(gather_objects(committed.done(), self._all_ranks)):
                wait(own, interval_s)
        finally:
            wait(own)  # even if another rank has died meanwhile
        return self._on_any(committed.result() if is_main else None)

    def _attempt(self, part: Callable[[], None]) -> RunError | None:
        try:
            part()
        except Exception as error:  # the other ranks are told
            return self._failure_of(error)
        return None

    def _failure_of(self, error: Exception) -> RunError:
        """Return the error as one with a message that holds on every host."""
        failure = storage_failure(error, self._folder.parent) or error
        if not isinstance(failure, RunError):
            failure = RunError(f"a checkpoint could not be written: {type(error).__name__}: {error}")
        if failure is not error:
            failure.__cause__ = error
        return failure

    def _on_any(self, own: RunError | None) -> RunError | None:
        """Return the failure of the first rank that has one."""
        failures = gather_objects(own, self._all_ranks)
        return own or next((failure for failure in failures if failure is not None), None)
