"""What `make gpu-check` prints and leaves: one table, and results/gpu/weight_sync.json with the versions."""

import json
import os
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

import pytest
import torch

from megatron_bapo.parallel.platform import has_gpu

RESULTS = Path(__file__).parents[2] / "results" / "gpu" / "weight_sync.json"
NO_GPU_IS_FINE = "NO_GPU_IS_FINE"
_figures: dict[str, dict[str, float]] = {}
_outcomes: dict[str, str] = {}


def pytest_configure() -> None:
    if not has_gpu():
        fine = os.environ.get(NO_GPU_IS_FINE) == "1"
        pytest.exit(
            f"no GPU found: none of the GPU checks ran{'' if fine else f'; {NO_GPU_IS_FINE}=1 accepts that'}",
            returncode=0 if fine else 1,
        )


@pytest.fixture
def figures(request: pytest.FixtureRequest) -> Callable[..., None]:
    """Puts numbers of a check into the table."""
    return lambda **values: _figures.setdefault(request.node.name, {}).update(values)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    name = report.nodeid.split("::")[-1]
    if report.when == "call" or report.outcome != "passed":
        reason = f": {report.longrepr[2]}" if report.skipped and isinstance(report.longrepr, tuple) else ""
        _outcomes[name] = report.outcome + reason


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    terminalreporter.section("GPU checks")
    for name, outcome in _outcomes.items():
        numbers = "  ".join(f"{key} {value:.4g}" for key, value in _figures.get(name, {}).items())
        terminalreporter.write_line(f"{name}  {outcome}  {numbers}")
    content = {
        "gpu": torch.cuda.get_device_name(),
        "versions": {name: version(name) for name in ("torch", "vllm", "megatron-core")},
        "checks": {name: {"outcome": outcome, **_figures.get(name, {})} for name, outcome in _outcomes.items()},
    }
    RESULTS.parent.mkdir(parents=True, exist_ok=True)
    RESULTS.write_text(json.dumps(content, indent=2) + "\n")
