"""Objectives of a user (`algorithm.function`), as docs/algorithms/own_objective.md has them, and wrong ones."""

import torch
from torch import Tensor


def dppo(log_ratio: Tensor, log_probs: Tensor, advantages: Tensor, low: Tensor, high: Tensor) -> Tensor:
    moved = log_probs.exp() - (log_probs - log_ratio).exp()
    is_near = torch.where(advantages > 0, moved <= high - 1, moved >= low - 1)
    weight = log_ratio.exp().clamp(max=20.0) * is_near
    return weight.detach() * advantages * log_probs


def ppo(log_ratio: Tensor, log_probs: Tensor, advantages: Tensor, low: Tensor, high: Tensor) -> Tensor:
    ratio = log_ratio.exp()
    return torch.minimum(ratio * advantages, ratio.clamp(low, high) * advantages)


def loss(log_ratio: Tensor, log_probs: Tensor, advantages: Tensor, low: Tensor, high: Tensor) -> Tensor:
    return -(log_ratio.exp() * advantages).mean()


def centred(log_ratio: Tensor, log_probs: Tensor, advantages: Tensor, low: Tensor, high: Tensor) -> Tensor:
    return (log_ratio.exp() - log_ratio.exp().mean()) * advantages


def without_gradient(log_ratio: Tensor, log_probs: Tensor, advantages: Tensor, low: Tensor, high: Tensor) -> Tensor:
    return log_ratio.detach().exp() * advantages


def not_finite(log_ratio: Tensor, log_probs: Tensor, advantages: Tensor, low: Tensor, high: Tensor) -> Tensor:
    return torch.where(log_ratio > 0, log_ratio.sqrt(), 0.0) * advantages


def wrong_shapes(log_ratio: Tensor, log_probs: Tensor, advantages: Tensor, low: Tensor, high: Tensor) -> Tensor:
    return log_ratio @ torch.ones(3, 3)


def few_arguments(log_ratio: Tensor, advantages: Tensor) -> Tensor:
    return log_ratio * advantages


async def asynchronous(log_ratio: Tensor, log_probs: Tensor, advantages: Tensor, low: Tensor, high: Tensor) -> Tensor:
    return log_ratio * advantages
