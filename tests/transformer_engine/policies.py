"""Policies with Transformer Engine's layers, as the trainer builds them on one rank of a layout, without the others."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_bapo.config.architecture import Architecture
from megatron_bapo.config.schema import Config
from megatron_bapo.model.build import PolicyModel, build_policy
from megatron_bapo.parallel.fake_ranks import process_group
from megatron_bapo.parallel.groups import ParallelGroups, create_groups
from tests.transformer_engine.device import modules_on_the_cpu


def make_config(fp8: dict[str, Any] | None = None, **parallel: Any) -> Config:
    return Config.model_validate(
        {
            "run_dir": "run",
            "model": {"path": "model", "dtype": "bfloat16", "transformer_impl": "transformer_engine"},
            "data": {"train": {"path": "unused.jsonl"}},
            "optimizer": {"lr": 1e-6},
            "trainer": {"total_steps": 1, "train_batch_size": 8, "ppo_mini_batch_size": 8, "max_tokens_per_gpu": 256},
            "parallel": parallel,
            "fp8": fp8,
        }
    )


class WithoutValues(TorchDispatchMode):
    """Draws no random weights and copies none, because a tensor takes memory only when it is written."""

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        initializes = func in (torch.ops.aten.normal_.default, torch.ops.aten.copy_.default)
        return args[0] if initializes else func(*args, **(kwargs or {}))


@contextmanager
def built(
    config: Config, architecture: Architecture, rank: int = 0, *, frozen: bool = False, has_values: bool = True
) -> Iterator[tuple[PolicyModel, ParallelGroups]]:
    """Build one rank's policy as the trainer does; without values its weights are not written."""
    with process_group(rank, config.parallel.world_size), modules_on_the_cpu():
        groups = create_groups(config.parallel, seed=0, timeout_s=60)
        with nullcontext() if has_values else WithoutValues():
            model = build_policy(config, architecture, groups, frozen=frozen)
        yield model, groups
