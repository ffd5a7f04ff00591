"""Which of pytest-xdist's workers runs what."""

from xdist.scheduler import LoadScopeScheduling


class OneRunAtATime(LoadScopeScheduling):
    """Each file has one worker, and all whole runs and engines have the same one: deadlines are theirs."""

    def _split_scope(self, nodeid: str) -> str:
        file = nodeid.partition("::")[0]
        return "runs" if file.startswith(("tests/e2e/", "tests/cluster/")) else file
