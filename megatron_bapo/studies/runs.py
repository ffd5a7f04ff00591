"""Execute the runs of a study, each in its own process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from megatron_bapo.cluster.interrupts import Interrupts, end_with_parent
from megatron_bapo.config.loading import dump_config
from megatron_bapo.files import replace_text
from megatron_bapo.logs import last_lines
from megatron_bapo.studies.plan import StudyRun, unfinished

POLL_S = 0.5
END_TIMEOUT_S = 30.0


def run_all(runs: Sequence[StudyRun], jobs: int, console: Console, limit: int | None = None) -> list[StudyRun]:
    """Execute unfinished runs, `jobs` at a time and at most `limit`; return those that failed or could not start.

    Raises KeyboardInterrupt after Ctrl-C, once the runs have stopped.
    """
    chosen = unfinished(runs)[:limit]
    waiting, failed = list(chosen), list[StudyRun]()
    running: dict[StudyRun, subprocess.Popen[bytes]] = {}
    already = sum(run.num_updates_done() for run in chosen)
    with Interrupts() as interrupts, _progress(console) as progress:
        task, stop_sent = progress.add_task("", total=sum(run.num_updates for run in chosen) - already), False
        try:
            while True:
                if not interrupts.requested:
                    _start_ready(waiting, running, failed, jobs)
                if not running:
                    break
                time.sleep(POLL_S)
                for run in [run for run, process in running.items() if process.poll() is not None]:
                    if not _record_exit(run, running.pop(run).returncode, console, stopping=interrupts.requested):
                        failed.append(run)
                done = sum(run.num_updates_done() for run in chosen) - already
                names = ", ".join(run.name for run in running)
                progress.update(
                    task, completed=done, description=f"stopping {names}" if interrupts.requested else names
                )
                if interrupts.requested and not stop_sent:
                    stop_sent = True  # a second signal would end the runs immediately
                    for process in running.values():
                        process.terminate()
        finally:
            _end(running)
        if interrupts.requested:
            raise KeyboardInterrupt
    return [*failed, *waiting]


def _start_ready(
    waiting: list[StudyRun], running: dict[StudyRun, subprocess.Popen[bytes]], failed: Sequence[StudyRun], jobs: int
) -> None:
    open_runs = {run.name for run in (*waiting, *running, *failed)}
    ready = [
        run
        for run in waiting
        if run.needs not in open_runs and (run.bounds_of is None or run.bounds_of.name not in open_runs)
    ]
    for run in ready[: jobs - len(running)]:
        waiting.remove(run)
        running[run] = _launch(run)


def _launch(run: StudyRun) -> subprocess.Popen[bytes]:
    run.directory.create()
    config_file = run.config.run_dir / "study.yaml"
    replace_text(config_file, dump_config(run.final_config()))
    with run.log.open("ab") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "megatron_bapo", "train", str(config_file)],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env={"OMP_NUM_THREADS": "1", **os.environ},
            # Only the study receives Ctrl-C and forwards it once.
            start_new_session=True,
            preexec_fn=partial(end_with_parent, signal.SIGTERM),  # SIGTERM stops a run cleanly
        )


def _record_exit(run: StudyRun, code: int, console: Console, *, stopping: bool) -> bool:
    """Mark a finished run or print why it failed; return False if it failed."""
    if code == 0:
        run.marker.touch()
        console.print(f"{run.name} is finished")
    elif not stopping:
        console.print(f"{run.name} failed with exit code {code}; {run.log} ends:\n{last_lines(run.log, 6)}")
    return code == 0 or stopping


def _end(running: Mapping[StudyRun, subprocess.Popen[bytes]]) -> None:
    """End the runs immediately; each launcher ends its own processes."""
    for process in running.values():
        process.terminate()
    for process in running.values():
        with suppress(subprocess.TimeoutExpired):
            process.wait(END_TIMEOUT_S)
        process.kill()


def _progress(console: Console) -> Progress:
    return Progress(
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("updates"),
        TimeElapsedColumn(),
        TextColumn("left"),
        # Runs spend much of their time starting up, so a short window would fluctuate.
        TimeRemainingColumn(),
        TextColumn("{task.description}", markup=False),
        console=console,
        speed_estimate_period=1800,
    )
