"""A valid configuration, of which tests break one rule at a time."""

from typing import Any

import pytest

from megatron_bapo.config.checks import check_config
from megatron_bapo.config.schema import Config
from megatron_bapo.errors import UserError

ARITHMETIC = {"reasoning_gym": {"chain_sum": {}}, "size": 100, "seed": 1}


def config(**values: Any) -> Config:
    """Return a valid config with the given dotted keys (`__` for the dot) replaced."""
    tree: dict[str, Any] = {
        "run_dir": "runs/test",
        "model": {"create": {"max_position_embeddings": 4096}, "dtype": "float32"},
        "parallel": {},
        "data": {"train": ARITHMETIC, "max_prompt_length": 100},
        "reward": {"type": "reasoning_gym"},
        "algorithm": {"clip_bounds": {}},
        "rollout": {"n": 8, "max_response_length": 100},
        "trainer": {"total_steps": 10, "train_batch_size": 64, "ppo_mini_batch_size": 32, "max_tokens_per_gpu": 1000},
    }
    for dotted, value in values.items():
        *sections, key = dotted.split("__")
        node = tree
        for section in sections:
            node = node.setdefault(section, {})
        node[key] = value
    return Config.model_validate(tree)


def problems(checked: Config) -> list[str]:
    with pytest.raises(UserError) as caught:
        check_config(checked)
    return str(caught.value).splitlines()[1:]
