import os
import shutil
from collections.abc import Iterator

import pytest

from tests.cluster.two_hosts import NEEDED, TwoHosts, two_hosts


@pytest.fixture(scope="session")
def hosts() -> Iterator[TwoHosts]:
    """Two hosts for all tests; they are skipped without root, which may create network namespaces."""
    if os.geteuid() != 0:
        pytest.skip("two hosts on one machine need root: run tests/cluster as root, e.g. in a privileged container")
    missing = [command for command in NEEDED if shutil.which(command) is None]
    assert not missing, f"{', '.join(missing)} not found: run tools/install_cluster_packages.sh"
    with two_hosts() as created:
        yield created
