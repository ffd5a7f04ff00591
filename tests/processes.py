"""What tests ask of processes that may end at any moment."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil


def command_line(process: psutil.Process) -> list[str]:
    """Return the arguments of a process, none once it has ended."""
    with suppress(psutil.NoSuchProcess):
        return process.cmdline()
    return []


def title(process: psutil.Process) -> str:
    """Return the title of a process, "" once it has ended."""
    with suppress(psutil.NoSuchProcess):
        return process.name()
    return ""


def status(process: psutil.Process) -> str:
    """Return psutil's status of a process, STATUS_DEAD once its entry is gone."""
    with suppress(psutil.NoSuchProcess):
        return process.status() if process.is_running() else psutil.STATUS_DEAD
    return psutil.STATUS_DEAD


def is_alive(process: psutil.Process) -> bool:
    """Return whether a process runs; a zombie has ended, its parent has not read its exit code yet."""
    return status(process) not in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)


def is_running(process_id: int) -> bool:
    """Return whether a process with this id runs."""
    with suppress(psutil.NoSuchProcess):
        return is_alive(psutil.Process(process_id))
    return False


@contextmanager
def suspended(processes: Sequence[psutil.Process]) -> Iterator[None]:
    """Stop the processes while the test looks at them, so that a busy machine cannot let them finish meanwhile."""
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.suspend()
    try:
        yield
    finally:
        for process in processes:
            with suppress(psutil.NoSuchProcess):
                process.resume()


def named_shared_memory(process: psutil.Process) -> list[str]:
    """Return the files of vLLM's message queues that a process uses, which would outlive a killed one."""
    with suppress(OSError):  # the process has ended
        lines = Path(f"/proc/{process.pid}/maps").read_text().splitlines()
        return [line for line in lines if "/dev/shm/psm_" in line and not line.endswith("(deleted)")]
    return []


def sockets(process: psutil.Process, kind: str) -> list:
    """Return the sockets of a process, none once it has ended; `kind` as for psutil, e.g. "tcp" or "unix"."""
    with suppress(psutil.NoSuchProcess):
        return process.net_connections(kind)
    return []
