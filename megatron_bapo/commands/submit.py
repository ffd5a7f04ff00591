"""Run a configuration as a Slurm job: number of nodes, sbatch command line, and status and logs of the job."""

from __future__ import annotations

import glob
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import distributions
from pathlib import Path

from megatron_bapo.config.checks import check_planned
from megatron_bapo.config.cluster import ClusterConfig, ContainerConfig, NodesConfig
from megatron_bapo.config.schema import Config
from megatron_bapo.errors import RunError, UserError
from megatron_bapo.files import make_folder
from megatron_bapo.planning.advice import advice, plan_warnings
from megatron_bapo.planning.hardware import Assumptions
from megatron_bapo.planning.known_models import architecture_of, teacher_of
from megatron_bapo.planning.placement import Node, Role, alike_nodes, fewest_nodes, place_run
from megatron_bapo.planning.plan import Plan
from megatron_bapo.planning.settings import changes

LAUNCH = Path(__file__).parents[2] / "launch"
MAX_NODES = 2048
_COMMAND_TIMEOUT_S = 60.0
_LOGS = "slurm"
"""Folder of Slurm's logs in a run directory."""
_RUN_DIR_DEPTH = 3
"""Levels of folders below the current one that are searched for a log."""
_UNKNOWN_JOB = "Invalid job id specified"
_UNREACHABLE = ("Unable to contact slurm controller", "Could not establish a configuration source")
_RUNNING = ("CONFIGURING", "RUNNING", "SUSPENDED", "COMPLETING")
_CLIENT_VARIABLES = ("SLURM_CONF", "SLURM_CONF_SERVER", "SLURM_CLUSTERS", "SLURM_JWT", "SLURM_TIME_FORMAT")
"""Variables that Slurm's commands read anywhere; the other SLURM_* variables in a job describe that job."""
_FIELDS = {
    "JobState": "state",
    "Reason": "reason",
    "NodeList": "nodes",
    "RunTime": "running for",
    "TimeLimit": "time limit",
    "Restarts": "restarts",
    "ExitCode": "exit code",
    "StdOut": "log",
}


@dataclass(frozen=True)
class Submission:
    """A job for Slurm."""

    command: tuple[str, ...]
    environment: dict[str, str]
    """Variables added to the submitter's environment."""
    folder: Path
    """Folder of the job's logs."""

    def shown(self) -> str:
        """Return the environment and command as shell input."""
        settings = [f"{name}={shlex.quote(value)}" for name, value in self.environment.items()]
        return " \\\n    ".join([*settings, shlex.join(self.command)])


def check_fits(config: Config, cluster: ClusterConfig) -> list[str]:
    """Return warnings about the run. Raises UserError if it breaks a rule or does not fit the cluster's GPUs."""
    architecture, where = architecture_of(config.model)
    warnings = check_planned(config, architecture, where, teacher_of(config))
    engine_nodes = cluster.rollout_nodes or cluster
    engine_gpu = engine_nodes.gpu
    if cluster.gpu is None or engine_gpu is None or 0 in (cluster.gpus_per_node, engine_nodes.gpus_per_node):
        return warnings
    assumptions = Assumptions(
        gpus_per_node=cluster.gpus_per_node,
        host_memory_gib=cluster.memory_gib or Assumptions.host_memory_gib,
        engine_gpus_per_node=cluster.rollout_nodes and cluster.rollout_nodes.gpus_per_node,
        engine_host_memory_gib=engine_nodes.memory_gib or Assumptions.host_memory_gib,
    )
    plan = Plan(config, architecture, cluster.gpu, assumptions, engine_gpu)
    if not plan.fits:
        fitting = advice(plan)
        would_fit = [
            f"and no layout of the search does; `megatron-bapo plan CONFIG --gpu {cluster.gpu} --host-gib "
            f"{assumptions.host_memory_gib:g} --search --num-gpus N` tries other numbers of GPUs"
        ]
        if fitting is not None:
            would_fit = [f"this would fit: {' '.join(changes(config, fitting.config))}"]
        names = ("memory", "memory" if cluster.rollout_nodes is None else "rollout_nodes.memory")
        for host, name, nodes in zip(plan.hosts, names, (cluster, engine_nodes), strict=False):
            if host.is_exceeded and nodes.memory_gib is not None:
                would_fit.append(
                    f"{name}={nodes.memory} in the cluster's file is what the job gets of {host.node}; raise it"
                )
        raise UserError("\n  ".join([f"it does not fit on {plan.gpus}:", *plan.problems, *would_fit]))
    warnings += plan_warnings(plan)
    if cluster.python is None and cluster.container is None and not any(distributions(name="vllm")):
        warnings.append(
            f"{sys.executable}, which the nodes will use, has no CUDA packages: run `make setup` on a node with GPUs"
        )
    if cluster.signal_s < plan.time.total:
        warnings.append(
            f"signal_s={cluster.signal_s} in the cluster's file is less than a planned step of "
            f"{plan.time.total:.0f} s: at the time limit an unfinished step is lost, and the job continues from the "
            f"checkpoint before it (checkpoint.every_s={config.checkpoint.every_s}). Raise signal_s to avoid this"
        )
    return warnings


