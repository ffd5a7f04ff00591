"""vLLM's CUDA build without a device: what it makes of every recipe's engine, and its sampler's log-probs."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from vllm.config import CompilationMode, CUDAGraphMode, VllmConfig

from megatron_bapo.config.loading import load_config
from megatron_bapo.config.schema import Config
from megatron_bapo.planning.known_models import FOLDER
from megatron_bapo.rollout.engine_spec import EngineSpec
from megatron_bapo.rollout.engine_worker import BACKEND
from tests.unit.model.test_vocab_parallel import ALONE

RECIPES = sorted((Path(__file__).parents[2] / "configs" / "recipes").glob("*.yaml"))


def engine_config(config: Config, folder: Path) -> VllmConfig:
    """Return vLLM's configuration of the engine that a run of this configuration starts."""
    from megatron_bapo.rollout.engine_args import engine_args

    assert config.model.path is not None
    fields = json.loads((FOLDER / config.model.path.name / "config.json").read_text())
    fields["architectures"] = [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[fields["model_type"]]]
    (folder / "config.json").write_text(json.dumps(fields))
    spec = replace(EngineSpec.of(config), model_path=folder)
    endpoint = "10.0.0.1:20000" if config.rollout.nodes_per_engine > 1 else ""
    return engine_args(spec, endpoint=endpoint).create_engine_config()


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_vllm_accepts_every_recipes_engine_and_means_the_same(recipe: Path, tmp_path: Path) -> None:
    config = load_config(recipe)
    found, rollout = engine_config(config, tmp_path), config.rollout
    assert found.model_config.dtype == getattr(torch, config.model.dtype)
    assert found.model_config.max_model_len == config.max_model_len
    assert found.model_config.logprobs_mode == "processed_logprobs"
    assert found.model_config.enforce_eager == rollout.enforce_eager
    assert found.compilation_config.mode == CompilationMode.NONE
    graphs = CUDAGraphMode.NONE if rollout.enforce_eager else CUDAGraphMode.FULL_DECODE_ONLY
    assert found.compilation_config.cudagraph_mode == graphs
    assert found.model_config.quantization == rollout.quantization
    assert found.model_config.enable_sleep_mode == (rollout.sleep_level > 0)
    assert not found.model_config.trust_remote_code
    assert found.parallel_config.tensor_parallel_size == rollout.tensor_parallel_size
    assert found.parallel_config.pipeline_parallel_size == rollout.pipeline_parallel_size
    assert found.parallel_config.enable_expert_parallel == rollout.enable_expert_parallel
    assert found.parallel_config.worker_extension_cls == "megatron_bapo.rollout.engine_worker.WeightLoader"
    assert found.scheduler_config.max_num_seqs == rollout.max_num_seqs
    assert found.cache_config.gpu_memory_utilization == rollout.gpu_memory_utilization
    assert found.cache_config.cache_dtype == rollout.kv_cache_dtype
    assert found.cache_config.enable_prefix_caching
    assert found.weight_transfer_config is not None
    assert found.weight_transfer_config.backend == BACKEND
    assert found.device_config.device_type == "cuda"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_the_samplers_log_probs_are_the_trainers(dtype: torch.dtype, temperature: float) -> None:
    """vLLM's kernels for GPUs divide by the temperature, sample, and take the sampled tokens' log-probs."""
    from vllm.v1.worker.gpu.sample.gumbel import apply_temperature, gumbel_sample
    from vllm.v1.worker.gpu.sample.logprob import compute_token_logprobs

    from megatron_bapo.model.vocab_parallel import OutputLayer, log_probs_and_entropy

    num_tokens, width, vocab_size = 5, 16, 3000
    generator = torch.Generator().manual_seed(0)
    hidden_TH = torch.randn(num_tokens, width, generator=generator).to(dtype)
    weight_VH = torch.randn(vocab_size, width, generator=generator).to(dtype)
    logits = (hidden_TH @ weight_VH.T).float()
    rows, temperatures = torch.arange(num_tokens, dtype=torch.int32), torch.full((num_tokens,), temperature)
    apply_temperature(logits, rows, temperatures)
    seeds, positions = torch.arange(num_tokens), torch.full((num_tokens,), 7)
    sampled = gumbel_sample(logits, rows, temperatures, seeds, positions, apply_temperature=False, is_drafting=False)
    assert len(set(sampled.tolist())) > 1
    found = compute_token_logprobs(logits, sampled[:, None])[:, 0]
    layer = OutputLayer(weight_VH, vocab_size, ALONE, chunk_size=2)
    ours, _ = log_probs_and_entropy(hidden_TH, layer, sampled.long(), temperature=temperature)
    torch.testing.assert_close(found, ours, rtol=0, atol=1e-5 if dtype == torch.float32 else 2e-2)
