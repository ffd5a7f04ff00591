"""Engine ranks that receive versions from a trainer rank in a process group, and what becomes of them when one dies.

The trainer rank is this process; every engine rank is a process of its own, as inside vLLM.
"""

import gc
import json
import os
import secrets
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing import get_context
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import Glm4MoeConfig, Qwen3Config

from megatron_bapo.config.architecture import WEIGHTS_INDEX, read_architecture
from megatron_bapo.errors import RunError, UserError
from megatron_bapo.model.hf_mapping import expected_shapes, frozen_tensors, trained_shapes
from megatron_bapo.model.transfer_member import transfer_member
from megatron_bapo.model.weight_layouts import EngineLayout
from megatron_bapo.parallel.platform import DeviceStreams
from megatron_bapo.rollout.weight_sources import check_complete, read_frozen_tensors, version_shapes, weight_source
from megatron_bapo.weight_sync.membership import TransferFailed, offer_plan
from megatron_bapo.weight_sync.ray_store import open_store
from megatron_bapo.weight_sync.route import TransferGroup, WeightRoute
from megatron_bapo.weight_sync.slice_stream import send_slices
from tests.unit.weight_sync.examples import numbered, reading, whole_tensors

SHAPES = {f"layers.{index}.weight": (64, 64) for index in range(6)}
TRAINER, ENGINES = 0, (1, 2, 3)
PLAN = whole_tensors(numbered(SHAPES, 0), bucket_bytes=64 * 64 * 4, hosts=ENGINES)
LIMIT_S = 120.0
QUICK_S = 60.0
"""Much less than the limit of a transfer, and enough on a busy machine."""
CPU = torch.device("cpu")


@dataclass
class Engines:
    """The processes of the engine ranks, and the groups that the rollout service would form."""

    folder: Path
    processes: dict[int, Any] = field(default_factory=dict)

    @property
    def rendezvous(self) -> str:
        return f"file://{self.folder}/rendezvous"

    def start(self, place: int, groups: list[tuple[int, TransferGroup]], killed_at: int | None = None) -> None:
        """Start an engine rank that loads a version in each group; it kills itself at a tensor of the last one."""
        args = self.folder, self.rendezvous, place, groups, killed_at
        self.processes[place] = get_context("fork").Process(target=receive, args=args)
        self.processes[place].start()

    def notice(self, place: int, group: TransferGroup) -> None:
        """Do what the rollout service does when an engine is lost."""
        self.end(place)
        open_store(self.rendezvous, LIMIT_S).set(group.failed_key, f"the engine at place {place} was lost")

    def end(self, place: int) -> int:
        self.processes[place].join(QUICK_S)
        return self.processes[place].exitcode


def receive(folder: Path, rendezvous: str, place: int, groups: list[tuple[int, TransferGroup]], killed_at: int | None):
    """Load versions, check every tensor, and write the names in the order in which they arrived."""
    gc.freeze()  # a collection here would end the parent's process groups, whose threads this process does not have
    route = WeightRoute(folder, "nccl", first_place=place, rendezvous=rendezvous, timeout_s=LIMIT_S)
    source = weight_source(route, EngineLayout(), 0, CPU)
    for version, group in groups:
        assert source.verify(version, group) == PLAN.total_bytes
        expected, names = numbered(SHAPES, version), []
        for name, tensor in source.read(version):
            if len(names) == killed_at and version == groups[-1][0]:
                os.kill(os.getpid(), signal.SIGKILL)
            assert torch.equal(tensor, expected[name])
            names.append(name)
        source.finish(version)
        (folder / f"{place}-{version}").write_text(" ".join(names))


def new_group(*engines: int) -> TransferGroup:
    return TransferGroup(secrets.token_hex(4), PLAN.digest, (TRAINER, *engines))


@contextmanager
def running(folder: Path) -> Iterator[Engines]:
    engines = Engines(folder)
    offer_plan(open_store(engines.rendezvous, LIMIT_S), PLAN)
    try:
        yield engines
    finally:
        for process in engines.processes.values():
            process.kill()


def send(member: Any, version: int, group: TransferGroup) -> None:
    member.join(group)
    with member.transfer() as chain:
        send_slices(PLAN, version, TRAINER, reading(numbered(SHAPES, version)), chain, DeviceStreams(CPU))
    member.commit(version, num_senders=1)


def test_engines_load_every_version_in_one_group_and_the_store_keeps_no_keys_of_versions(tmp_path: Path) -> None:
    group = new_group(*ENGINES)
    with running(tmp_path) as engines:
        for place in ENGINES:
            engines.start(place, [(version, group) for version in (1, 2, 3)])
        member = transfer_member(engines.rendezvous, TRAINER, "127.0.0.1", LIMIT_S)
        for version in (1, 2, 3):
            send(member, version, group)
        assert [engines.end(place) for place in ENGINES] == [0, 0, 0]
        member.forget(2)
        store = open_store(engines.rendezvous, LIMIT_S)
        assert store.check([group.committed_key(3), group.received_key(3, 1)])
        assert not store.check([group.committed_key(2)])
        assert not store.check([group.received_key(2, 1)])
    assert (tmp_path / "1-3").read_text().split() == list(SHAPES)


