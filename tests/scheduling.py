"""Which of pytest-xdist's workers runs what."""

from pathlib import PurePath

from xdist.scheduler import LoadScopeScheduling

WITHOUT_DEADLINES = ("test_engine.py", "test_rollouts.py", "test_weight_sync.py", "test_weight_transports.py")


class OneRunAtATime(LoadScopeScheduling):
    """Each file has one worker, and all that starts whole runs has the same one: deadlines are theirs."""

    def _split_scope(self, nodeid: str) -> str:
        file = PurePath(nodeid.partition("::")[0])
        starts_runs = file.parent.name in ("e2e", "cluster") and file.name not in WITHOUT_DEADLINES
        return "runs" if starts_runs else str(file)
