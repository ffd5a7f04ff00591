from pathlib import Path

import psutil
import pytest

from megatron_bapo.controller.trainer_process import Rendezvous, TrainerNode, interface_of, kill, torchrun
from megatron_bapo.errors import UserError


def node(**values) -> TrainerNode:
    fields = {"run_dir": Path("run"), "source": ("--ray", "10.0.0.1:6379"), "num_ranks": 4, "address": "127.0.0.1"}
    return TrainerNode(**fields, host=0, engine_hosts=(2, 3), **values)


def test_ranks_of_one_machine_meet_in_a_file_and_those_of_several_at_the_first_ones_address() -> None:
    alone = torchrun(node(), Path("/store"))
    assert alone[alone.index("--rdzv-endpoint") + 1] == "/store/rendezvous"
    assert "store_type=file" in alone
    second = torchrun(node(rendezvous=Rendezvous(2, "10.0.0.1:4000", is_here=False)), Path("/store"))
    assert second[second.index("--rdzv-endpoint") + 1] == "10.0.0.1:4000"
    assert "is_host=0" in second
    assert second[second.index("--nnodes") + 1] == "2"
    assert second[-3:] == ["--engine-hosts", "2", "3"]


def test_a_machine_knows_the_interface_of_its_address_and_refuses_another_ones() -> None:
    assert interface_of("127.0.0.1") == "lo"
    with pytest.raises(UserError, match=r"no network interface of this machine has the address 203\.0\.113\.7"):
        interface_of("203.0.113.7")


def test_a_process_that_took_over_an_id_is_not_killed() -> None:
    process = psutil.Popen(["sleep", "60"])
    kill([(process.pid, process.create_time() - 1)])
    assert process.is_running()
    kill([(process.pid, process.create_time())])
    assert process.wait(timeout=10) == -9
