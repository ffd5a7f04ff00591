"""Output of `make gpu-check`: one table, and results/gpu/<file>.json with versions for each test file."""

import os
from collections.abc import Callable
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING

import pytest
import torch.distributed as dist
from rich import box
from rich.console import Console
from rich.table import Column, Table

from bench.results import save, versions
from megatron_bapo.parallel.platform import has_gpu

if TYPE_CHECKING:
    from megatron_bapo.parallel.groups import ParallelGroups

NO_GPU_IS_FINE = "NO_GPU_IS_FINE"
LIMIT_S = 480
"""Time limit of all checks together on one H200."""

ORDER = (
    "platform",
    "kernels",
    "colocated_run",
    "weights",
    "fp8",
    "transformer_engine",
    "host_chain",
    "slice_stream",
    "weight_sync",
    "engine_nodes",
    "train_step",
)
"""Test files in the order in which they run: what tells most about a new machine first, measurements last."""

_checks: dict[str, dict[str, dict[str, object]]] = {}
"""File -> check -> outcome, seconds and figures."""
_start = monotonic()


def pytest_configure(config: pytest.Config) -> None:
    # A missing package fails only its own file, and warnings of packages that only GPUs load fail nothing.
    config.option.continue_on_collection_errors = True
    config.addinivalue_line("filterwarnings", "default")
    if not has_gpu():
        fine = os.environ.get(NO_GPU_IS_FINE) == "1"
        pytest.exit(
            f"no GPU found: none of the GPU checks ran{'' if fine else f'; {NO_GPU_IS_FINE}=1 accepts that'}",
            returncode=0 if fine else 1,
        )


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: ORDER.index(_file(item.nodeid)))


@pytest.fixture
def figures(request: pytest.FixtureRequest) -> Callable[..., None]:
    """Add figures of a check to the table."""
    return lambda **values: _check(request.node.nodeid).update(values)


@pytest.fixture(scope="session")
def groups() -> "ParallelGroups":
    """Return the mesh of one rank."""
    from tests.gpu.policies import one_rank

    return one_rank()


def pytest_sessionfinish() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.when == "call" or report.outcome != "passed":
        reason = f": {report.longrepr[2]}" if report.skipped and isinstance(report.longrepr, tuple) else ""
        _check(report.nodeid).update(outcome=report.outcome + reason, seconds=round(report.duration, 2))
        _save(report.nodeid)  # immediately, because the machine may be reclaimed or a time limit reached before the end


def pytest_collectreport(report: pytest.CollectReport) -> None:
    """Add a row for a file that cannot be imported."""
    if report.failed:
        _check(f"{report.nodeid}::all checks").update(outcome=f"not run: {report.longreprtext.splitlines()[-1]}")
        _save(report.nodeid)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    seconds = monotonic() - _start
    table = Table(
        *(Column(name, overflow="fold") for name in ("file", "check", "outcome", "figures")),
        box=box.SIMPLE_HEAD,
        title=f"GPU checks on {versions()['gpu']}: {seconds:.0f} s of {LIMIT_S}",
        title_justify="left",
    )
    for file, checks in _checks.items():
        for name, found in checks.items():
            numbers = {key: value for key, value in found.items() if key != "outcome"}
            shown = "  ".join(f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}" for k, v in numbers.items())
            table.add_row(file, name, str(found.get("outcome", "not run")), shown)
    console = Console(width=160)
    with console.capture() as captured:
        console.print(table)
    terminalreporter.write(captured.get())


def _check(nodeid: str) -> dict[str, object]:
    return _checks.setdefault(_file(nodeid), {}).setdefault(nodeid.partition("::")[2], {})


def _file(nodeid: str) -> str:
    return Path(nodeid.partition("::")[0]).stem.removeprefix("test_")


def _save(nodeid: str) -> None:
    save(_file(nodeid), {"checks": _checks[_file(nodeid)]})
