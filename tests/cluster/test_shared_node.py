"""A node that several users and runs share: each has its own Ray, and none joins the cluster of another one."""

import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.launched import ENVIRONMENT, LAUNCH, START_LIMIT_S, train_steps, write_config, write_token
from tests.cluster.two_hosts import TwoHosts, named_as_on_debian

USERS = (65532, 65533)
PORTS = (6401, 6402)
LIMIT_S = 180
STARTED = "Ray runtime started"


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder that all users can write to, as /tmp; its path is short, because Ray creates its sockets there."""
    created = Path(tempfile.mkdtemp(prefix="bapo-"))
    created.chmod(0o1777)
    yield created
    shutil.rmtree(created)


def as_user(user: int) -> list[str]:
    """Return the prefix that runs a command as a user, with the interpreter and the project readable to everybody.

    If they lie in folders that are closed to others, such as /root, those folders are replaced for this command.
    """
    script = []
    for number, path in enumerate(sorted({Path(sys.base_prefix), Path(sys.prefix).parent, LAUNCH.parent}), start=5):
        closed = next((each for each in reversed(path.parents) if not each.stat().st_mode & 0o001), None)
        if closed is not None:
            replaced = f"mount -t tmpfs -o mode=755 tmpfs {closed}"
            script.insert(0, f"exec {number}<{path}")
            script += [] if replaced in script else [replaced]
            script.append(f"mkdir -p {path} && mount --no-canonicalize --bind /proc/self/fd/{number} {path}")
    drop = f"exec setpriv --reuid={user} --regid={user} --clear-groups"
    return ["unshare", "--mount", "bash", "-c", "\n".join(["set -e", *script, f'{drop} "$@"']), "as_user"]


def started_head(hosts: TwoHosts, user: int, port: int, folder: Path) -> subprocess.Popen:
    """Start Ray's head on the first host as a user, whose files are in `folder`."""
    (home := folder / str(user)).mkdir()
    shutil.chown(write_token(home), user, user)
    shutil.chown(home, user, user)
    settings = {"RAY_ADDRESS": f"{hosts.addresses[0]}:{port}", "RAY_AUTH_TOKEN_PATH": str(home / "token")}
    settings |= {"HOME": str(home), "TMPDIR": str(folder)}
    with (home / "log").open("wb") as log:
        return subprocess.Popen(
            [*hosts.on(0), *as_user(user), str(LAUNCH / "ray_node.sh")],
            stdout=log,
            stderr=log,
            env=ENVIRONMENT | settings,
            cwd=home,
        )


def ray_folders(folder: Path) -> dict[int, str]:
    """Return the permissions of the users' Ray folders, by user."""
    found = [path.stat() for path in folder.glob("bapo-ray-*")]
    return {each.st_uid: oct(each.st_mode)[-3:] for each in found}


def test_two_users_run_ray_on_one_node_and_a_run_does_not_join_the_cluster_of_another_one(
    hosts: TwoHosts, folder: Path
) -> None:
    heads = [started_head(hosts, user, port, folder) for user, port in zip(USERS, PORTS, strict=True)]
    try:
        deadline = time.monotonic() + START_LIMIT_S
        while not all(STARTED in (log := folder / str(user) / "log").read_text() for user in USERS):
            assert [head.poll() for head in heads] == [None, None], log.read_text()
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.5)
        assert ray_folders(folder) == dict.fromkeys(USERS, "700")
        _check_another_run_is_refused(hosts, folder)
        assert [head.poll() for head in heads] == [None, None]
    finally:
        for head in heads:
            head.terminate()
        codes = [head.wait(timeout=LIMIT_S) for head in heads]
    assert codes == [143, 143]
    assert ray_folders(folder) == {}


@pytest.mark.cluster_full
def test_two_users_train_on_one_node_at_the_same_time(hosts: TwoHosts, folder: Path) -> None:
    """Neither user is in the list of users, as in containers that run as any user."""
    runs = []
    for user in USERS:
        (home := folder / str(user)).mkdir()
        config = write_config(home, home / "run")
        for path in (home, *home.iterdir()):
            shutil.chown(path, user, user)
        command = [sys.executable, "-m", "megatron_bapo", "train", str(config), "trainer.total_steps=2"]
        environment = ENVIRONMENT | {"HOME": str(home), "TMPDIR": str(folder)}
        with (home / "log").open("wb") as log:
            run = [*hosts.on(0), *as_user(user), *command]
            runs.append(subprocess.Popen(run, stdout=log, stderr=log, env=environment, cwd=home))
    try:
        codes = [run.wait(timeout=START_LIMIT_S) for run in runs]
    finally:
        for run in runs:
            run.kill()
    assert codes == [0, 0], "\n".join((folder / str(user) / "log").read_text()[-3000:] for user in USERS)
    assert [train_steps(folder / str(user) / "run") for user in USERS] == [[1, 2], [1, 2]]
    assert ray_folders(folder) == {}
    assert [path for path in Path("/dev/shm").glob("megatron-bapo-*") if path.stat().st_uid in USERS] == []


