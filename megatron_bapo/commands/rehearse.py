"""Plays one update of a configuration on chosen ranks, at full size and without GPUs, weights or other ranks.

The update is the trainer's own: model build, DDP, optimizer, packing, scoring, clip bounds, pipeline schedule, loss and
optimizer step (`parallel/fake_ranks.py` replaces tensors and process group). A layout that does not fit the model, or
ranks that disagree about shapes, fail here. What the update allocates and sends is compared with the estimate.
"""

from __future__ import annotations

import math
import traceback
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import numpy as np

from megatron_bapo.config.architecture import Architecture
from megatron_bapo.config.optimizer import OptimizerConfig
from megatron_bapo.config.padding import round_up
from megatron_bapo.config.schema import Config, ParallelConfig
from megatron_bapo.errors import RunError, UserError
from megatron_bapo.model.build import PolicyModel, build_policy
from megatron_bapo.parallel.fake_ranks import FakeRank, Group, fake_rank, process_group
from megatron_bapo.parallel.groups import ParallelGroups, create_groups, embedding_group
from megatron_bapo.planning.activations import MicroBatch
from megatron_bapo.planning.collectives import sent_bytes
from megatron_bapo.planning.hardware import Assumptions
from megatron_bapo.planning.trainer_memory import largest_micro_batch, stage_memory
from megatron_bapo.records import Trajectory, VersionSpan
from megatron_bapo.trainer.micro_batches import Example
from megatron_bapo.trainer.optimizer import Optimizer, StepResult
from megatron_bapo.trainer.policy_update import update_policy
from megatron_bapo.trainer.worker import Worker

LEARNING_RATE = 1e-6
MEMORY_TOLERANCE, BYTES_TOLERANCE = 0.05, 0.01
"""Allowed relative differences between a rehearsal and the estimate."""
UNPLANNED_BYTES = 1 << 20
"""Difference of the bytes sent over an axis that is always allowed: metrics and sums of the search for clip bounds,
whose size does not depend on the model."""


@dataclass(frozen=True)
class Traffic:
    """Calls of one kind of collective in one process group."""

    axis: str
    kind: str
    num_ranks: int
    num_calls: int
    num_bytes: int
    """Bytes that this rank sends."""


@dataclass(frozen=True)
class RankRehearsal:
    """What one rank has done in one update, beside the estimate of its pipeline stage."""

    rank: int
    stage: int
    micro_batch_tokens: int
    num_micro_batches: int
    peak_bytes: int
    """Most bytes of live tensors on the device."""
    planned_peak_bytes: int
    """The estimate without what it reserves for contexts, buffers and fragmentation."""
    traffic: tuple[Traffic, ...]
    planned_traffic: dict[str, int]
    """Estimated bytes that the rank sends, by axis."""

    @property
    def sent_bytes(self) -> Counter[str]:
        """Bytes that the rank has sent, by axis."""
        sent: Counter[str] = Counter()
        for part in self.traffic:
            sent[part.axis] += part.num_bytes
        return sent

    @property
    def differences(self) -> list[str]:
        """Where the rehearsal and the estimate differ by more than the tolerances, one line each."""
        found = []
        if abs(self.peak_bytes / self.planned_peak_bytes - 1) > MEMORY_TOLERANCE:
            found.append(f"peak memory {self.peak_bytes:,} bytes, planned {self.planned_peak_bytes:,}")
        for axis in sorted(self.planned_traffic.keys() | self.sent_bytes.keys()):
            sent, planned = self.sent_bytes[axis], self.planned_traffic.get(axis, 0)
            if abs(sent - planned) > max(BYTES_TOLERANCE * planned, UNPLANNED_BYTES):
                found.append(f"{sent:,} bytes are sent over {axis} ranks, planned {planned:,}")
        return found


def rehearsed_config(config: Config) -> tuple[Config, tuple[str, ...]]:
    """Return the configuration that can be played without Transformer Engine, and notes on what it leaves out."""
    if config.model.transformer_impl == "local":
        return config, ()
    model = config.model.model_copy(update={"transformer_impl": "local"})
    parallel = config.parallel.model_copy(update={"cp_comm_type": "p2p"})
    notes = ["the layers are Megatron's own instead of Transformer Engine's"]
    if config.fp8 is not None:
        notes.append("in bfloat16 instead of FP8")
    return config.model_copy(update={"model": model, "parallel": parallel, "fp8": None}), tuple(notes)


