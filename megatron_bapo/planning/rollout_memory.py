"""Memory of one engine on each of its GPUs."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from megatron_bapo.config.architecture import Architecture
from megatron_bapo.config.lora import LoraConfig
from megatron_bapo.config.lora_transfer import engine_rank, sent_adapters
from megatron_bapo.config.schema import Config
from megatron_bapo.planning.delta_net import state_bytes
from megatron_bapo.planning.hardware import GIB, Assumptions, Gpu
from megatron_bapo.planning.known_models import teacher_of
from megatron_bapo.planning.parameters import ChunkShape, Split, count_elements
from megatron_bapo.planning.precision import DTYPE_BYTES, engine_architecture, engine_weight_bytes, key_value_bytes


@dataclass(frozen=True)
class EngineMemory:
    """Bytes on one of an engine's GPUs."""

    weights: int
    workspace: int
    kv_cache: int
    kv_per_token: int
    max_model_len: int
    sharing: int
    """Responses that share the computation and the keys and values of their prompt; 1: there is no prefix cache."""
    state_bytes: int = 0
    """Bytes of the states of one sequence in all Gated DeltaNets."""

    @property
    def total(self) -> int:
        return self.weights + self.workspace + self.kv_cache

    @property
    def kv_tokens(self) -> int:
        return max(0, self.kv_cache) // self.kv_per_token

    @property
    def state_tokens(self) -> float:
        """Tokens whose keys and values need the room that a sequence's states have in the KV cache."""
        return self.state_bytes / self.kv_per_token

    @property
    def holds_longest(self) -> bool:
        """Whether the KV cache has room for the longest prompt and response."""
        return self.kv_tokens >= self.max_model_len + self.state_tokens


def engine_memory(config: Config, architecture: Architecture, gpu: Gpu, assumptions: Assumptions) -> EngineMemory:
    """Return the memory of one engine. Like vLLM, give the KV cache what weights and workspace leave of its share."""
    rollout = config.rollout
    num_stages = rollout.pipeline_parallel_size
    allocated = engine_architecture(config, architecture, gpu)
    own_parameters = engine_parameters(allocated, rollout.tensor_parallel_size, num_stages)
    weights = engine_weight_bytes(config, allocated, own_parameters)
    if (lora := sent_adapters(config, architecture)) is not None:
        num_own = engine_adapter_parameters(architecture, lora, rollout.tensor_parallel_size, num_stages)
        weights += num_own * DTYPE_BYTES[config.model.dtype]
    workspace = int(assumptions.engine_workspace_gib * GIB)
    share = rollout.gpu_memory_utilization * gpu.memory_gib
    kv_cache = int((rollout.kv_cache_gib or share) * GIB) - (0 if rollout.kv_cache_gib else weights + workspace)
    layers, linear = _num_attentions(architecture, num_stages), -(-len(architecture.linear_layers) // num_stages)
    return EngineMemory(
        weights=weights,
        workspace=workspace,
        kv_cache=kv_cache,
        kv_per_token=layers * _cached_width(architecture, rollout.tensor_parallel_size) * key_value_bytes(config),
        max_model_len=config.max_model_len,
        sharing=rollout.n if architecture.shares_prompts else 1,
        state_bytes=linear * state_bytes(architecture, rollout.tensor_parallel_size, DTYPE_BYTES[config.model.dtype]),
    )


def teacher_engine_memory(config: Config, gpu: Gpu, assumptions: Assumptions) -> EngineMemory | None:
    """Return the memory of one of the teacher's engines; None if the configuration has none."""
    served, architecture = config.serving_teacher, teacher_of(config)
    if served is None or architecture is None:
        return None
    return engine_memory(served, architecture, gpu, assumptions)


def _cached_width(architecture: Architecture, tensor_parallel_size: int) -> int:
    """Return the elements that each GPU caches of a token in one layer; latent attention caches all on every GPU."""
    groups = max(1, architecture.num_key_value_heads // tensor_parallel_size)
    return architecture.cached_dim or 2 * groups * architecture.head_dim


@lru_cache
def engine_parameters(architecture: Architecture, tensor_parallel_size: int, num_stages: int = 1) -> int:
    """Return the parameters on one GPU of the fullest pipeline stage.

    Key/value heads are replicated where there are fewer of them than tensor-parallel GPUs.
    """
    split = Split(tensor=tensor_parallel_size, expert_tensor=tensor_parallel_size, pipeline=num_stages)
    num_layers, last = _num_layers(architecture, num_stages), architecture.num_hidden_layers
    first_stage = ChunkShape(range(num_layers), has_embedding=True, has_output=num_stages == 1)
    last_stage = ChunkShape(range(last - num_layers, last), has_embedding=num_stages == 1, has_output=True)
    own = max(count_elements(architecture, split, (stage,)).total for stage in (first_stage, last_stage))
    repeated = max(0.0, 1 - architecture.num_key_value_heads / tensor_parallel_size)
    rows = architecture.hidden_size + architecture.family.qkv_bias
    return own + int(2 * repeated * architecture.head_dim * rows * _num_attentions(architecture, num_stages))


def engine_adapter_parameters(
    architecture: Architecture, lora: LoraConfig, tensor_parallel_size: int, stages: int
) -> int:
    """Return the elements that vLLM allocates for the adapters on one GPU of the fullest pipeline stage.

    vLLM splits the halves of an adapter as Megatron's layers do, and rounds their rank up.
    """
    hashable: Any = lora.model_copy(update={"rank": engine_rank(lora)})
    split = Split(tensor=tensor_parallel_size, pipeline=stages)
    chunk = ChunkShape(range(_num_layers(architecture, stages)), has_embedding=False, has_output=False)
    return count_elements(architecture, split, (chunk,), hashable).trained


def _num_attentions(architecture: Architecture, num_stages: int) -> int:
    """Return the layers of the fullest pipeline stage that have attention."""
    return -(-(architecture.num_hidden_layers - len(architecture.linear_layers)) // num_stages)


def _num_layers(architecture: Architecture, num_stages: int) -> int:
    """Return the layers of the fullest pipeline stage."""
    return -(-architecture.num_hidden_layers // num_stages)
