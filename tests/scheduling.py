"""Which of pytest-xdist's workers runs what."""

from pathlib import PurePath

from xdist.scheduler import LoadScopeScheduling

BESIDE_RUNS = (
    *("test_engine.py", "test_rollouts.py", "test_weight_sync.py", "test_weight_transports.py"),
    "test_eval.py",  # its waits are five times as long as they take
)


class OneRunAtATime(LoadScopeScheduling):
    """Each file has one worker, and all that starts whole runs has the same one: deadlines are theirs."""

    def _split_scope(self, nodeid: str) -> str:
        file = PurePath(nodeid.partition("::")[0])
        starts_runs = file.parent.name in ("e2e", "cluster") and file.name not in BESIDE_RUNS
        return "runs" if starts_runs else str(file)