def _check_another_run_is_refused(hosts: TwoHosts, folder: Path) -> None:
    """Of another run with the same secret and port, the head's node and another one and a launcher are refused."""
    token = {"RAY_AUTH_TOKEN_PATH": str(folder / str(USERS[0]) / "token")}
    master = {"NNODES": "2", "MASTER_ADDR": hosts.addresses[0], "MASTER_PORT": str(PORTS[0])}
    head, node = (
        subprocess.run(
            [*hosts.on(rank), LAUNCH / "torchrun_node.sh", "another.yaml"],
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            env=ENVIRONMENT | token | master | {"NODE_RANK": str(rank)},
        )
        for rank in (0, 1)
    )
    assert head.returncode == 2, head.stdout + head.stderr
    assert f"port {PORTS[0]} of {hosts.addresses[0]} is in use" in head.stderr, head.stderr
    assert node.returncode == 1, node.stdout + node.stderr
    assert f"the head {hosts.addresses[0]}:{PORTS[0]} belongs to another run" in node.stderr, node.stderr
    other = {"RAY_ADDRESS": f"{hosts.addresses[0]}:{PORTS[1]}", "COLUMNS": "200"}
    config = write_config(folder, folder / "run")
    launcher = subprocess.run(
        [*hosts.on(0), sys.executable, "-m", "megatron_bapo", "train", config, "--num-nodes", "1"],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        env=ENVIRONMENT | token | other,
    )
    assert launcher.returncode == 2, launcher.stdout + launcher.stderr
    assert "refuses this run's token: it belongs to another run" in launcher.stdout + launcher.stderr


@pytest.mark.parametrize(
    ("script", "settings", "expected"),
    [
        ("ray_node.sh", {"BAPO_INTERFACE": "bapo6"}, "BAPO_INTERFACE=bapo6 has no IPv4 address"),
        ("torchrun_node.sh", {"MASTER_ADDR": "fd00:77::1"}, "cannot be resolved to an IPv4 address"),
    ],
)
def test_a_node_with_only_an_ipv6_address_is_refused(
    script: str, settings: dict[str, str], expected: str, hosts: TwoHosts, tmp_path: Path
) -> None:
    ip = ["ip", "-n", hosts.names[0]]
    subprocess.run([*ip, "link", "add", "bapo6", "type", "veth", "peer", "name", "bapo7"], check=True, timeout=LIMIT_S)
    try:
        subprocess.run([*ip, "address", "add", "fd00:77::1/64", "dev", "bapo6"], check=True, timeout=LIMIT_S)
        settings = {"NNODES": "2", "NODE_RANK": "0", "RAY_ADDRESS": f"{hosts.addresses[0]}:6379"} | settings
        node = subprocess.run(
            [*hosts.on(0), LAUNCH / script, "config.yaml"],
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            env=ENVIRONMENT | settings | {"RAY_AUTH_TOKEN_PATH": str(write_token(tmp_path))},
        )
    finally:
        subprocess.run([*ip, "link", "delete", "bapo6"], check=True, timeout=LIMIT_S)
    assert node.returncode == 2, node.stderr
    assert expected in node.stderr


def test_a_master_whose_own_name_is_a_loopback_address_is_refused(hosts: TwoHosts, tmp_path: Path) -> None:
    master = {"NNODES": "2", "NODE_RANK": "0", "MASTER_ADDR": socket.gethostname()}
    node = subprocess.run(
        [*hosts.on(0), *named_as_on_debian(tmp_path), LAUNCH / "torchrun_node.sh", "config.yaml"],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        env=ENVIRONMENT | master | {"RAY_AUTH_TOKEN_PATH": str(write_token(tmp_path))},
    )
    assert node.returncode == 2
    assert f"MASTER_ADDR={socket.gethostname()} is 127.0.1.1 here, which other nodes cannot reach" in node.stderr
