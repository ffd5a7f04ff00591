"""Objectives and advantages of a user, those of docs/algorithms/own_functions.md and wrong ones."""

import torch
from torch import Tensor


def dppo(log_ratio: Tensor, log_probs: Tensor, advantages: Tensor, low: Tensor, high: Tensor) -> Tensor:
    moved = log_probs.exp() - (log_probs - log_ratio).exp()
    is_near = torch.where(advantages > 0, moved <= high - 1, moved >= low - 1)
    weight = log_ratio.exp().clamp(max=20.0) * is_near
    return weight.detach() * advantages * log_probs


def pass_at_4(rewards: Tensor, lengths: Tensor) -> Tensor:
    k, n = 4, rewards.shape[1]

    def all_wrong(wrong: Tensor, n: int, k: int) -> Tensor:
        drawn = torch.arange(k)
        return ((wrong - drawn).clamp(min=0) / (n - drawn)).prod(dim=1, keepdim=True)

    wrong = (rewards < 1).sum(dim=1, keepdim=True).double()
    mean = 1 - all_wrong(wrong, n, k)
    of_response = torch.where(rewards < 1, 1 - all_wrong(wrong - 1, n - 1, k - 1), 1.0)
    std = (mean * (1 - mean)).sqrt()
    return torch.where(std > 0, (of_response - mean) / std.clamp(min=1e-6), 0.0)


def ppo(log_ratio: Tensor, log_probs: Tensor, advantages: Tensor, low: Tensor, high: Tensor) -> Tensor:
    ratio = log_ratio.exp()
    return torch.minimum(ratio * advantages, ratio.clamp(low, high) * advantages)


def near_behaviour(log_ratio: Tensor, log_probs: Tensor, advantages: Tensor, low: Tensor, high: Tensor) -> Tensor:
    """PPO with a penalty that does not depend on the advantage."""
    return ppo(log_ratio, log_probs, advantages, low, high) - 0.5 * log_ratio.square()


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


def unlikelihood(log_ratio: Tensor, log_probs: Tensor, advantages: Tensor, low: Tensor, high: Tensor) -> Tensor:
    """Infinite at a log-prob of 0, which tokens without a part in the loss have."""
    return torch.where(advantages > 0, log_ratio * advantages, -advantages * torch.log1p(-log_probs.exp()))


def few_arguments(log_ratio: Tensor, advantages: Tensor) -> Tensor:
    return log_ratio * advantages


async def asynchronous(log_ratio: Tensor, log_probs: Tensor, advantages: Tensor, low: Tensor, high: Tensor) -> Tensor:
    return log_ratio * advantages


def by_length(rewards: Tensor, lengths: Tensor) -> Tensor:
    return (rewards - rewards.mean(dim=1, keepdim=True)).tanh() / lengths.sqrt()


def of_groups(rewards: Tensor, lengths: Tensor) -> Tensor:
    return rewards.mean(dim=1)


def divided_by_zero(rewards: Tensor, lengths: Tensor) -> Tensor:
    return (rewards - rewards.mean(dim=1, keepdim=True)) / rewards.std(dim=1, keepdim=True)


def whole_numbers(rewards: Tensor, lengths: Tensor) -> Tensor:
    return (rewards > 0).long()
