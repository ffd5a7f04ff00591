from pathlib import Path

import pytest
import torch

from megatron_bapo.errors import RunError
from megatron_bapo.parallel.platform import open_storage, share_storage
from megatron_bapo.weight_sync.plan_files import announced_plan, withdraw
from megatron_bapo.weight_sync.route import WeightRoute
from megatron_bapo.weight_sync.shared_parameters import SharedParameters, offer_parameters
from tests.unit.weight_sync.examples import halves, reading

CPU = torch.device("cpu")
SHAPES = {"a": (4, 6), "b": (2, 2), "c": (8, 4)}


def test_engine_ranks_read_parameters_that_are_views_of_flat_buffers(tmp_path: Path) -> None:
    """Split rows over senders and columns over readers, so slices are not contiguous and not at a storage's start."""
    plan = halves(SHAPES, dim=0, reader_dim=1, sender_hosts=(0, 1), reader_hosts=(0, 1))
    buffer = torch.arange(100.0)
    tensors = {"a": buffer[3:27].view(4, 6), "b": buffer[27:31].view(2, 2), "c": buffer[60:92].view(8, 4)}
    expected = {name: tensor.clone() for name, tensor in tensors.items()}
    for rank in (0, 1):
        num_bytes = offer_parameters(tmp_path, 7, plan, rank, reading(tensors), share_storage)
        assert num_bytes == plan.num_bytes(plan.sent_by(rank))
    assert announced_plan(tmp_path, 7) == plan
    for reader in (0, 1):
        source = SharedParameters(tmp_path, reader, open_storage, CPU)
        assert source.verify(7) == sum(tensor.nbytes for tensor in expected.values()) // 2
        found = dict(source.read(7))
        for name, tensor in expected.items():
            assert torch.equal(found[name].chunk(2, 1)[reader], tensor.chunk(2, 1)[reader])
    buffer[28] += 1
    with pytest.raises(
        RunError, match=r"b of policy version 7, read from trainer rank 0, differs from that rank's parameter"
    ):
        [SharedParameters(tmp_path, reader, open_storage, CPU).verify(7) for reader in (0, 1)]


def test_tensors_are_allocated_on_the_device_of_the_engine_rank(tmp_path: Path) -> None:
    plan = halves(SHAPES, dim=0, reader_dim=0)
    tensors = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
    for rank in (0, 1):
        offer_parameters(tmp_path, 1, plan, rank, reading(tensors), share_storage)
    elsewhere = torch.device("meta")
    found = dict(SharedParameters(tmp_path, 0, open_storage, elsewhere).read(1))
    assert {name: (tuple(t.shape), t.device) for name, t in found.items()} == {
        name: (shape, elsewhere) for name, shape in SHAPES.items()
    }


def test_a_version_that_was_withdrawn_is_not_read(tmp_path: Path) -> None:
    plan = halves(SHAPES, dim=0, reader_dim=0)
    tensors = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
    offer_parameters(tmp_path, 3, plan, 0, reading(tensors), share_storage)
    withdraw(tmp_path, 3, 0)
    with pytest.raises(RunError, match="trainer rank 0 has not announced policy version 3"):
        SharedParameters(tmp_path, 0, open_storage, CPU).verify(3)


def test_a_route_survives_a_json_round_trip(tmp_path: Path) -> None:
    route = WeightRoute(tmp_path, "nccl", first_place=4, rendezvous="ray://10.0.0.1:6379", timeout_s=7.0)
    assert WeightRoute.from_json(route.to_json()) == route
