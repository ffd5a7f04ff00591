"""Which of pytest-xdist's workers runs what."""

from pathlib import PurePath

from xdist.scheduler import LoadScopeScheduling


class OneWorkerPerFile(LoadScopeScheduling):
    """Each file has one worker, and all that needs the two hosts has the same one, because they have fixed names."""

    def _split_scope(self, nodeid: str) -> str:
        file = PurePath(nodeid.partition("::")[0])
        return "hosts" if file.parent.name == "cluster" else str(file)
