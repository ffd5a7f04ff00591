"""Set-up of the GPU lock, as far as it runs without its packages: the steps of `make`, and the extension's build."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
SCRIPT = ROOT / "tools" / "install_transformer_engine.sh"
PYTHON = f"""#!/usr/bin/env bash
case "$*" in
    *"pip wheel"*) echo "$NVTE_BUILD_USE_NVIDIA_WHEELS $(command -v ninja) $*" >>"$CALLS"
        [[ -n $BROKEN ]] && echo "common.h:9: fatal error: cudnn.h: No such file or directory" && seq 9
        [[ -z $BROKEN ]] && touch "$WHEEL_CACHE/$(ls "$WHEEL_CACHE")/transformer_engine_torch-2.20.2-cp.whl" ;;
    *'["include"]'*) echo "$INCLUDE" ;;
    *"pip install"*) echo "$*" >>"$CALLS" ;;
    *) exec {sys.executable} "$@" ;;
esac
"""


def make(*arguments: str, folder: Path) -> str:
    """What `make setup` would do for a new environment."""
    command = ["make", "--dry-run", "setup", f"VENV={folder / 'venv'}", f"PYTHON={sys.executable}", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60, cwd=ROOT).stdout


def test_only_the_gpu_lock_builds_transformer_engine(tmp_path: Path) -> None:
    on_cpu, on_gpu = make("HAS_GPU=", folder=tmp_path), make("HAS_GPU=yes", folder=tmp_path)
    assert "requirements-cpu.txt" in on_cpu
    assert SCRIPT.name not in on_cpu
    assert f"tools/{SCRIPT.name} {tmp_path}/venv/bin/python requirements.txt" in on_gpu
    assert "requirements-cpu.txt" not in on_gpu


def test_an_environment_of_the_gpu_lock_is_not_replaced_on_a_machine_without_a_gpu(tmp_path: Path) -> None:
    if subprocess.run("nvidia-smi -L", shell=True, capture_output=True).returncode == 0:
        pytest.skip("this machine has a GPU")
    assert "requirements-cpu.txt" in make(folder=tmp_path)
    (tmp_path / "venv").mkdir()
    (tmp_path / "venv" / ".gpu").touch()
    assert "requirements-cpu.txt" not in make(folder=tmp_path)
    assert f"touch {tmp_path}/venv/.gpu" in make(folder=tmp_path)


def test_the_image_is_set_up_by_the_same_target_and_fails_without_transformer_engine() -> None:
    lines = (ROOT / "Dockerfile").read_text().splitlines()
    assert [line for line in lines if line.startswith("RUN make")] == [
        "RUN make setup HAS_GPU=yes TRANSFORMER_ENGINE=required WHEEL_CACHE=/opt/wheels"
    ]
    version = re.search(r"Python (3\.\d+)", (ROOT / "requirements.txt").read_text())
    assert version is not None
    assert any(f"python{version[1]}-venv" in line for line in lines)


@pytest.mark.parametrize(("required", "exit_code"), [("", 0), ("required", 1)])
def test_an_extension_that_does_not_compile_leaves_transformer_engine_out(
    required: str, exit_code: int, tmp_path: Path
) -> None:
    result, calls = install(tmp_path, broken="1", required=required)
    assert result.returncode == exit_code
    assert "Transformer Engine is not installed" in result.stderr
    assert "cudnn.h: No such file" in result.stderr
    assert [call for call in calls if "pip install" in call] == []


def test_the_extension_is_compiled_once_from_the_locks_headers(tmp_path: Path) -> None:
    for _ in range(2):
        result, calls = install(tmp_path, broken="", required="required")
        assert result.returncode == 0, result.stderr
    builds = [call for call in calls if "pip wheel" in call]
    assert len(builds) == 1
    assert builds[0].startswith(f"1 {tmp_path / 'ninja'} "), "without ninja torch compiles one file after the other"
    assert "--no-cache-dir" in builds[0], "pip caches a wheel without regard to the torch that it was compiled for"
    installed = calls[-1].split()
    assert {name.split("==")[0] for name in installed[-2:]} == {"transformer-engine", "transformer-engine-cu13"}
    assert installed[-3].endswith(".whl")


@pytest.mark.parametrize(
    ("variables", "problem"),
    [
        ({"CXX": "no-such-compiler -O2"}, "error: there is no C++ compiler no-such-compiler -O2; install g++"),
        ({"INCLUDE": "/no-such-folder"}, "error: there is no /no-such-folder/Python.h; install Python's headers"),
    ],
)
def test_what_is_missing_for_the_build_is_named_before_it_starts(
    variables: dict[str, str], problem: str, tmp_path: Path
) -> None:
    result, calls = install(tmp_path, broken="", required="required", **variables)
    assert result.returncode == 1
    assert problem in result.stderr
    assert calls == []


def test_the_environments_python_may_be_given_by_name(tmp_path: Path) -> None:
    result, calls = install(tmp_path, "python", broken="", required="required", PATH=f"{tmp_path}:{os.environ['PATH']}")
    assert result.returncode == 0, result.stderr
    assert calls[0].startswith(f"1 {tmp_path / 'ninja'} ")
    result, _ = install(tmp_path, "no-such-python", broken="", required="")
    assert result.returncode == 2
    assert "error: there is no program no-such-python" in result.stderr


def install(
    folder: Path, program: str = "", *, broken: str, required: str, **variables: str
) -> tuple[subprocess.CompletedProcess[str], list[str]]:
    """Run the script; `program` is what it is given as Python, by default the path of the one that records calls."""
    python, ninja, calls = folder / "python", folder / "ninja", folder / "calls"
    (folder / "Python.h").touch()
    calls.touch()
    python.write_text(PYTHON)
    ninja.touch()
    for executable in (python, ninja):
        executable.chmod(0o755)
    environment = {
        **os.environ, "CALLS": str(calls), "BROKEN": broken, "TRANSFORMER_ENGINE": required,
        "WHEEL_CACHE": str(folder / "wheels"), "INCLUDE": str(folder), **variables,
    }  # fmt: skip
    result = subprocess.run(
        [SCRIPT, program or python, ROOT / "requirements.txt"],
        capture_output=True,
        text=True,
        timeout=60,
        env=environment,
    )
    return result, calls.read_text().splitlines()