def num_nodes(config: Config, cluster: ClusterConfig) -> tuple[int, ...]:
    """Return the nodes of each job component: the trainer's, and those for engines only if the cluster has them."""
    if cluster.rollout_nodes is None:
        return (_num_trainer_nodes(config, cluster, "any", []),)
    engines = alike_nodes(MAX_NODES, cluster.rollout_nodes.gpus_per_node, "rollout")
    trainers = _num_trainer_nodes(config, cluster, "trainer", engines)
    placed = place_run(config, [*alike_nodes(trainers, cluster.gpus_per_node, "trainer"), *engines])
    used = [node for node in placed.nodes if node.role == "rollout"]
    return trainers, max(1, len(used)) if cluster.rollout_nodes.gpus_per_node else 1


def _num_trainer_nodes(config: Config, cluster: ClusterConfig, role: Role, others: list[Node]) -> int:
    """Return the cluster's number of nodes, or as few as suffice. Raises UserError if the run does not fit on them."""
    if cluster.num_nodes is None:
        return _fewest(config, cluster, role, others)
    try:
        place_run(config, [*alike_nodes(cluster.num_nodes, cluster.gpus_per_node, role), *others])
    except UserError as refusal:
        raise UserError(f"num_nodes={cluster.num_nodes} in the cluster's file: {refusal}") from None
    return cluster.num_nodes