def stage_ranks(config: Config) -> list[int]:
    """Return the first rank of the first, a middle and the last pipeline stage."""
    num_stages = config.parallel.pipeline_model_parallel_size
    stages = sorted({0, num_stages // 2, num_stages - 1})
    return [stage * (config.parallel.world_size // num_stages) for stage in stages]


def rehearse_ranks(config: Config, architecture: Architecture, ranks: Sequence[int]) -> list[RankRehearsal]:
    """Play one update on each of the ranks. Raises RunError if the trainer fails on one of them."""
    found = []
    for rank in ranks:
        try:
            found.append(rehearse_rank(config, architecture, rank))
        except (UserError, RunError):
            raise
        except Exception as error:  # whatever Megatron-Core or torch raise for a layout that does not work
            frame = traceback.extract_tb(error.__traceback__)[-1]
            raise RunError(
                f"rank {rank} fails with {type(error).__name__}: {error} ({frame.filename}:{frame.lineno})"
            ) from error
    return found


def rehearse_rank(
    config: Config, architecture: Architecture, rank: int, num_micro_batches: int | None = None
) -> RankRehearsal:
    """Play one update on one rank. Raises UserError for a rank that does not exist, and what the trainer raises.

    Without `num_micro_batches` it has enough for the peak memory of the first stage, which holds the most at once.
    """
    world_size = config.parallel.world_size
    if not 0 <= rank < world_size:
        raise UserError(f"--rank {rank} must be one of 0 to {world_size - 1}, because parallel.world_size={world_size}")
    parallel = config.parallel
    if architecture.moe_layers and (parallel.expert_tensor_parallel_size or parallel.tensor_model_parallel_size) > 1:
        raise UserError("tensor parallelism of experts cannot be rehearsed; set parallel.expert_tensor_parallel_size=1")
    batch = _micro_batch(config, architecture)
    num = num_micro_batches or _num_played(config)
    tokens = batch.split_tokens(config.parallel)
    with warnings.catch_warnings(), process_group(rank, world_size):
        warnings.simplefilter("ignore")  # Megatron-Core warns about its own defaults and calls
        groups = create_groups(config.parallel, seed=0, timeout_s=60)
        num_routed = tokens * architecture.num_experts_per_tok
        with fake_rank((tokens, 1, architecture.hidden_size), num_routed) as played:
            worker = _worker(config, architecture, groups, played)
            played.forget_traffic()  # of the model's construction
            update_policy(worker, _examples(config, batch, num), lr=LEARNING_RATE, on_policy=False)
            traffic = tuple(_traffic(played, groups))
            del worker
        stage = groups.pipeline.rank
    planned = stage_memory(config, architecture, Assumptions(expert_imbalance=1.0))[stage]
    return RankRehearsal(
        rank=rank,
        stage=stage,
        micro_batch_tokens=sum(batch.lengths),
        num_micro_batches=num,
        peak_bytes=played.peak_bytes,
        planned_peak_bytes=planned.peak - planned.reserved - planned.state.frozen,
        traffic=traffic,
        planned_traffic=dict(sent_bytes(config, architecture, stage, batch, num, _num_scored(config, num))),
    )


def _worker(config: Config, architecture: Architecture, groups: ParallelGroups, played: FakeRank) -> Worker:
    # Weights are initialized on the device, as on a GPU. The checkpoint may be on another machine.
    model = build_policy(config, architecture, groups, on_gpu=True)
    with played.on_host() if config.optimizer.cpu_offload else nullcontext():
        optimizer = _HostStep(played, model, groups, config.optimizer)
    return Worker(config, groups, model, optimizer)


class _HostStep(Optimizer):
    """Optimizer whose step allocates nothing on the device, as that of a fused or an offloaded Adam."""

    def __init__(self, played: FakeRank, model: PolicyModel, groups: ParallelGroups, settings: OptimizerConfig) -> None:
        super().__init__([chunk.ddp for chunk in model.chunks], groups, settings)
        self._played = played

    def step(self, lr: float) -> StepResult:
        with self._played.on_host():
            return super().step(lr)


def _micro_batch(config: Config, architecture: Architecture) -> MicroBatch:
    """Return the micro-batch of the estimate, with sequences of one length, so that all micro-batches are alike.

    Each rank can send equally many of its tokens to every expert. Raises UserError if the token budget is too small.
    """
    planned = largest_micro_batch(config, Assumptions())
    total, granularity = sum(planned.lengths), config.padding_rule.granularity
    divisor = math.lcm(granularity, _even_divisor(config.parallel, architecture))

    def lengths(num: int) -> tuple[int, ...]:
        step = math.lcm(granularity, divisor // math.gcd(divisor, num))
        return (total // num // step * step,) * num

    fewest = max(1, round(total / planned.lengths[0]))
    chosen = max(map(lengths, range(fewest, 2 * fewest)), key=sum)  # more and shorter ones may leave less of the budget
    if not sum(chosen):
        least = divisor // config.parallel.context_parallel_size
        raise UserError(
            f"trainer.max_tokens_per_gpu={config.trainer.max_tokens_per_gpu} cannot be rehearsed, because not every "
            f"expert gets a token; set it to {least} or more"
        )
    return MicroBatch(chosen, planned.dtype_bytes, planned.fused_norms)


def _even_divisor(parallel: ParallelConfig, architecture: Architecture) -> int:
    """Return the divisor of a micro-batch's tokens of which each rank sends equally many to every expert."""
    if not architecture.moe_layers:
        return 1
    num_chosen = architecture.num_experts_per_tok
    of_a_rank = math.lcm(architecture.num_experts, num_chosen) // num_chosen
    num_parts = parallel.tensor_model_parallel_size if parallel.sequence_parallel else 1
    return of_a_rank * num_parts * parallel.context_parallel_size


def _num_played(config: Config) -> int:
    """Return enough micro-batches for the pipeline's peak memory."""
    parallel = config.parallel
    pp, vpp = parallel.pipeline_model_parallel_size, parallel.virtual_pipeline_model_parallel_size
    wanted = min(pp * (1 + (vpp > 1)), config.most_micro_batches)
    return round_up(wanted, parallel.num_micro_batches_multiple)


def _num_scored(config: Config, num: int) -> int:
    """Return the scoring passes of an update of `num` micro-batches whose clip bounds are not known before."""
    algorithm = config.algorithm
    return int(algorithm.searches_minibatch and not (num == 1 and algorithm.clip_bounds.method == "score"))


def _examples(config: Config, batch: MicroBatch, num: int) -> list[Example]:
    """Return examples that fill `num` micro-batches on every data-parallel rank."""
    examples = []
    for length in batch.lengths * (num * config.parallel.data_parallel_size):
        num_prompt = max(1, min(config.data.max_prompt_length, length // 8))
        num_response = length + 1 - num_prompt
        trajectory = Trajectory(
            prompt_token_ids=np.zeros(num_prompt, np.int32),
            response_token_ids=np.zeros(num_response, np.int32),
            behaviour_log_probs=np.full(num_response, -1.0, np.float32),
            version_spans=(VersionSpan(0, num_response),),
            finish_reason="length",
            text="",
        )
        examples.append(Example(trajectory, advantage=1.0, weight=1e-6))
    return examples


def _traffic(played: FakeRank, groups: ParallelGroups) -> Iterator[Traffic]:
    """Name the groups of a rank's collectives.

    Only pipeline stages send to one rank; of two stages, Megatron-Core lets one send in the group of all ranks.
    """
    named = {
        "tensor": groups.tensor.group,
        "context": groups.context.group,
        "pipeline": groups.pipeline.group,
        "embedding": embedding_group(),
        "expert": groups.expert.group,
        "data": groups.data_context.group,
        "expert data": groups.expert_data.group,
    }
    axes = {Group.of(group).name: axis for axis, group in named.items() if group is not None}
    for (group, kind), num_calls in sorted(played.calls.items()):
        axis = "pipeline" if kind in ("send", "receive") else axes.get(group.name, "other")
        yield Traffic(axis, kind, len(group.ranks), num_calls, played.sent_bytes[group, kind])


def all_differences(rehearsals: Sequence[RankRehearsal]) -> list[str]:
    """Return the differences of all ranks, each with its rank."""
    return [f"rank {played.rank}: {difference}" for played in rehearsals for difference in played.differences]