@pytest.mark.parametrize("killed_at", [0, 3, 5])
@pytest.mark.parametrize("victim", ENGINES, ids=["first", "relay", "last"])
def test_a_transfer_in_which_an_engine_is_killed_is_repeated_for_the_others(
    tmp_path: Path, victim: int, killed_at: int
) -> None:
    """The survivors load every tensor once, and nobody waits for the limit: the rollout service notices the death."""
    first, second = new_group(*ENGINES), new_group(*(place for place in ENGINES if place != victim))
    with running(tmp_path) as engines:
        for place in ENGINES:
            engines.start(place, [(1, first), (2, first)], killed_at if place == victim else None)
        member = transfer_member(engines.rendezvous, TRAINER, "127.0.0.1", LIMIT_S)
        store = open_store(engines.rendezvous, LIMIT_S)
        send(member, 1, first)
        start = time.monotonic()
        service = Thread(target=engines.notice, args=(victim, first))
        service.start()
        with pytest.raises(TransferFailed):
            send(member, 2, first)
        service.join()
        assert engines.end(victim) == -signal.SIGKILL
        store.set(first.next_key, second.to_json())
        send(member, 2, second)
        survivors = [place for place in ENGINES if place != victim]
        assert [engines.end(place) for place in survivors] == [0, 0]
        assert time.monotonic() - start < QUICK_S
    for place in survivors:
        assert sorted((tmp_path / f"{place}-2").read_text().split()) == sorted(SHAPES)
    assert not (tmp_path / f"{victim}-2").exists()


def test_a_rank_that_never_joins_is_named_and_a_notice_ends_the_wait_at_once(tmp_path: Path) -> None:
    with running(tmp_path) as engines:
        member = transfer_member(engines.rendezvous, TRAINER, "127.0.0.1", 0.5)
        with pytest.raises(TransferFailed, match=r"the ranks at places 1, 3 of the weight transfer plan did not join"):
            member.join(new_group(1, 3))
        group = new_group(2)
        open_store(engines.rendezvous, 1.0).set(group.failed_key, "engine 0 was lost: killed")
        patient = transfer_member(engines.rendezvous, TRAINER, "127.0.0.1", LIMIT_S)
        with pytest.raises(TransferFailed, match="engine 0 was lost: killed"):
            patient.join(group)
        with pytest.raises(TransferFailed), patient.transfer():
            raise AssertionError("a failed group transfers nothing")


def test_a_version_that_no_group_transfers_is_refused(tmp_path: Path) -> None:
    route = WeightRoute(tmp_path, "nccl", rendezvous=f"file://{tmp_path}/rendezvous")
    with pytest.raises(RunError, match="policy version 4 was not offered: no group transfers it"):
        check_complete(route, 4, None, {})


def test_an_engine_expects_what_the_trainer_sends_whatever_else_the_checkpoint_has(tmp_path: Path) -> None:
    """The trainer reads the files that the index lists, and neither tensors of old exports nor MTP layers.

    An engine that expected these would refuse every version.
    """
    sizes = {"vocab_size": 12, "hidden_size": 8, "intermediate_size": 6, "num_hidden_layers": 2, "head_dim": 4}
    heads, experts = (
        {"num_attention_heads": 2, "num_key_value_heads": 1},
        {"n_routed_experts": 2, "n_shared_experts": 1},
    )
    widths = {"num_experts_per_tok": 2, "moe_intermediate_size": 4, "first_k_dense_replace": 1}
    Glm4MoeConfig(**sizes, **heads, **experts, **widths).save_pretrained(tmp_path)
    architecture = read_architecture(tmp_path)
    tensors = {name: torch.full(shape, 2.0) for name, shape in expected_shapes(architecture).items()}
    more = {
        "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(2),
        "model.layers.2.eh_proj.weight": torch.ones(1),
    }
    save_file(tensors | more, tmp_path / "model.safetensors")
    index = {"weight_map": dict.fromkeys(tensors | more, "model.safetensors")}
    (tmp_path / WEIGHTS_INDEX).write_text(json.dumps(index))
    frozen = dict.fromkeys(frozen_tensors(architecture), torch.zeros(2))
    save_file({"layers.0.attention.wq.weight": torch.ones(8, 8)} | frozen, tmp_path / "original.safetensors")

    assert version_shapes(tmp_path, None) == trained_shapes(architecture)
    found = read_frozen_tensors(tmp_path)
    assert found.keys() == frozen.keys()
    assert all(torch.equal(value, torch.full((2,), 2.0)) for value in found.values())


def test_an_engine_whose_checkpoint_lacks_a_tensor_says_so(tmp_path: Path) -> None:
    Qwen3Config(vocab_size=12, hidden_size=8, intermediate_size=6, num_hidden_layers=2).save_pretrained(tmp_path)
    save_file({"model.norm.weight": torch.ones(8)}, tmp_path / "model.safetensors")
    with pytest.raises(UserError, match="lacks 24 tensors that"):
        version_shapes(tmp_path, None)