def _fewest(config: Config, nodes: NodesConfig, role: Role, others: list[Node]) -> int:
    num_engine_ranks = 0 if others else config.rollout.num_engines * config.rollout.ranks_per_engine
    num_ranks = config.rollout.num_gpus(config.parallel.world_size, num_engine_ranks)
    first = -(-num_ranks // nodes.gpus_per_node) if nodes.gpus_per_node else 1
    try:
        return fewest_nodes(config, nodes.gpus_per_node, role, others, first=first, most=MAX_NODES)
    except UserError as error:
        raise UserError(f"with {MAX_NODES} nodes, the most of a job: {error}") from None


def submission(config: Config, config_file: Path, overrides: Sequence[str], cluster: ClusterConfig) -> Submission:
    """Return the job of a configuration without writing or starting anything."""
    if config.rollout.colocate and cluster.rollout_nodes is not None:
        raise UserError(
            "rollout.colocate=true puts the engines on the trainer's GPUs, but the cluster has rollout_nodes for them; "
            "set rollout.colocate=false, or choose a cluster without rollout_nodes"
        )
    script = LAUNCH / "slurm.sbatch"
    if not script.is_file():
        raise UserError(f"there is no {script}: submit from a checkout of the project")
    folder = (config.run_dir / _LOGS).absolute()
    components = num_nodes(config, cluster)
    kinds: list[NodesConfig] = [cluster, *([cluster.rollout_nodes] if cluster.rollout_nodes is not None else [])]
    command = [
        *("sbatch", "--parsable", f"--output={folder}/%j.log", f"--chdir={Path.cwd()}", "--export=ALL"),
        f"--signal=B:USR1@{cluster.signal_s}",
    ]
    for index, (number, nodes) in enumerate(zip(components, kinds, strict=True)):
        command += [*([":"] if index else []), *_node_options(number, nodes, cluster)]
    python = cluster.python or sys.executable
    environment = {**cluster.env, "BAPO_LAUNCH": str(LAUNCH), "BAPO_LOGS": str(folder), "BAPO_PYTHON": python}
    environment["BAPO_SIGNAL_S"] = str(cluster.signal_s)
    if cluster.interface is not None:
        environment["BAPO_INTERFACE"] = cluster.interface
    if cluster.container is not None:
        environment["BAPO_CONTAINER"] = "\n".join(_container(cluster.container, cluster, config.run_dir))
        if cluster.container.runtime == "apptainer":
            environment |= {f"APPTAINERENV_{name}": value for name, value in cluster.env.items()}
    return Submission((*command, str(script), str(config_file), *overrides), environment, folder)


def _node_options(number: int, nodes: NodesConfig, cluster: ClusterConfig) -> Iterator[str]:
    yield f"--nodes={number}"
    yield f"--time={cluster.time_limit}"
    if nodes.gpus_per_node:
        yield f"--gpus-per-node={nodes.gpus_per_node}"
    named = {
        "partition": nodes.partition or cluster.partition,
        "account": cluster.account,
        "qos": cluster.qos,
        "cpus-per-task": nodes.cpus_per_node,
        "mem": nodes.memory,
    }
    yield from (f"--{name}={value}" for name, value in named.items() if value is not None)
    yield from cluster.sbatch_options


def _container(container: ContainerConfig, cluster: ClusterConfig, run_dir: Path) -> list[str]:
    """Return the arguments before a step's command: srun options for Pyxis, or Apptainer's command.

    The cluster's `env` takes precedence over the image's variables, by an option or by APPTAINERENV_* variables.
    Sources: github.com/NVIDIA/pyxis/wiki/Usage, apptainer.org/docs/user/main/cli/apptainer_exec.html.
    """
    here = Path.cwd()
    mounts = [f"{here}:{here}", f"{LAUNCH}:{LAUNCH}", *_run_dir_mount(run_dir, here), *container.mounts]
    if container.runtime == "apptainer":
        gpus = ["--nv"] if cluster.gpus_per_node else []
        return ["apptainer", "exec", *gpus, f"--bind={','.join(mounts)}", f"--pwd={here}", container.image]
    options = [
        f"--container-image={container.image}",
        # Each step is a container with its own /tmp by default, but Ray's processes connect through sockets there.
        f"--container-mounts={','.join(['/tmp:/tmp', *mounts])}",
        f"--container-workdir={here}",
    ]
    return [*options, f"--container-env={','.join(cluster.env)}"] if cluster.env else options


def _run_dir_mount(run_dir: Path, here: Path) -> Iterator[str]:
    """Yield the mount of a run directory outside of the job's folder, perhaps behind a symbolic link in it."""
    path, target = run_dir.absolute(), run_dir.resolve()
    if not path.is_relative_to(here):
        yield f"{target}:{path}"
    elif not target.is_relative_to(here.resolve()):
        yield f"{target}:{target}"


def submit(job: Submission) -> str:
    """Submit the job to Slurm and return its number."""
    make_folder(job.folder, f"run_dir={job.folder.parent}")
    try:
        return _slurm(*job.command, environment=job.environment).strip().partition(";")[0]
    except UserError as refusal:
        raise UserError(
            f"{refusal}\nset partition, account, qos, GPUs and time limit in the cluster file; sinfo shows partitions"
        ) from None


def status(job: str) -> dict[str, str]:
    """Return Slurm's information about a job, or the place of its log if Slurm no longer knows the job.

    Raises UserError if neither Slurm nor a run directory below the current folder knows the job.
    """
    if not job[:1].isdigit():  # without a number, Slurm describes every job
        raise UserError(f"job {job!r} must be a number, as printed by submit; squeue --me lists the numbers")
    try:
        described = _slurm("scontrol", "show", "job", job, "--oneliner")
    except UserError as refusal:
        if _UNKNOWN_JOB not in str(refusal):
            raise
        described = ""
    found = dict(re.findall(r"(\w+)=(.*?)(?= \w+=|$)", described.partition("\n")[0]))
    known = {shown: found[field] for field, shown in _FIELDS.items() if found.get(field) not in (None, "", "(null)")}
    return known or {"state": "unknown to Slurm, which forgets jobs minutes after their end", "log": str(_log(job))}


def logs(job: str) -> list[Path]:
    """Return the job's log and Ray's logs of its nodes. Raises UserError as `status` does."""
    known = status(job)
    log = Path(known["log"]) if "log" in known else _log(job)
    return [log, *sorted(log.parent.glob(f"{log.stem}-*.log"))]


def _log(job: str) -> Path:
    """Return the log in a run directory below the current folder. Raises UserError if there is none."""
    name = f"{_LOGS}/{glob.escape(job)}.log"
    for depth in range(_RUN_DIR_DEPTH + 1):
        if found := sorted(Path.cwd().glob(f"{'*/' * depth}{name}")):
            return found[0]
    raise UserError(
        f"Slurm does not report where the log of job {job} is (it forgets a job minutes after its end), and no run "
        f"directory at most {_RUN_DIR_DEPTH} folders below {Path.cwd()} has it; see RUN_DIR/{_LOGS}/{job}.log, or "
        "run the command in the folder from which the job was submitted"
    )


def cancel(job: str, *, now: bool) -> str:
    """Let the job save its state and end; with `now`, or while it waits in the queue, end it without saving.

    Returns what happens next. Raises UserError if the job has ended.
    """
    state = status(job)["state"]
    if state == "PENDING":
        _slurm("scancel", job)
        return f"job {job} did not run at this time and is removed from the queue"
    if state not in _RUNNING:
        raise UserError(f"job {job} is not running: {state}")
    if now:
        _slurm("scancel", job)
        return f"job {job} ends without saving; the same submit command continues from the newest checkpoint"
    _slurm("scancel", "--batch", "--signal=USR2", job)
    return (
        f"job {job} saves its state after the current step and ends; megatron-bapo status {job} shows when. The same "
        "submit command continues the run"
    )


def _client_environment() -> dict[str, str]:
    """Return this process's variables without those of a Slurm job that it runs in.

    sbatch passes SLURM_NTASKS, SLURM_HET_SIZE and others on to the new job, whose srun takes them for its own options.
    """
    in_job = "SLURM_JOB_ID" in os.environ
    return {
        name: value
        for name, value in os.environ.items()
        if not (in_job and name.startswith("SLURM_")) or name in _CLIENT_VARIABLES
    }


def _slurm(*command: str, environment: dict[str, str] | None = None) -> str:
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=_COMMAND_TIMEOUT_S,
            env={**_client_environment(), **(environment or {})},
        )
    except FileNotFoundError:
        raise UserError(f"{command[0]} is not installed here: log in to a node with Slurm's commands") from None
    except subprocess.TimeoutExpired:
        raise RunError(
            f"Slurm did not reply to {command[0]} within {_COMMAND_TIMEOUT_S:.0f} s; see `scontrol ping`"
        ) from None
    if done.returncode != 0:
        said = f"{command[0]}: {done.stderr.strip() or done.stdout.strip()}"
        if any(text in said for text in _UNREACHABLE):
            raise RunError(f"this machine does not reach Slurm; see `scontrol ping`, or use a login node. {said}")
        raise UserError(said)
    return done.stdout
