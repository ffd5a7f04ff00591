"""The trainer on a GPU: Megatron's local layers in bfloat16, and Transformer Engine's layers with the same weights."""

import json
from collections.abc import Callable
from functools import partial
from importlib.metadata import version
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from megatron_bapo.config.architecture import FAMILIES
from megatron_bapo.config.model import ModelConfig
from megatron_bapo.config.schema import ParallelConfig
from megatron_bapo.model.architecture import transformer_config
from megatron_bapo.model.build import freeze_router_biases
from megatron_bapo.model.hf_export import save_hugging_face
from megatron_bapo.model.layer_specs import block_spec
from megatron_bapo.parallel.megatron import GPTModel
from megatron_bapo.trainer.checkpoint import checkpoints, load_checkpoint, save_checkpoint
from megatron_bapo.trainer.checkpoint_writer import CheckpointWriter
from tests.gpu.policies import (
    LEARNING_RATE,
    MODELS,
    cosine,
    exported,
    fused,
    gradients,
    log_probs,
    mean_difference,
    models,
    one_rank,
    policy,
    reference_log_probs,
    train,
)
from tests.parallel.launching import launch
from tests.parallel.tensors import largest_difference, load_folder, same_bits
from tests.tolerances import BF16_LOG_PROB, BF16_MEAN_LOG_PROB, GPU_GRADIENT_COSINE
from tests.unit.model.shards import architecture

ROOT = Path(__file__).parents[2]
RECORD = ROOT / "tests" / "unit" / "model" / "transformer_engine_parameters.json"
Figures = Callable[..., None]
__all__ = ["models"]


def test_transformer_engine_can_be_loaded_with_this_torch(figures: Figures) -> None:
    import transformer_engine.pytorch
    from transformer_engine.pytorch.utils import get_cudnn_version

    major, minor = map(int, version("transformer-engine").split(".")[:2])
    assert (major, minor) >= (2, 19), "older versions need symbols that torch 2.11 and later no longer have"
    capability = torch.cuda.get_device_capability()
    assert transformer_engine.pytorch.is_fp8_available() == (capability >= (8, 9))
    cudnn = get_cudnn_version()
    assert cudnn[0] * 10_000 + cudnn[1] * 100 + cudnn[2] == torch.backends.cudnn.version()
    figures(capability=capability[0] + capability[1] / 10, transformer_engine=f"{major}.{minor}", cudnn=cudnn)


@pytest.mark.parametrize("packing", [True, False], ids=["packed", "padded"])
@pytest.mark.parametrize("name", MODELS)
def test_the_local_layers_in_bfloat16_are_close_to_fp32(
    models: dict[str, Path], figures: Figures, name: str, packing: bool
) -> None:
    found = log_probs(policy(models[name], trainer__packing=packing))
    reference = reference_log_probs(models[name])
    figures(mean=mean_difference(found, reference), largest=abs(found - reference).max())
    assert mean_difference(found, reference) < BF16_MEAN_LOG_PROB
    if name != "experts":  # rounding routes some tokens to other experts
        assert abs(found - reference).max() < BF16_LOG_PROB


@pytest.mark.parametrize("name", MODELS)
def test_gradients_of_the_local_layers_in_bfloat16_match_fp32(
    models: dict[str, Path], figures: Figures, name: str
) -> None:
    found = []
    for dtype in ("bfloat16", "float32"):
        worker = policy(models[name], model__dtype=dtype)
        (loss,) = train(worker, 1)
        found.append((gradients(worker), loss))
    (ours, our_loss), (exact, exact_loss) = found
    figures(cosine=cosine(ours, exact), loss=our_loss - exact_loss)
    assert cosine(ours, exact) > GPU_GRADIENT_COSINE
    assert our_loss == pytest.approx(exact_loss, rel=5e-3)


@pytest.mark.parametrize("impl", ["local", "transformer_engine"])
def test_a_checkpoint_continues_bit_for_bit(models: dict[str, Path], tmp_path: Path, impl: str) -> None:
    worker = policy(models["dense"], model__transformer_impl=impl)
    before = exported(worker)
    train(worker, 2)
    trained = exported(worker)
    assert largest_difference(trained, before) > LEARNING_RATE
    writer = CheckpointWriter(worker, tmp_path)
    writer.save(2, {})
    losses = train(worker, 1)  # while the checkpoint is written
    writer.finish()
    other = policy(models["dense"], model__transformer_impl=impl)
    load_checkpoint(other, checkpoints(tmp_path)[-1])
    assert same_bits(exported(other), trained)
    assert train(other, 1) == pytest.approx(losses, rel=1e-6)


