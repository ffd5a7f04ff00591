"""GPU memory, host memory and step time of a configuration, and whether it fits."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from megatron_bapo.config.architecture import Architecture
from megatron_bapo.config.colocation_checks import host_problems, layer_problems
from megatron_bapo.config.schema import Config
from megatron_bapo.errors import UserError
from megatron_bapo.planning.concurrency import concurrency
from megatron_bapo.planning.hardware import GIB, GPUS, Assumptions, Gpu, GpuName
from megatron_bapo.planning.host_memory import HostMemory, RecordedRoutes, recorded_routes
from megatron_bapo.planning.model_state import FP32, NUM_MOMENTS, moment_bytes
from megatron_bapo.planning.placement import nodes_needed
from megatron_bapo.planning.rollout_memory import EngineMemory, engine_memory, teacher_engine_memory
from megatron_bapo.planning.settings import Placement
from megatron_bapo.planning.timing import StepTime, step_time
from megatron_bapo.planning.trainer_memory import StageMemory, stage_memory
from megatron_bapo.planning.training_time import TrainingTime, training_time
from megatron_bapo.planning.weight_transfer import loading_bytes, sync_bytes

ENGINE_FP8_CAPABILITY = (8, 9)
"""Lowest compute capability at which vLLM multiplies in FP8."""
STORED_VERSIONS = 2
"""Policy versions in the weight store while a new one is published."""

CUDA_CONTEXT_GIB = 0.5
"""Assumed GPU memory of one process's CUDA context."""


