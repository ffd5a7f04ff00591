"""Prints the layout matrix when its tests have run."""

from __future__ import annotations

import pytest


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print a line for each (name, differences) that a test recorded as its property `matrix`, before the failures."""
    passed = terminalreporter.getreports("passed")
    rows = [value for report in passed for key, value in report.user_properties if key == "matrix"]
    if not rows or terminalreporter.getreports("failed"):
        return
    terminalreporter.section("layouts against one process, largest differences")
    columns = list(rows[0][1])
    width = max(len(name) for name, _ in rows)
    terminalreporter.write_line(" " * width + "".join(f"{column:>12}" for column in columns))
    for name, found in rows:
        terminalreporter.write_line(f"{name:<{width}}" + "".join(f"{found[column]:>12.1e}" for column in columns))
