"""Estimated time of one step: generation, training, the weight transfer and what lies between them.

`generation_time.py` and `training_time.py` estimate the parts. bench/published_runs.py compares the sum with published
runs of other trainers; `spread.py` holds how far they differ.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megatron_bapo.config.architecture import Architecture
from megatron_bapo.config.schema import Config
from megatron_bapo.planning.flops import forward_flops, training_flops
from megatron_bapo.planning.generation_time import generation_seconds, teacher_seconds
from megatron_bapo.planning.hardware import Assumptions, Gpu
from megatron_bapo.planning.known_models import teacher_of
from megatron_bapo.planning.model_state import ModelState
from megatron_bapo.planning.response_lengths import lengths_of, mean_length
from megatron_bapo.planning.rollout_memory import EngineMemory
from megatron_bapo.planning.training_time import TrainingTime, scoring_passes
from megatron_bapo.planning.weight_transfer import TransferSpeed, traffic


@dataclass(frozen=True)
class StepTime:
    """Seconds of one step, which is a rollout batch and its updates."""

    generation: float
    """Generating a rollout batch, and scoring it with the teacher if it has engines of its own."""
    trainer: TrainingTime
    offload: float
    """Moving the trainer's state to host memory and back, where colocated engines need the GPU memory."""
    between: float
    """Batching, rewards and moving the batch between processes."""
    weight_sync: float
    model_flops: float
    """FLOPs of one step on all GPUs, without recomputation."""
    num_tokens: float
    """Prompt and response tokens of a step."""
    num_gpus: int
    """GPUs of the trainer."""
    peak_flops: float
    """Peak FLOP/s of one GPU."""
    overlapped: bool
    """True if generation overlaps with training."""

    @property
    def training_parts(self) -> dict[str, float]:
        """Seconds of each part of the trainer's work, by name."""
        return self.trainer.parts

    @property
    def training(self) -> float:
        return self.trainer.total

    @property
    def total(self) -> float:
        work = max(self.generation, self.training) if self.overlapped else self.generation + self.training
        return work + self.offload + self.between + self.weight_sync

    @property
    def dominant(self) -> tuple[str, float]:
        """The longest part of the step and its seconds; parts that overlap with longer ones do not count."""
        parts = {"the weight transfer": self.weight_sync, "offloading": self.offload, "between phases": self.between}
        training = {f"training: {name}": seconds for name, seconds in self.training_parts.items()}
        if not self.overlapped or self.training >= self.generation:
            parts |= training
        if not self.overlapped or self.generation >= self.training:
            parts["generation"] = self.generation
        name = max(parts, key=lambda each: parts[each])
        return name, parts[name]

    @property
    def mfu(self) -> float:
        """Model FLOPs utilization of the trainer's GPUs during training."""
        return self.model_flops / (self.training * self.num_gpus * self.peak_flops)

    @property
    def tokens_per_s(self) -> float:
        return self.num_tokens / self.total


def step_time(
    config: Config,
    architecture: Architecture,
    gpu: Gpu,
    engine_gpu: Gpu,
    assumptions: Assumptions,
    engine: EngineMemory,
    training: TrainingTime,
    states: Sequence[ModelState],
) -> StepTime:
    """Return the estimated time of one step.

    `engine_gpu` is the engines' GPU, and `states` are those of the pipeline stages.
    """
    trainer, length = config.trainer, mean_length(config, assumptions)
    square, teacher = lengths_of(config, assumptions).mean_square, teacher_of(config)
    model_flops = training_flops(architecture, length, square, config.model.lora)
    model_flops += scoring_passes(config) * sum(forward_flops(architecture, length, square))
    model_flops *= trainer.ppo_epochs
    if teacher is not None and config.algorithm.trainer_holds_teacher:
        model_flops += sum(forward_flops(teacher, length, square))
    offloads = config.rollout.colocate and trainer.offload
    sent = traffic(
        config,
        architecture,
        assumptions.gpus_per_node,
        assumptions.engine_gpus_per_node,
        broadcasts=assumptions.broadcasts_weights,
        receives_parts=assumptions.engines_receive_parts,
    )
    slower = min(gpu, engine_gpu, key=lambda each: each.network_gb_s)
    return StepTime(
        generation=max(
            generation_seconds(config, architecture, engine_gpu, engine, assumptions.of_engine_nodes),
            teacher_seconds(config, engine_gpu, assumptions.of_engine_nodes),
        ),
        trainer=training,
        offload=max(_offload_seconds(each, assumptions) for each in states) if offloads else 0.0,
        between=assumptions.between_phases_s,
        weight_sync=sent.seconds(TransferSpeed.of(slower, assumptions)),
        model_flops=trainer.train_batch_size * model_flops,
        num_tokens=trainer.train_batch_size * length,
        num_gpus=config.parallel.world_size,
        peak_flops=gpu.bf16_tflops * 1e12,
        overlapped=config.rollout.generates_while_training,
    )


def _offload_seconds(state: ModelState, assumptions: Assumptions) -> float:
    """Return the seconds of moving parameters and optimizer state to host memory and back."""
    pinned = assumptions.host_copy_gb_s * 1e9
    unpinned = pinned if assumptions.unpinned_gb_s is None else assumptions.unpinned_gb_s * 1e9
    return 2 * state.kept_offloaded / pinned + state.optimizer * (1 / unpinned - 1 / pinned)