@dataclass(frozen=True)
class Plan:
    """Memory and time estimate of a configuration on one type of GPU."""

    config: Config
    architecture: Architecture
    gpu_name: GpuName
    assumptions: Assumptions
    separate_gpu_name: GpuName | None = None
    """GPU of separate engines if it is not the trainer's."""

    @property
    def placement(self) -> Placement:
        return "colocated" if self.config.rollout.colocate else "separate"

    @property
    def gpu(self) -> Gpu:
        return GPUS[self.gpu_name]

    @property
    def engine_gpu_name(self) -> GpuName:
        separate = self.separate_gpu_name if self.placement == "separate" else None
        return separate or self.gpu_name

    @property
    def engine_gpu(self) -> Gpu:
        return GPUS[self.engine_gpu_name]

    @property
    def gpu_bytes(self) -> int:
        return int(self.gpu.memory_gib * GIB)

    @property
    def engine_gpu_bytes(self) -> int:
        return int(self.engine_gpu.memory_gib * GIB)

    @property
    def num_engine_gpus(self) -> int:
        return self.config.num_engine_ranks

    @property
    def num_gpus(self) -> int:
        trainer, engines = self.config.parallel.world_size, self.num_engine_gpus
        return self.config.rollout.num_gpus(trainer, engines) + self.config.num_teacher_ranks

    @cached_property
    def _nodes(self) -> tuple[int, str | None]:
        """Nodes that the launcher needs; if no number suffices, those whose GPUs the run would fill, and the reason."""
        per_node, per_engine_node = self.assumptions.gpus_per_node, self.assumptions.engine_gpus_per_node
        try:
            return nodes_needed(self.config, per_node, per_engine_node, first=self.num_filled_nodes), None
        except UserError as error:
            return self.num_filled_nodes, str(error)

    @property
    def num_nodes(self) -> int:
        return self._nodes[0]

    @property
    def num_filled_nodes(self) -> int:
        """Nodes that have as many GPUs as the run."""
        world, assumptions = self.config.parallel.world_size, self.assumptions
        if assumptions.engine_gpus_per_node is None:
            return -(-self.num_gpus // assumptions.gpus_per_node)
        return -(-world // assumptions.gpus_per_node) - (world - self.num_gpus) // assumptions.engine_gpus_per_node

    @property
    def gpus(self) -> str:
        """The numbers and types of all GPUs, such as "16 H100 and 4 L40S"."""
        trainer = self.config.parallel.world_size
        if self.engine_gpu_name == self.gpu_name:
            return f"{self.num_gpus} {self.gpu_name}"
        return f"{trainer} {self.gpu_name} and {self.num_gpus - trainer} {self.engine_gpu_name}"

    @cached_property
    def stages(self) -> list[StageMemory]:
        return stage_memory(self.config, self.architecture, self.assumptions)

    @cached_property
    def engine(self) -> EngineMemory:
        return engine_memory(self.config, self.architecture, self.engine_gpu, self.assumptions)

    @cached_property
    def concurrency(self) -> float:
        return concurrency(self.config, self.engine, self.assumptions)

    @cached_property
    def teacher_engine(self) -> EngineMemory | None:
        """The memory of one of the teacher's engines, if it has any."""
        return teacher_engine_memory(self.config, self.engine_gpu, self.assumptions)

    @cached_property
    def training(self) -> TrainingTime:
        return training_time(self.config, self.architecture, self.gpu, self.assumptions)

    @cached_property
    def time(self) -> StepTime:
        return step_time(
            self.config,
            self.architecture,
            self.gpu,
            self.engine_gpu,
            self.assumptions,
            self.engine,
            self.training,
            [stage.state for stage in self.stages],
        )

    def while_training(self, stage: StageMemory) -> int:
        """Return the peak bytes on one of a stage's GPUs during training."""
        if self.placement == "separate":
            return stage.peak
        sleeps = self.config.rollout.sleep_level > 0
        return stage.peak + self._engine_base + (0 if sleeps else self.engine.total)

    @property
    def _engine_base(self) -> int:
        """Bytes that engines hold on a GPU awake and asleep, outside their `gpu_memory_utilization`.

        With CUDA IPC the other engine ranks of the host open this GPU's parameters, each with a CUDA context.
        """
        readers = min(self.num_engine_gpus, self.assumptions.gpus_per_node) - 1
        contexts = readers * CUDA_CONTEXT_GIB * (self.config.weight_sync.transport == "cuda_ipc")
        return int((self.assumptions.sleeping_engine_gib + contexts) * GIB)

    @property
    def offloads_for_generation(self) -> bool:
        """True if the trainer offloads its state so that the engines can use the GPU memory during generation."""
        return self.config.trainer.offload and self.placement == "colocated"

    def while_generating(self, stage: StageMemory) -> int:
        """Return the peak bytes on one of a stage's GPUs during generation and the weight update."""
        reserved = int(self.assumptions.reserved_gib * GIB)
        if self.placement == "separate":
            return stage.resident + reserved
        generating = self.engine.total + (0 if self.offloads_for_generation else stage.resident)
        loading = self._kept_for_loading(stage) + self.engine_while_loading
        return max(generating, loading) + self._engine_base + reserved

    def _kept_for_loading(self, stage: StageMemory) -> int:
        """Return the bytes of the trainer on one of a stage's GPUs during the weight update.

        An offloaded trainer has only weights there (trainer/offload.py), with which its probe scores a sequence; in
        FP8 it makes their copies again.
        """
        if not self.offloads_for_generation:
            return stage.resident
        return stage.state.parameters + stage.state.quantised + stage.state.frozen

    @cached_property
    def loading_bytes(self) -> int:
        """Bytes of a layer's tensors on each of an engine's GPUs while it loads new weights."""
        if self.assumptions.broadcasts_weights:
            return 0
        return loading_bytes(self.config, self.architecture, self.engine_gpu)

    @property
    def engine_while_loading(self) -> int:
        """Bytes of an engine on one of its GPUs while it loads new weights.

        An engine that has slept has only weights by then; others have a KV cache, and a workspace that is not in use.
        """
        engine, loading = self.engine, self.loading_bytes
        if self.placement == "colocated" and self.config.rollout.sleep_level > 0:
            return engine.weights + loading
        return engine.weights + engine.kv_cache + max(engine.workspace, loading)

    @property
    def worst_stage(self) -> StageMemory:
        return max(self.stages, key=self.while_training)

    @property
    def fullest_resident_stage(self) -> StageMemory:
        return max(self.stages, key=lambda stage: stage.resident)

    def offloaded(self, stage: StageMemory) -> int:
        """Return the bytes of one of a stage's ranks in host memory."""
        return stage.state.offloaded + (stage.state.kept_offloaded if self.offloads_for_generation else 0)

    def checkpoint_copy(self, stage: StageMemory) -> int:
        """Return the bytes of host memory in which one of a stage's ranks keeps the state that is being written.

        It is allocated from the start to the end of a run (trainer/snapshot.py).
        """
        moments = NUM_MOMENTS * moment_bytes(self.config, self.assumptions)
        return stage.state.updated * (FP32 + moments) if self.config.checkpoint.async_save else 0

    @property
    def hosts(self) -> list[HostMemory]:
        """The host memory of the trainer's nodes, and that of nodes with separate engines only."""
        is_colocated = self.placement == "colocated"
        trainers = min(self.config.parallel.world_size, self.assumptions.gpus_per_node)
        workers = min(self.num_engine_gpus, self.assumptions.of_engine_nodes.gpus_per_node)
        state = {
            "offloaded state": trainers * max(self.offloaded(stage) for stage in self.stages),
            "checkpoint copies": trainers * max(self.checkpoint_copy(stage) for stage in self.stages),
            # At sleep level 2 the weights are in host memory only briefly.
            "sleeping weights": workers * self.engine.weights * (is_colocated and self.config.rollout.sleep_level > 0),
        }
        shared = state | self._process_parts(trainers, workers if is_colocated else 0)
        shared["recorded routes"] += self.routes.service
        nodes = [HostMemory("a node", shared, self.assumptions.host_memory_gib)]
        if not is_colocated:
            gib_of_engines = self.assumptions.of_engine_nodes.host_memory_gib
            nodes.append(HostMemory("a node of the engines", self._process_parts(0, workers), gib_of_engines))
        return nodes

    def _process_parts(self, trainers: int, workers: int) -> dict[str, int]:
        """Return the parts of a node's host memory that trainer ranks and engine ranks on it have."""
        num_engines = -(-workers // self.config.rollout.ranks_per_engine)
        return {
            "weight store": self.store_bytes,
            "processes": int((trainers + workers) * self.assumptions.process_gib * GIB),
            "recorded routes": trainers * self.routes.rank + num_engines * self.routes.engine,
        }

    @property
    def host_bytes(self) -> int:
        """Host memory in bytes of the trainer's node with the most processes."""
        return self.hosts[0].num_bytes

    @cached_property
    def routes(self) -> RecordedRoutes:
        return recorded_routes(self.config, self.architecture, self.assumptions, self.engine)

    @property
    def store_bytes(self) -> int:
        """Bytes of a node's weight store; 0 for the other transports, which stage nothing."""
        versions = STORED_VERSIONS if self.config.weight_sync.transport == "store" else 0
        return versions * sync_bytes(self.config, self.architecture)

    @cached_property
    def problems(self) -> list[str]:
        """Reasons why the configuration does not fit, one line each; empty if it fits."""
        found = [*self._hardware_problems(), *self.problems_of_gpus, *self._host_problems()]
        _, unplaced = self._nodes
        return found or ([] if unplaced is None else [unplaced])

    @property
    def problems_of_gpus(self) -> list[str]:
        """Reasons why the GPUs do not suffice."""
        return [*self._trainer_problems(), *self._engine_problems()]

    def _hardware_problems(self) -> Iterator[str]:
        per_node, world = self.assumptions.gpus_per_node, self.config.parallel.world_size
        if world % (num_nodes := -(-world // per_node)):
            yield (
                f"parallel.world_size={world} trainer ranks do not spread evenly over {num_nodes} nodes of {per_node} "
                f"GPUs; take a multiple of {per_node}"
            )
        for problem in layer_problems(self.config, self.gpu.capability, has_transformer_engine=True):
            yield f"{self.gpu_name}: {problem}"
        if self.config.rollout.quantization is not None and self.engine_gpu.capability < ENGINE_FP8_CAPABILITY:
            yield (
                f"rollout.quantization={self.config.rollout.quantization}: an {self.engine_gpu_name} has no FP8 "
                "matrix products; remove the key"
            )

    def _trainer_problems(self) -> Iterator[str]:
        worst = self.worst_stage
        if (needed := self.while_training(worst)) > self.gpu_bytes:
            yield (
                f"{self._place(worst)} needs {gib(needed)} while it trains; an {self.gpu_name} has "
                f"{gib(self.gpu_bytes)}"
            )
        fullest = self.fullest_resident_stage
        if self.placement == "colocated" and (needed := self.while_generating(fullest)) > self.gpu_bytes:
            engine, kept = self.engine.total, 0 if self.offloads_for_generation else fullest.resident
            why = f" ({self._cache_setting})"
            if self._kept_for_loading(fullest) + self.engine_while_loading > kept + engine:
                engine, kept = self.engine_while_loading, self._kept_for_loading(fullest)
                why = " to load new weights"
            yield (
                f"{self._place(fullest)} {f'keeps {gib(kept)}' if kept else 'is offloaded'} while the engine on its "
                f"GPU takes {gib(engine)}{why}: together {gib(needed)} of {gib(self.gpu_bytes)}"
            )

    @property
    def _cache_setting(self) -> str:
        """The key that decides how much of a GPU an engine takes, and its value."""
        rollout = self.config.rollout
        if rollout.kv_cache_gib is not None:
            return f"rollout.kv_cache_gib={rollout.kv_cache_gib:g}"
        return f"rollout.gpu_memory_utilization={rollout.gpu_memory_utilization}"

    def _place(self, stage: StageMemory) -> str:
        parallel = self.config.parallel
        num_ranks = parallel.world_size // parallel.pipeline_model_parallel_size
        first = stage.stage * num_ranks
        return f"pipeline stage {stage.stage} (ranks {first} to {first + num_ranks - 1})"

    def _engine_problems(self) -> Iterator[str]:
        rollout, world = self.config.rollout, self.config.parallel.world_size
        per_node = self.assumptions.of_engine_nodes.gpus_per_node
        for name, engine in (("an engine", self.engine), ("an engine of the teacher", self.teacher_engine)):
            if engine is not None and not engine.holds_longest:
                yield (
                    f"{name}'s GPU has room for a KV cache of {engine.kv_tokens:,} tokens, beside "
                    f"{gib(engine.weights)} of weights; the longest prompt and response have {engine.max_model_len:,}"
                )
        if self.placement == "separate" and (needed := self.engine_while_loading) > self.engine_gpu_bytes:
            stored = " or set weight_sync.transport=store, which keeps them in host memory"
            yield (
                f"an engine's GPU needs {gib(needed)} while it loads new weights, "
                f"{gib(self.loading_bytes)} of it for the whole tensors of a layer; an "
                f"{self.engine_gpu_name} has {gib(self.engine_gpu_bytes)}; lower {self._cache_setting}"
                f"{stored if self.config.weight_sync.transport != 'store' else ''}"
            )
        free = self.engine_gpu_bytes * (1 - rollout.gpu_memory_utilization)
        if self.placement == "separate" and rollout.kv_cache_gib is None and free < CUDA_CONTEXT_GIB * GIB:
            yield (
                f"rollout.gpu_memory_utilization={rollout.gpu_memory_utilization} of an engine's GPU leaves "
                f"{gib(free)} for the CUDA context, which needs {CUDA_CONTEXT_GIB} GiB; vLLM would not start; lower it"
            )
        teacher = self.config.algorithm.teacher_engines
        if teacher is not None and teacher.ranks_per_engine > per_node:
            yield (
                f"an engine of the teacher has {teacher.ranks_per_engine} GPUs (algorithm.distillation.engines."
                f"tensor_parallel_size x pipeline_parallel_size), and a node has {per_node}"
            )
        if self.placement == "colocated" and self.num_engine_gpus > world:
            yield (
                f"rollout.num_engines={rollout.num_engines} engines of {rollout.ranks_per_engine} GPUs "
                f"(tensor_parallel_size x pipeline_parallel_size) do not fit on the trainer's {world}"
            )
        if rollout.ranks_per_engine_node > per_node:
            yield (
                f"an engine has {rollout.ranks_per_engine} GPUs (rollout.tensor_parallel_size x "
                f"pipeline_parallel_size) on rollout.nodes_per_engine={rollout.nodes_per_engine} nodes, and a node has "
                f"{per_node}; set nodes_per_engine={-(-rollout.ranks_per_engine // per_node)}"
            )

    def _host_problems(self) -> Iterator[str]:
        yield from host_problems(self.config, self.num_nodes)
        for host in self.hosts:
            if host.is_exceeded:
                yield (
                    f"{host.node} needs {gib(host.num_bytes)} of host memory; it is assumed to have {host.gib:,.0f} GiB"
                )

    @property
    def fits(self) -> bool:
        return not self.problems


def gib(num_bytes: float) -> str:
    return f"{num_bytes / GIB:,.1f} GiB"
