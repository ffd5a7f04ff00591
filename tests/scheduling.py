"""Which of pytest-xdist's workers runs what."""

from pathlib import PurePath

from xdist.scheduler import LoadScopeScheduling


class OneClusterAtATime(LoadScopeScheduling):
    """Each file has one worker, and all files that start Slurm have the same one: its daemons share their ports."""

    def _split_scope(self, nodeid: str) -> str:
        file = PurePath(nodeid.partition("::")[0])
        return "clusters" if file.parent.name == "cluster" else str(file)
