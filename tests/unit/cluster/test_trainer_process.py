import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from megatron_bapo.cluster.trainer_process import (
    Rendezvous,
    TrainerLog,
    TrainerNode,
    end_all,
    interface_of,
    start_trainer,
    torchrun,
)
from megatron_bapo.errors import UserError


def node(**values) -> TrainerNode:
    fields = {"run_dir": Path("run"), "source": ("--ray", "10.0.0.1:6379"), "num_ranks": 4, "address": "127.0.0.1"}
    return TrainerNode(**fields, host=0, engine_hosts=((2, 3), (3, 4)), **values)


def test_torchruns_files_are_in_the_weight_store_and_the_rendezvous_of_several_machines_is_on_the_first() -> None:
    single = torchrun(node(), Path("/store"))
    assert single[single.index("--rdzv-endpoint") + 1] == "/store/rendezvous"
    assert "store_type=file" in single
    assert single[single.index("--log-dir") + 1] == "/store/torchrun"
    second = torchrun(node(rendezvous=Rendezvous(2, "10.0.0.1:4000", node=1)), Path("/store"))
    assert second[second.index("--rdzv-endpoint") + 1] == "10.0.0.1:4000"
    assert "node=1" in second
    assert second[second.index("--nnodes") + 1] == "2"
    assert second[-3:] == ["--engine-hosts", "2,3", "3,4"]


def test_torchrun_gets_no_options_from_the_environment_and_crashes_show_stacks(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in ("PET_NNODES", "PET_MAX_RESTARTS"):
        monkeypatch.setenv(name, "2")
    started = start_trainer(node(), tmp_path, tmp_path / "trainer.log")
    try:
        environment = started.environ()
    finally:
        end_all([started])
        started.wait(timeout=60)
    assert not [name for name in environment if name.startswith("PET_")]
    assert environment["PYTHONFAULTHANDLER"] == "1"


def test_the_interface_of_an_address_is_found_and_a_foreign_address_is_refused() -> None:
    assert interface_of("127.0.0.1") == "lo"
    with pytest.raises(UserError, match=r"no network interface of this machine has the address 203\.0\.113\.7"):
        interface_of("203.0.113.7")


def test_the_rank_that_was_killed_is_distinguished_from_those_that_torchrun_ended(tmp_path: Path) -> None:
    log = tmp_path / "trainer.log"
    started = TrainerLog(log)
    assert started.killed_rank() is None
    ranks = tmp_path / "ranks.py"
    ranks.write_text(
        "import os, signal, time\n"
        "os.kill(os.getpid(), signal.SIGKILL if os.environ['RANK'] == '1' else 0)\n"
        "time.sleep(60)\n"
    )
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(ranks)]
    with log.open("wb") as output:
        assert subprocess.run(command, stdout=output, stderr=output, timeout=300).returncode == 1
    assert started.killed_rank() == "trainer rank 1 was killed by SIGKILL"
    assert TrainerLog(log).killed_rank() is None, "a restart does not take over the failure before it"


def test_a_process_that_ignores_sigterm_is_killed_and_a_zombie_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("megatron_bapo.cluster.trainer_process._TERMINATE_TIMEOUT_S", 0.5)
    script = "trap '' TERM; echo ready; while :; do sleep 0.1; done"
    stubborn = psutil.Popen(["bash", "-c", script], stdout=subprocess.PIPE)
    with stubborn.stdout as lines:
        assert lines.readline() == b"ready\n"
    end_all([stubborn])
    assert stubborn.wait(timeout=10) == -9
    monkeypatch.setattr("megatron_bapo.cluster.trainer_process._TERMINATE_TIMEOUT_S", 60.0)
    start_s = time.monotonic()
    zombie = psutil.Popen(["sleep", "60"])
    end_all([zombie])
    assert time.monotonic() - start_s < 10.0
    assert zombie.wait(timeout=10) == -15
