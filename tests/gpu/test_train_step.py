"""A trainer update on a GPU: its utilization, and offloading of the state to host memory and back."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import Qwen2Config

from bench import gpu_train_step
from bench.gpu import matrix_flops
from megatron_bapo.parallel.groups import ParallelGroups
from megatron_bapo.parallel.platform import free_memory_bytes, memory_snapshot, release_cached_memory
from megatron_bapo.planning.known_models import FOLDER
from megatron_bapo.trainer.fused_paths import fused_paths
from megatron_bapo.trainer.offload import TrainerMemory
from megatron_bapo.trainer.policy_update import update_policy
from megatron_bapo.trainer.worker import Worker, create_worker

Figures = Callable[..., None]
MAX_TOKENS, VOCAB_SIZE = 2048, 8192


@pytest.fixture
def worker(tmp_path: Path, groups: ParallelGroups) -> Worker:
    """Return a worker with a small, randomly initialized model in bfloat16."""
    Qwen2Config(
        vocab_size=VOCAB_SIZE, hidden_size=512, intermediate_size=1024, num_hidden_layers=4, num_attention_heads=8,
        num_key_value_heads=2, max_position_embeddings=4096, tie_word_embeddings=True,
    ).save_pretrained(tmp_path)  # fmt: skip
    config = gpu_train_step.make_config(tmp_path, MAX_TOKENS, 4, {})
    return create_worker(config, tmp_path, groups, load=False)


def state_of(worker: Worker) -> list[torch.Tensor]:
    """Return copies of parameters and optimizer states in host memory."""
    parameters = (parameter for _, parameter in worker.model.named_parameters())
    return [tensor.detach().cpu().clone() for tensor in (*parameters, *worker.optimizer.states())]


def test_an_update_uses_the_installed_fused_kernels(worker: Worker, figures: Figures) -> None:
    paths = fused_paths(worker.model, worker.optimizer, fused_kernels=worker.fused_kernels)
    figures(**{name.replace(" ", "_").replace(",", ""): path for name, path in paths.items()})
    assert paths["log-probs, entropy and loss"] == "Triton"


def test_offloading_and_loading_changes_no_bit_and_the_next_update_runs(worker: Worker, figures: Figures) -> None:
    examples = gpu_train_step.make_batch(MAX_TOKENS, 1, VOCAB_SIZE)
    update_policy(worker, examples, lr=1e-4, on_policy=True)
    memory, before = TrainerMemory(worker), state_of(worker)
    release_cached_memory()
    held = torch.cuda.memory_allocated()
    memory.offload()
    freed = held - torch.cuda.memory_allocated()
    memory.onload()
    assert all(torch.equal(*pair) for pair in zip(before, state_of(worker), strict=True))
    metrics = update_policy(worker, examples, lr=1e-4, on_policy=True)
    assert not all(torch.equal(*pair) for pair in zip(before, state_of(worker), strict=True))
    figures(freed_of_held=freed / held, grad_norm=metrics["actor/grad_norm_max"].value)
    assert freed > 0.9 * sum(tensor.nbytes for tensor in before)


def test_a_memory_snapshot_is_written(worker: Worker, tmp_path: Path, figures: Figures) -> None:
    file = tmp_path / "memory" / "rank-0.pickle"
    with memory_snapshot(file):
        update_policy(worker, gpu_train_step.make_batch(MAX_TOKENS, 1, VOCAB_SIZE), lr=1e-4, on_policy=True)
    figures(snapshot_mib=file.stat().st_size / 2**20)
    assert file.stat().st_size > 1 << 16


@pytest.mark.parametrize("layers", ["local bf16", "TE bf16", "TE FP8"])
@pytest.mark.parametrize("model", gpu_train_step.MODELS)
def test_the_utilization_of_a_train_step(model: str, layers: str, groups: ParallelGroups, figures: Figures) -> None:
    settings = gpu_train_step.layers().get(layers)
    if settings is None:
        pytest.skip(f"{layers}: Transformer Engine is not installed, or the GPU has no FP8")
    ceiling = matrix_flops()
    max_tokens = gpu_train_step.fitting_tokens(FOLDER / model, 8192, free_memory_bytes())
    found = gpu_train_step.measure(
        FOLDER / model, groups, settings, max_tokens=max_tokens, step_tokens=16384, dtype="bfloat16"
    )
    figures(
        micro_batch=max_tokens,
        tokens_per_s=found.tokens_per_s,
        of_ceiling=found.flops / ceiling,
        ceiling_tflops=ceiling / 1e12,
        peak_gib=found.peak_bytes / 2**30,
    )
    assert found.flops > 0.3 * ceiling