@pytest.mark.parametrize("packing", [True, False], ids=["packed", "padded"])
@pytest.mark.parametrize("name", MODELS)
def test_transformer_engines_layers_match_the_local_layers(
    models: dict[str, Path], figures: Figures, name: str, packing: bool
) -> None:
    local, engine = (make(models[name], trainer__packing=packing) for make in (policy, fused))
    assert same_bits(exported(engine), exported(local))
    ours, theirs = log_probs(engine), log_probs(local)
    losses = train(engine, 1), train(local, 1)
    alike = cosine(gradients(engine), gradients(local))
    figures(mean=mean_difference(ours, theirs), largest=abs(ours - theirs).max(), gradient_cosine=alike)
    assert mean_difference(ours, theirs) < BF16_MEAN_LOG_PROB
    if name != "experts":
        assert abs(ours - theirs).max() < BF16_LOG_PROB
    assert losses[0] == pytest.approx(losses[1], rel=5e-3)
    assert alike > GPU_GRADIENT_COSINE


@pytest.mark.parametrize("cp_comm_type", ["p2p", "all_gather", "a2a"])
def test_two_context_parallel_ranks_match_one(
    models: dict[str, Path], tmp_path: Path, figures: Figures, cp_comm_type: str
) -> None:
    """With a single GPU both ranks are on it."""
    parallel = {"world_size": 2, "context_parallel_size": 2, "cp_comm_type": cp_comm_type}
    case = {"name": cp_comm_type, "model": str(models["dense"]), "parallel": parallel}
    launch("../gpu/context_ranks.py", [case], tmp_path, 2)
    ours = np.load(tmp_path / cp_comm_type / "log_probs.npy")
    one = fused(models["dense"])
    theirs = log_probs(one)
    train(one, 1)
    alike = cosine(load_folder(tmp_path / cp_comm_type), gradients(one))
    figures(mean=mean_difference(ours, theirs), gradient_cosine=alike)
    assert mean_difference(ours, theirs) < BF16_MEAN_LOG_PROB
    assert alike > GPU_GRADIENT_COSINE


@pytest.mark.parametrize(("granularity", "modules"), [("full", ["core_attn"]), ("selective", ["core_attn", "mlp"])])
def test_recompute_changes_no_loss(models: dict[str, Path], granularity: str, modules: list[str]) -> None:
    recomputed = fused(
        models["dense"], parallel__recompute_granularity=granularity, parallel__recompute_modules=modules
    )
    assert train(recomputed, 3) == pytest.approx(train(fused(models["dense"]), 3), rel=1e-3)


def test_a_checkpoint_of_the_local_layers_loads_into_transformer_engines_layers(
    models: dict[str, Path], tmp_path: Path
) -> None:
    local = policy(models["experts"])
    train(local, 1)
    saved = save_checkpoint(local, tmp_path, 1, {}, keep=1)
    engine = fused(models["experts"])
    load_checkpoint(engine, saved)
    assert same_bits(exported(engine), exported(local))
    save_hugging_face(engine.model, one_rank(), models["experts"], tmp_path / "hf")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    assert loaded.dtype == torch.bfloat16


@pytest.mark.parametrize("family", FAMILIES)
def test_the_recorded_parameters_match_the_installed_version(family: str) -> None:
    arch = architecture(family, tie_word_embeddings=False)
    model = ModelConfig(path=Path("model"), dtype="bfloat16", transformer_impl="transformer_engine")
    one_rank()
    config = transformer_config(arch, model, ParallelConfig(), None, on_gpu=True)
    build = partial(GPTModel, position_embedding_type="rope", share_embeddings_and_output_weights=False)
    gpt = build(
        config,
        block_spec(config, arch, range(arch.num_hidden_layers)),
        arch.vocab_size,
        arch.max_position_embeddings,
    )
    freeze_router_biases(gpt)
    found = {name: list(parameter.shape) for name, parameter in gpt.named_parameters()}
    assert found == json.loads(RECORD.read_text())[family]
