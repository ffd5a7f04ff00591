from pathlib import Path

import pytest
import torch
from transformers import Qwen3Config, Qwen3MoeConfig

from bench import gpu_train_step
from megatron_bapo.parallel.groups import ParallelGroups
from megatron_bapo.trainer.micro_batches import MicroBatch
from megatron_bapo.trainer.schedule import run_micro_batches
from megatron_bapo.trainer.worker import create_worker
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


@pytest.mark.parametrize("num_experts", [0, 4])
def test_the_compiled_swiglu_of_gpus_has_the_outputs_and_gradients_of_the_usual_one(
    num_experts: int, tmp_path: Path, groups: ParallelGroups
) -> None:
    experts = {"num_experts": num_experts, "num_experts_per_tok": 2, "moe_intermediate_size": 16} if num_experts else {}
    (Qwen3MoeConfig if num_experts else Qwen3Config)(
        vocab_size=96, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=16, max_position_embeddings=128, **experts,
    ).save_pretrained(tmp_path)  # fmt: skip
    config = gpu_train_step.make_config(tmp_path, 64, 4, {}, dtype="float32")
    worker = create_worker(config, tmp_path, groups, load=False)
    micro_batches = worker.micro_batches(gpu_train_step.make_batch(64, 1, vocab_size=96))

    def head(_: MicroBatch, hidden_TH: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return hidden_TH.square().sum(), hidden_TH.detach()

    def outputs_and_gradients() -> list[torch.Tensor]:
        worker.optimizer.zero_grad()
        hidden = run_micro_batches(worker.model, micro_batches, head, forward_only=False)
        return [*hidden, *(parameter.main_grad.clone() for _, parameter in worker.model.named_parameters())]

    assert not worker.model.config.bias_activation_fusion
    usual = outputs_and_gradients()
    worker.model.config.bias_activation_fusion = True
    for ours, theirs in zip(outputs_and_gradients(), usual, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
