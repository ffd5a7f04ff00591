"""Arguments of vLLM's engine for a specification. Supports vLLM 0.32 on GPUs and CPUs."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

from vllm import AsyncEngineArgs
from vllm.config import CompilationMode, CUDAGraphMode, WeightTransferConfig
from vllm.platforms import current_platform

from megatron_bapo.config.architecture import Architecture, read_architecture
from megatron_bapo.config.linear_attention_checks import cpu_engine_problems
from megatron_bapo.errors import UserError
from megatron_bapo.rollout.engine_adapters import adapter_arguments
from megatron_bapo.rollout.engine_spec import EngineSpec
from megatron_bapo.rollout.engine_worker import BACKEND

DECODE_GRAPHS = {"mode": CompilationMode.NONE, "cudagraph_mode": CUDAGraphMode.FULL_DECODE_ONLY}
"""Records decoding steps with the kernels of eager engines. Those that vLLM's default lets torch.compile generate widen
the mismatch with the trainer, until runs collapsed (NVIDIA-NeMo/RL#998), and are not faster (NVIDIA-NeMo/RL#1014)."""


def engine_args(spec: EngineSpec, node: int = 0, endpoint: str = "") -> AsyncEngineArgs:
    """Return the arguments of one node's part of an engine; `endpoint` is HOST:PORT of the first of several.

    Raises UserError for a model that vLLM has no kernels for on this platform.
    """
    settings, only_scores = spec.settings, spec.scoring_temperature is not None
    architecture = read_architecture(spec.model_path)
    options: dict[str, Any] = {
        "enable_return_routed_experts": spec.return_routes,
        "return_sampling_mask": spec.return_kept_tokens,
    }
    if current_platform.is_cpu():
        _check_cpu_kernels(spec, architecture)
        options = _cpu_options(spec, architecture)
    if settings.nodes_per_engine > 1:
        host, _, port = endpoint.rpartition(":")
        options |= {"distributed_executor_backend": "mp", "nnodes": settings.nodes_per_engine, "node_rank": node}
        options |= {"master_addr": host, "master_port": int(port)}
    if spec.adapters is not None:
        options |= adapter_arguments(spec.adapters)
    if not settings.enforce_eager:
        options["compilation_config"] = options.get("compilation_config", {}) | DECODE_GRAPHS
    if architecture.linear_layers:
        # As the trainer computes it; otherwise vLLM rounds the state after every token to the model's dtype.
        options["mamba_ssm_cache_dtype"] = "float32"
    if settings.kv_cache_gib is not None:
        options["kv_cache_memory_bytes"] = int(settings.kv_cache_gib * 2**30)
    return AsyncEngineArgs(
        model=str(spec.model_path),
        # Mistral publishes models in two formats in one folder; vLLM prefers the one that the trainer does not read.
        config_format="hf",
        load_format="hf",
        tokenizer_mode="hf",
        dtype=spec.dtype,  # pyright: ignore[reportArgumentType]
        max_model_len=spec.max_model_len,
        seed=spec.seed,
        tensor_parallel_size=settings.tensor_parallel_size,
        pipeline_parallel_size=settings.pipeline_parallel_size,
        enable_expert_parallel=settings.enable_expert_parallel,
        max_num_seqs=settings.max_num_seqs,
        gpu_memory_utilization=settings.gpu_memory_utilization,
        enforce_eager=settings.enforce_eager,
        enable_prefix_caching=architecture.shares_prompts,
        # Log-probs of the distribution that was sampled from, at the sampling temperature.
        logprobs_mode="processed_logprobs",
        worker_extension_cls="megatron_bapo.rollout.engine_worker.WeightLoader",
        weight_transfer_config=WeightTransferConfig(backend=BACKEND),
        enable_sleep_mode=settings.sleep_level > 0,
        quantization=settings.quantization,
        kv_cache_dtype=settings.kv_cache_dtype,
        # vLLM refuses lengths above this field, and Qwen's YaRN recipe leaves it at the unscaled length. An engine that
        # scores responses has one position more, at which nothing is computed.
        hf_overrides={"max_position_embeddings": architecture.context_length + only_scores},
        trust_remote_code=False,
        disable_log_stats=True,
        **options,
    )


def _check_cpu_kernels(spec: EngineSpec, architecture: Architecture) -> None:
    if not architecture.linear_layers:
        return
    where, torchvision = str(spec.model_path / "config.json"), find_spec("torchvision") is not None
    if problems := list(cpu_engine_problems(architecture, spec.dtype, where, torchvision=torchvision)):
        raise UserError("\n".join(problems))


def _cpu_options(spec: EngineSpec, architecture: Architecture) -> dict[str, Any]:
    options: dict[str, Any] = {
        "kv_cache_memory_bytes": 1 << 29,
        # A quarter of vLLM's default: a group shares only the full blocks of its prompt.
        "block_size": 32,
        # vLLM 0.32.0 fails with "CPU Generator does not use offset" when it splits the prompt of a seeded request
        # (_bookkeeping_sync in vllm/v1/worker/gpu_model_runner.py). Remove once it rewinds CPU generators, too.
        "enable_chunked_prefill": False,
        # Not vLLM returns routes, but `route_recorder.py`, and the tokens that sampling has kept are those with a
        # log-prob, of which a response may have any number.
        "max_logprobs": -1,
    }
    if architecture.kv_lora_rank:
        # vLLM 0.32.0's RoPE kernel for CPUs rotates queries by wrong angles if they are [T, H, D] with several heads.
        options["compilation_config"] = {"custom_ops": ["-rotary_embedding"]}
    if architecture.kv_lora_rank and spec.dtype == "float32":
        # vLLM 0.32.0 prefers AMX where a CPU has it, but its kernel knows only bfloat16 (amx_mla.py).
        options["attention_backend"] = "CPU_MLA"
    return options
