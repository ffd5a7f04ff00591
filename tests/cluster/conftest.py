import os
import shutil
from collections.abc import Iterator

import pytest

from tests.cluster.two_hosts import NEEDED, TwoHosts, two_hosts

ROW = "row of the fault table"
"""Property of a test's report."""


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print the fault table of the tests that measured a row of it."""
    reports = [each for key in ("passed", "failed") for each in terminalreporter.getreports(key) if each.when == "call"]
    rows = [value for report in reports for name, value in report.user_properties if name == ROW]
    if not rows:
        return
    terminalreporter.section("fault table")
    terminalreporter.line("| started with | fault | ends after s | exit code | left | the same command continues |")
    terminalreporter.line("| --- | --- | --- | --- | --- | --- |")
    for row in rows:
        cells = (row["way"], row["fault"], f"{row['s']:.0f}", row["code"], row["left"], row["continues"])
        terminalreporter.line(f"| {' | '.join(cells)} |")


@pytest.fixture(scope="session")
def hosts() -> Iterator[TwoHosts]:
    """Two hosts for all tests; they are skipped without root, which may create network namespaces."""
    if os.geteuid() != 0:
        pytest.skip("two hosts on one machine need root: run tests/cluster as root, e.g. in a privileged container")
    missing = [command for command in NEEDED if shutil.which(command) is None]
    assert not missing, f"{', '.join(missing)} not found: run tools/install_cluster_packages.sh"
    with two_hosts() as created:
        yield created
