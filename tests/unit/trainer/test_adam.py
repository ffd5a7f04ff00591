"""AdamW with moments in bfloat16 against torch's own, whose moments are rounded after every update."""

from collections.abc import Sequence

import pytest
import torch

from megatron_bapo.trainer import adam
from megatron_bapo.trainer.adam import Bfloat16MomentsAdamW

SHAPES = ((7, 30), (3,), (64, 64))
SETTINGS = {"betas": (0.8, 0.95), "eps": 1e-6}


def groups(seed: int) -> list[dict]:
    """Return parameters in two groups, of which the second has no weight decay and another learning rate."""
    generator = torch.Generator().manual_seed(seed)
    parameters = [torch.nn.Parameter(torch.randn(shape, generator=generator)) for shape in SHAPES]
    return [
        {"params": parameters[:2], "weight_decay": 0.1, "lr": 1e-2},
        {"params": parameters[2:], "weight_decay": 0.0, "lr": 3e-3},
    ]


def parameters_of(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def start(optimizer: torch.optim.Optimizer, dtype: torch.dtype) -> None:
    for parameter in parameters_of(optimizer):
        moments = {name: torch.zeros_like(parameter, dtype=dtype) for name in ("exp_avg", "exp_avg_sq")}
        optimizer.state[parameter] = {"step": torch.zeros(()), **moments}


def update(optimizers: Sequence[torch.optim.Optimizer], seed: int) -> None:
    """Take a step with the same gradients; the last parameter has one in every second step only."""
    generator = torch.Generator().manual_seed(seed)
    gradients = [torch.randn(shape, generator=generator) * 10.0 ** (seed % 4 - 3) for shape in SHAPES]
    for optimizer in optimizers:
        for parameter, gradient in zip(parameters_of(optimizer), gradients, strict=True):
            parameter.grad = gradient.clone()
        if seed % 2:
            parameters_of(optimizer)[-1].grad = None
        optimizer.step()


@pytest.mark.parametrize("chunk", [16, adam.CHUNK])
def test_updates_are_those_of_adamw_with_rounded_moments(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adam, "CHUNK", chunk)
    ours, theirs = Bfloat16MomentsAdamW(groups(0), **SETTINGS), torch.optim.AdamW(groups(0), fused=True, **SETTINGS)
    start(ours, torch.bfloat16)
    start(theirs, torch.float32)
    for seed in range(20):
        update((ours, theirs), seed)
        for mine, other in zip(parameters_of(ours), parameters_of(theirs), strict=True):
            assert torch.equal(mine, other)
            for name in ("exp_avg", "exp_avg_sq"):
                rounded = theirs.state[other][name].bfloat16()
                assert torch.equal(ours.state[mine][name], rounded)
                theirs.state[other][name].copy_(rounded)
            assert ours.state[mine]["step"] == theirs.state[other]["step"]
    exact = torch.optim.AdamW(groups(0), fused=True, **SETTINGS)
    for seed in range(20):
        update((exact,), seed)
    apart = [(mine - other).abs().max() for mine, other in zip(*map(parameters_of, (ours, exact)), strict=True)]
    assert 0 < max(apart) < 0.02 * 20 * 1e-2  # a share of the largest possible change


def test_the_groups_are_those_of_the_optimizer_that_it_replaces() -> None:
    replaced = torch.optim.AdamW(groups(1))
    ours = Bfloat16MomentsAdamW(replaced.param_groups)
    assert all(mine is other for mine, other in zip(ours.param_groups, replaced.param_groups, strict=True))
