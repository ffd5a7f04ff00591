"""Megatron's Adam over the policy, with the learning rate set at each update."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

from megatron_bapo.config.schema import OptimizerConfig as OptimizerSettings
from megatron_bapo.model.build import PolicyModel
from megatron_bapo.parallel.megatron import (
    MegatronOptimizer,
    OptimizerConfig,
    clip_grad_by_total_norm_fp32,
    get_megatron_optimizer,
)

MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True)
class StepResult:
    grad_norm: float
    """Global L2 norm before clipping."""
    skipped: bool
    """True when the norm was not finite: the parameters are as they were."""


def create_optimizer(model: PolicyModel, settings: OptimizerSettings) -> MegatronOptimizer:
    """Adam over fp32 main parameters; its moments exist from the start, so that they can be loaded into."""
    chained = get_megatron_optimizer(
        OptimizerConfig(
            optimizer="adam",
            lr=settings.lr,
            weight_decay=settings.weight_decay,
            adam_beta1=settings.adam_beta1,
            adam_beta2=settings.adam_beta2,
            adam_eps=settings.adam_eps,
            clip_grad=settings.clip_grad,
            bf16=model.config.bf16,
            params_dtype=model.config.params_dtype,
        ),
        [model.ddp],
    )
    (optimizer,) = chained.chained_optimizers  # pyright: ignore[reportAttributeAccessIssue]
    for group in optimizer.param_groups:
        # Megatron leaves this to its scheduler: norms and biases are not decayed.
        group["weight_decay"] = settings.weight_decay * group.get("wd_mult", 1.0)
    reset_moments(optimizer)
    return optimizer


def adam_of(optimizer: MegatronOptimizer) -> torch.optim.Optimizer:
    """The torch (or fused) Adam inside Megatron's wrapper."""
    return optimizer.optimizer


def reset_moments(optimizer: MegatronOptimizer) -> None:
    """Zero Adam's moments and step counts."""
    for group in adam_of(optimizer).param_groups:
        for parameter in group["params"]:
            adam_of(optimizer).state[parameter] = {
                "step": torch.zeros((), dtype=torch.float32),
                **{name: torch.zeros_like(parameter) for name in MOMENTS},
            }


def main_parameter(parameter: torch.nn.Parameter) -> torch.Tensor:
    """The fp32 tensor that Adam updates: the parameter itself, or its fp32 main copy under bf16."""
    return getattr(parameter, "main_param", parameter)


def moment(optimizer: MegatronOptimizer, name: str) -> Callable[[torch.nn.Parameter], torch.Tensor]:
    """Picks one of Adam's moments for a parameter."""
    state = adam_of(optimizer).state
    return lambda parameter: state[main_parameter(parameter)][name]


def learning_rate(peak: float, update: int, *, num_warmup: int, num_decay: int | None) -> float:
    """Linear warm-up from 0, then a cosine to 0 at update `num_decay`; constant without one. `update` counts from 0."""
    if update < num_warmup:
        return peak * (update + 1) / (num_warmup + 1)
    if num_decay is None:
        return peak
    progress = (update - num_warmup) / max(num_decay - num_warmup, 1)
    return peak * 0.5 * (1.0 + math.cos(math.pi * min(progress, 1.0)))


def optimizer_step(optimizer: MegatronOptimizer, lr: float) -> StepResult:
    """Clip and apply the gradients, unless their global norm is not finite: then all ranks skip alike."""
    for group in optimizer.param_groups:
        group["lr"] = lr * group.get("lr_mult", 1.0)
    found_inf = optimizer.prepare_grads()
    norm = float(optimizer.get_grad_norm())
    if found_inf or not math.isfinite(norm):
        return StepResult(norm, skipped=True)
    limit = optimizer.config.clip_grad
    if limit > 0.0:
        clip_grad_by_total_norm_fp32(list[torch.Tensor](optimizer.get_parameters()), max_norm=limit, total_norm=norm)
    optimizer.step_with_ready_grads()
    return StepResult(norm, skipped=False)
