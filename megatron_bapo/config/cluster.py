"""The configuration of a Slurm cluster for `submit --cluster NAME`, such as the files in configs/clusters/."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, PositiveInt, ValidationInfo, field_validator

from megatron_bapo.config.loading import load_section
from megatron_bapo.config.section import NonNegativeInt, Section
from megatron_bapo.errors import UserError

SUFFIX = ".yaml"
GpuName = Literal["A100", "H100", "H200", "B200", "H20", "L40S"]
"""Types of GPUs that `plan` knows, whose figures are in planning/hardware.py."""


class ContainerConfig(Section):
    """Container in which the steps of a job run."""

    runtime: Literal["pyxis", "apptainer"] = "pyxis"
    """Container runtime: Slurm's Pyxis plugin, or Apptainer on the nodes."""
    image: str
    """Container image: for pyxis [REGISTRY#]IMAGE[:TAG] or the path of a .sqsh file, for apptainer the path of a .sif
    file."""
    mounts: tuple[str, ...] = ()
    """Mounts, each as SOURCE:TARGET[:FLAGS]. The folder that a job is submitted from and the run directory are
    always mounted."""


class NodesConfig(Section):
    """Nodes of one kind."""

    partition: str | None = None
    """Slurm partition; null: Slurm's default."""
    gpus_per_node: NonNegativeInt = 8
    """Number of GPUs per node; 0: the job runs on CPUs."""
    gpu: GpuName | None = "H100"
    """GPU of the nodes, by its name in `plan`. Runs that do not fit on it are refused; null: the check is skipped."""
    cpus_per_node: PositiveInt | None = None
    """Number of CPU cores per node; null: Slurm's default."""
    memory: str | None = None
    """Memory per node in Slurm's notation, such as 900G, or "0" for all of it; null: the partition's default."""

    @property
    def memory_gib(self) -> float | None:
        """`memory` as Slurm reads it; None if it is all of a node's, the partition's default or not a size.

        Source: the option --mem in slurm.schedmd.com/sbatch.html.
        """
        found = re.fullmatch(r"(\d+)([KMGT]?)", self.memory or "", re.IGNORECASE)
        if found is None or int(found[1]) == 0:
            return None
        return int(found[1]) * 1024.0 ** ("KMGT".index(found[2].upper() or "M") - 2)


class ClusterConfig(NodesConfig):
    """The nodes of the trainer, and of the engines too unless `rollout_nodes` is given."""

    account: str | None = None
    """Slurm account; null: Slurm's default."""
    qos: str | None = None
    """Slurm quality of service; null: Slurm's default."""
    time_limit: str = "1-00:00:00"
    """Time limit of the job in Slurm's notation, in quotes."""
    signal_s: Annotated[int, Field(ge=10, validate_default=True)] = 600
    """Seconds before the time limit or a preemption at which the run saves its state and the job queues again. Less
    than the time limit."""
    num_nodes: PositiveInt | None = None
    """Number of nodes; null: as few as have the GPUs that the run needs."""
    rollout_nodes: NodesConfig | None = None
    """Separate nodes for the engines, which make the job heterogeneous; null: engines share the trainer's nodes."""
    interface: str | None = None
    """Network interface between the nodes, such as ib0; null: that of the nodes' Slurm addresses."""
    python: str | None = None
    """Python interpreter on the nodes or in the container; null: the one that runs `submit`."""
    container: ContainerConfig | None = None
    """Container for the steps of the job; null: none."""
    env: Mapping[str, str] = Field(default_factory=dict)
    """Environment variables of the job. Secrets do not belong here, but in files."""
    sbatch_options: tuple[str, ...] = ()
    """Additional options of sbatch, such as --exclusive."""

    @field_validator("time_limit", mode="before")
    @classmethod
    def _is_quoted(cls, value: Any) -> Any:
        if isinstance(value, int):
            raise ValueError("must be text; put it in quotes, because YAML reads 12:00:00 as a base-60 number")
        return value

    @field_validator("signal_s")
    @classmethod
    def _leaves_time(cls, value: int, found: ValidationInfo) -> int:
        limit = found.data.get("time_limit", "")
        limit_s = _seconds(limit)
        if limit_s is not None and value >= limit_s:
            raise ValueError(
                f"must be less than the {limit_s} s of time_limit={limit}, else Slurm sends the signal when the job "
                "starts, and it is requeued without a step"
            )
        return value


def _seconds(time_limit: str) -> int | None:
    """Return a time limit as Slurm reads it, in seconds; None if there is no limit or Slurm will refuse it.

    Source: the option --time in slurm.schedmd.com/sbatch.html.
    """
    found = re.fullmatch(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?", time_limit)
    if found is None:
        return None
    days, *parts = (0 if part is None else int(part) for part in found.groups())
    if found[1] is not None or found[4] is not None:  # days-hours[:minutes[:seconds]], hours:minutes:seconds
        hours, minutes, seconds = parts
    else:  # minutes[:seconds]
        hours, (minutes, seconds) = 0, parts[:2]
    return ((days * 24 + hours) * 60 + minutes) * 60 + seconds or None


def load_cluster(name: str, folder: Path) -> ClusterConfig:
    """Load the cluster `name` of `folder`, or the file `name` if it ends in .yaml.

    Raises UserError with the known names if there is no such file.
    """
    path = Path(name) if name.endswith(SUFFIX) else folder / f"{name}{SUFFIX}"
    if not path.is_file():
        known = ", ".join(sorted(file.stem for file in folder.glob(f"*{SUFFIX}"))) or "none"
        raise UserError(
            f"--cluster {name}: {path} does not exist; known clusters: {known}. Choose one of them, or give the path "
            f"of a {SUFFIX} file"
        )
    return load_section(ClusterConfig, path)
