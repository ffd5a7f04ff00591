"""Offloading of the trainer state for engines: emptied and refilled storages, on the available device."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Qwen2Config

from bench import gpu_train_step
from megatron_bapo.parallel.groups import ParallelGroups
from megatron_bapo.parallel.platform import local_device
from megatron_bapo.trainer.offload import Storages, TrainerMemory
from megatron_bapo.trainer.policy_update import update_policy
from megatron_bapo.trainer.worker import Worker, create_worker

# Megatron-Core warns about its own defaults and calls.
pytestmark = pytest.mark.filterwarnings("ignore")


def make_worker(folder: Path, groups: ParallelGroups, dtype: str) -> Worker:
    Qwen2Config(
        vocab_size=96, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=128, tie_word_embeddings=True,
    ).save_pretrained(folder)  # fmt: skip
    config = gpu_train_step.make_config(folder, 64, 4, {}, dtype=dtype)
    return create_worker(config, folder, groups, load=False)


def state_of(worker: Worker) -> list[torch.Tensor]:
    parameters = (parameter for _, parameter in worker.model.named_parameters())
    return [tensor.detach().clone() for tensor in (*parameters, *worker.optimizer.states())]


def same(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> bool:
    return all(torch.equal(*pair) for pair in zip(ours, theirs, strict=True))


def test_views_of_a_storage_keep_their_values_after_repeated_offloading() -> None:
    tensor = torch.randn(3_000_001, device=local_device())
    view, expected = tensor[7:], tensor.clone()
    storages = Storages([tensor, view, torch.zeros(0, device=local_device())])
    assert storages.num_bytes == tensor.nbytes  # one storage for both tensors, and none for an empty tensor
    for _ in range(2):
        storages.offload()
        storages.offload()
        assert tensor.untyped_storage().size() == 0
        storages.onload()
        assert torch.equal(tensor, expected)
        assert torch.equal(view, expected[7:])


def test_storages_without_kept_values_are_refilled_with_zeros() -> None:
    tensor = torch.randn(100, device=local_device())
    storages = Storages([tensor], keep_values=False)
    storages.offload()
    storages.onload()
    assert not tensor.any()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_training_after_offloading_matches_training_without_it(
    dtype: str, tmp_path: Path, groups: ParallelGroups
) -> None:
    examples = gpu_train_step.make_batch(64, 1, vocab_size=96)
    usual, giving = (make_worker(tmp_path, groups, dtype) for _ in range(2))
    for (_, ours), (_, theirs) in zip(giving.model.named_parameters(), usual.model.named_parameters(), strict=True):
        giving.optimizer.write_weights(ours, theirs.detach())

    def update() -> None:
        for worker in (usual, giving):
            update_policy(worker, examples, lr=1e-2, on_policy=True)

    update()
    memory, before = TrainerMemory(giving), state_of(giving)
    memory.offload()
    assert all(parameter.untyped_storage().size() == 0 for _, parameter in giving.model.named_parameters())
    memory.onload()
    assert same(state_of(giving), before)
    update()
    assert same(state_of(giving), state_of(usual))
    assert not same(state_of(giving), before)


def test_offloading_frees_the_fp8_copies_of_weights(tmp_path: Path, groups: ParallelGroups) -> None:
    worker = make_worker(tmp_path, groups, "bfloat16")
    gpt: Any = worker.model.chunks[0].gpt
    layer = gpt.decoder.layers[1].mlp.linear_fc1
    layer._fp8_workspaces = {"weight": torch.zeros(4)}  # as a Transformer Engine module keeps them
    TrainerMemory(worker).offload_all_but_parameters()
    assert layer._fp8_workspaces == {}
