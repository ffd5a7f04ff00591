"""`ray start` without the servers that a run does not use, repeated if they are too slow; launch/ray_node.sh calls it.

The dashboard's agent and the server for Ray clients are not used. Ray 2.60 has no options against these two, but leaves
them out where their packages are not installed, so the packages are hidden here. Remove this once there are options.
"""

from __future__ import annotations

import sys

from megatron_bapo import ray_variables  # noqa: F401


def main() -> None:
    """Run `ray` with this process's arguments. With `--include-dashboard=true` the dashboard's agent is started."""
    if "--include-dashboard=true" not in sys.argv:
        sys.modules["ray.dashboard.optional_deps"] = None  # pyright: ignore[reportArgumentType]
    from ray.scripts import scripts

    from megatron_bapo.cluster.ray_cluster import start_repeatedly
    from megatron_bapo.errors import RunError

    scripts.get_ray_client_dependency_error = lambda: ImportError("not used by runs")  # pyright: ignore[reportPrivateImportUsage]
    try:
        start_repeatedly(scripts.main)
    except RunError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
