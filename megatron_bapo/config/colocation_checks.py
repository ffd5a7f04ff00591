"""Rules of the placement of trainer and engines on GPUs, and of the weight transfer between them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from megatron_bapo.config.fp8 import ComputeCapability, capability_problem
from megatron_bapo.config.schema import Config

ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""Environment variables of torch's allocator; the second is its older name."""
BATCH_INVARIANT_CAPABILITY = (9, 0)
"""Lowest compute capability of vLLM's batch-invariant kernels (vllm/envs.py, vLLM 0.32)."""


def colocation_problems(config: Config) -> Iterator[str]:
    """Yield the broken rules that hold on any machine, one line each."""
    rollout, sync = config.rollout, config.weight_sync
    if not rollout.colocate:
        if rollout.sleep_level:
            yield (
                f"rollout.sleep_level={rollout.sleep_level} frees GPUs for the trainer, but with "
                "rollout.colocate=false engines have GPUs of their own; set sleep_level=0, or colocate=true"
            )
        if config.trainer.offload:
            yield (
                "trainer.offload=true frees GPUs for the engines, but with rollout.colocate=false engines have GPUs of "
                "their own; set offload=false, or colocate=true"
            )
        if sync.transport == "cuda_ipc":
            yield (
                "weight_sync.transport=cuda_ipc reads the trainer's GPU memory, but with rollout.colocate=false "
                "engines see only their own GPUs; set transport=nccl or store, or colocate=true"
            )
    elif sync.transport == "nccl":
        yield (
            "weight_sync.transport=nccl with rollout.colocate=true: NCCL does not allow two ranks on one GPU; set "
            "transport=cuda_ipc or store, or colocate=false"
        )
    if sync.transport != "store" and sync.engine_store == "own":
        yield (
            f"weight_sync.engine_store=own with transport={sync.transport}: only transport=store uses a store; set "
            "engine_store=shared, or transport=store"
        )
    if sync.transport == "cuda_ipc" and rollout.nodes_per_engine > 1:
        yield (
            f"rollout.nodes_per_engine={rollout.nodes_per_engine} with weight_sync.transport={sync.transport}, which "
            "works only on one machine; set transport=store, or nodes_per_engine=1"
        )


def host_problems(config: Config, num_hosts: int) -> Iterator[str]:
    """Yield the rules that are broken on `num_hosts` hosts."""
    if config.weight_sync.transport == "cuda_ipc" and num_hosts > 1:
        yield (
            "weight_sync.transport=cuda_ipc works only on one machine; set transport=store, which copies weights "
            "between hosts"
        )
    if config.rollout.nodes_per_engine > num_hosts:
        yield (
            f"rollout.nodes_per_engine={config.rollout.nodes_per_engine} places each engine on as many nodes, but the "
            f"run has {num_hosts}; lower it, or start the run on a cluster with --num-nodes"
        )


def device_problems(config: Config, num_gpus: int, *, engines: bool = True) -> Iterator[str]:
    """Yield the rules that are broken on a machine with `num_gpus` GPUs; `engines` says whether engines are started."""
    if num_gpus == 0:
        yield from _cpu_engine_problems(config) if engines else ()
        return
    rollout = config.rollout
    num_trainer, num_engine = config.parallel.world_size, config.num_engine_ranks if engines else 0
    num_teacher = config.num_teacher_ranks if engines else 0
    required = rollout.num_gpus(num_trainer, num_engine) + num_teacher
    if required > num_gpus:
        teacher = f", with {num_teacher} for the teacher (algorithm.distillation.engines)" if num_teacher else ""
        yield (
            f"{num_trainer} trainer ranks (parallel.world_size) and {num_engine} engine ranks (rollout.num_engines x "
            f"tensor_parallel_size x pipeline_parallel_size) need {required} GPUs with rollout.colocate="
            f"{str(rollout.colocate).lower()}{teacher}, but this machine has {num_gpus}; lower one of them, or set "
            "colocate=true"
        )


