from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from megatron_bapo.config.schema import ParallelConfig
from megatron_bapo.errors import UserError
from megatron_bapo.parallel.collectives import broadcast_object, max_over, sum_over
from megatron_bapo.parallel.groups import create_groups
from megatron_bapo.parallel.megatron import parallel_state

TIMEOUT_S = 60.0


@pytest.fixture
def one_process(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1)
    yield
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()


@pytest.mark.usefixtures("one_process")
def test_a_wrong_number_of_processes_is_a_user_error():
    with pytest.raises(UserError, match=r"parallel\.world_size is 4, but 1 trainer processes were started"):
        create_groups(ParallelConfig(world_size=4), seed=0, timeout_s=TIMEOUT_S)


@pytest.mark.usefixtures("one_process")
def test_one_process_is_first_last_and_main_on_every_axis():
    groups = create_groups(ParallelConfig(), seed=0, timeout_s=TIMEOUT_S)

    assert [(axis.rank, axis.size) for axis in (groups.tensor, groups.pipeline, groups.data)] == [(0, 1)] * 3
    assert groups.is_first_stage
    assert groups.is_last_stage
    assert (groups.stage_rank, groups.stage_size) == (0, 1)
    assert groups.is_main


@pytest.mark.usefixtures("one_process")
def test_collectives_over_one_process_change_nothing():
    groups = create_groups(ParallelConfig(), seed=0, timeout_s=TIMEOUT_S)
    tensor = torch.tensor([1.0, -2.0])

    sum_over(groups.tensor, groups.data)(tensor)
    max_over(groups.pipeline)(tensor)

    assert tensor.tolist() == [1.0, -2.0]
    assert broadcast_object({"step": 3}, groups) == {"step": 3}
