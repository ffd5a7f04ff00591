"""What launch/torchrun_node.sh on every other node and the run tell each other about its end.

The run tells the nodes its exit code, so that they end at once. From the head's silence a node would learn only after
`BAPO_HEAD_TIMEOUT_S` that there is nothing left to do, and not whether the run succeeded. A node that gets a signal
asks the run to save its state and end.
"""

from __future__ import annotations

import os
import time
from contextlib import suppress
from pathlib import Path

from megatron_bapo.cluster.ray_cluster import create_actor, get_result, nodes, own_node_id
from megatron_bapo.errors import RunError

FILE = "BAPO_RUN_END"
"""Environment variable of launch/torchrun_node.sh: the file on its node for the run's exit code. Ray on this node
passes it to the actors there."""
_LIMIT_S = 15.0


class StopRequest:
    """The wish of this node's script that the run ends; from now on the script waits for the end after a signal."""

    def __init__(self) -> None:
        self._file = None
        if FILE in os.environ:
            folder = Path(os.environ[FILE]).parent
            (folder / "watched").touch()
            self._file = folder / "stop"

    @property
    def is_made(self) -> bool:
        """Whether the script has got a signal."""
        return self._file is not None and self._file.exists()


class RunEnd:
    """Actor on one node."""

    def write(self, exit_code: int) -> None:
        """Write the run's exit code to the node's file if its script waits for one."""
        if FILE in os.environ:
            file = Path(os.environ[FILE])
            partial = file.with_suffix(".partial")
            partial.write_text(f"{exit_code}\n")
            partial.rename(file)


def tell_nodes(exit_code: int) -> None:
    """Tell all other nodes how the run has ended; nodes that cannot be reached within `_LIMIT_S` are left out.

    Does nothing on clusters that do not end with a run, such as those of launch/ray_node.sh.
    """
    if FILE not in os.environ:
        return
    others = [node for node in nodes() if node["NodeID"] != own_node_id()]
    # An actor lives as long as its handle.
    actors = {
        (name := f"end of the run on node {node['NodeManagerAddress']}"): create_actor(
            RunEnd, name=name, node_id=node["NodeID"]
        )
        for node in others
    }
    calls = {name: actor.write.remote(exit_code) for name, actor in actors.items()}
    deadline = time.monotonic() + _LIMIT_S
    for name, call in calls.items():
        with suppress(RunError):
            get_result(call, name, max(0.0, deadline - time.monotonic()))