def _cpu_engine_problems(config: Config) -> Iterator[str]:
    """Yield the rules that a run with engines breaks on a machine without a GPU."""
    rollout, sync = config.rollout, config.weight_sync
    if rollout.sleep_level:
        yield (
            f"rollout.sleep_level={rollout.sleep_level} on a machine without a GPU: vLLM's CPU build frees no "
            "memory when it sleeps; set sleep_level=0, or start the run where there are GPUs (megatron-bapo submit)"
        )
    if sync.transport == "cuda_ipc":
        yield ("weight_sync.transport=cuda_ipc on a machine without a GPU: it shares GPU memory; set transport=store")
    if rollout.quantization is not None:
        yield (
            f"rollout.quantization={rollout.quantization} on a machine without a GPU: vLLM supports it only on "
            "GPUs; remove it"
        )
    if rollout.batch_invariant:
        yield "rollout.batch_invariant=true on a machine without a GPU, which has no such kernels; remove it"
    if not rollout.enforce_eager:
        yield (
            "rollout.enforce_eager=false on a machine without a GPU: CUDA graphs need one; set enforce_eager=true, or "
            "start the run where there are GPUs (megatron-bapo submit)"
        )
    if config.logging.memory_snapshot_step is not None:
        yield (
            f"logging.memory_snapshot_step={config.logging.memory_snapshot_step} on a machine without a GPU: it "
            "records GPU memory; remove it"
        )
    if rollout.kv_cache_dtype != "auto":
        yield (
            f"rollout.kv_cache_dtype={rollout.kv_cache_dtype} on a machine without a GPU: vLLM supports an FP8 KV "
            "cache only on GPUs; set kv_cache_dtype=auto"
        )
    sections = {"rollout": rollout, "algorithm.distillation.engines": config.algorithm.teacher_engines}
    for section, engines in sections.items():
        if engines is not None and engines.enable_expert_parallel:
            yield (
                f"{section}.enable_expert_parallel=true on a machine without a GPU: vLLM's kernels of experts for CPUs "
                "need all experts on each rank; remove it"
            )


def allocator_problems(config: Config, environment: Mapping[str, str]) -> Iterator[str]:
    """Yield what the weight transfer does not allow of the environment variables of torch's allocator."""
    for name in ALLOCATOR_VARIABLES:
        value = environment.get(name, "")
        if config.weight_sync.transport == "cuda_ipc" and "expandable_segments:true" in value.replace(" ", "").lower():
            yield (
                f"{name}={value} with weight_sync.transport=cuda_ipc: other processes cannot open memory of expandable "
                "segments; remove expandable_segments, or set transport=store"
            )


def layer_problems(config: Config, capability: ComputeCapability | None, has_transformer_engine: bool) -> Iterator[str]:
    """Yield what layers and kernels require and a machine lacks.

    `capability` is the compute capability of its GPUs, None without any.
    """
    if config.rollout.batch_invariant and capability is not None and capability < BATCH_INVARIANT_CAPABILITY:
        needed, found = (".".join(map(str, version)) for version in (BATCH_INVARIANT_CAPABILITY, capability))
        yield (
            f"rollout.batch_invariant=true needs GPUs of compute capability {needed} or higher, these have {found}; "
            "remove it"
        )
    if config.weight_sync.lora == "adapters" and config.model.dtype == "float32" and capability is not None:
        yield (
            "weight_sync.lora=adapters with model.dtype=float32 on GPUs, where vLLM's kernels for adapters need "
            "bfloat16; set model.dtype=bfloat16, or weight_sync.lora=merged"
        )
    if config.model.transformer_impl != "transformer_engine":
        return
    if capability is None:
        yield (
            "model.transformer_impl=transformer_engine on a machine without a GPU: Transformer Engine has only GPU "
            "kernels; set transformer_impl=local, and remove the section fp8"
        )
    elif not has_transformer_engine:
        yield (
            "model.transformer_impl=transformer_engine needs the package transformer_engine, which is not installed; "
            "install the GPU lock (requirements.txt, `make setup`), or set transformer_impl=local"
        )
    elif config.fp8 is not None and (problem := capability_problem(config.fp8.recipe, capability)):
        yield problem
