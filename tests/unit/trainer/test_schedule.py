from pathlib import Path

import pytest
import torch

from bench import gpu_train_step
from megatron_bapo.parallel.groups import ParallelGroups
from megatron_bapo.trainer.micro_batches import MicroBatch
from megatron_bapo.trainer.schedule import run_micro_batches
from tests.unit.trainer.test_offload import make_worker

# Megatron-Core warns about its own defaults and calls.
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_hidden_states_reach_the_head_in_the_models_dtype(dtype: str, tmp_path: Path, groups: ParallelGroups) -> None:
    worker = make_worker(tmp_path, groups, dtype)

    def head(_: MicroBatch, hidden_TH: torch.Tensor) -> tuple[torch.Tensor, torch.dtype]:
        return hidden_TH.sum().float(), hidden_TH.dtype

    micro_batches = worker.micro_batches(gpu_train_step.make_batch(64, 1, vocab_size=96))
    for forward_only in True, False:
        (found,) = run_micro_batches(worker.model, micro_batches, head, forward_only=forward_only)
        assert found == getattr(torch, dtype)
