"""Curriculum: sample prompts with probabilities that depend on their measured pass rates."""

from __future__ import annotations

import json
from collections import defaultdict, deque
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from megatron_bapo.config.data import CurriculumConfig
from megatron_bapo.errors import UserError
from megatron_bapo.records import SOLVED, Group


class Curriculum:
    """Pass rates by prompt id and the sampling probabilities that follow from them."""

    def __init__(self, config: CurriculumConfig, prompt_ids: Iterable[str]) -> None:
        """Load recorded pass rates. Raises UserError if their file is malformed or names none of the prompts."""
        self._config = config
        self._measured: defaultdict[str, deque[float]] = defaultdict(lambda: deque(maxlen=config.num_groups))
        self._recorded: dict[str, float] = {}
        if config.pass_rates is not None:
            self._recorded = _read(config.pass_rates)
            if self._recorded.keys().isdisjoint(prompt_ids):
                raise UserError(
                    f"data.curriculum.pass_rates={config.pass_rates} names none of the training prompts, whose ids are "
                    "'train:<row, from 0>'"
                )

    def measure(self, prompt_id: str, pass_rate: float) -> None:
        """Record the pass rate of a group."""
        self._measured[prompt_id].append(pass_rate)

    def probability(self, prompt_id: str) -> float:
        """Return the probability that the prompt is sampled, and not skipped, when its turn comes."""
        measured, config = self._measured.get(prompt_id), self._config
        rate = sum(measured) / len(measured) if measured else self._recorded.get(prompt_id)
        if rate is None:
            return 1.0
        match config.weighting:
            case "variance":
                weight = 4 * rate * (1 - rate)
            case "band":
                weight = float(config.min_pass_rate <= rate <= config.max_pass_rate)
        return max(weight, config.min_probability)

    def state_dict(self) -> dict[str, Any]:
        """Return the measured pass rates as JSON values."""
        return {prompt_id: [*rates] for prompt_id, rates in self._measured.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._measured.clear()
        for prompt_id, rates in state.items():
            self._measured[prompt_id].extend(rates)


def pass_rate(group: Group) -> float:
    """Return the share of a scored group's responses that solve the prompt."""
    rewards = [trajectory.reward for trajectory in group.trajectories]
    return sum(reward >= SOLVED for reward in rewards) / len(rewards)


def _read(path: Path) -> dict[str, float]:
    rates = {}
    for number, line in enumerate(path.read_bytes().splitlines(), start=1):
        try:
            row = json.loads(line)
            prompt_id, rate = row["prompt_id"], float(row["pass_rate"])
        except (KeyError, TypeError, ValueError, RecursionError):
            rate, prompt_id = -1.0, None
        if not (isinstance(prompt_id, str) and 0.0 <= rate <= 1.0):
            text = line.decode(errors="replace")
            raise UserError(
                f'{path}:{number} is {text!r:.120}; write {{"prompt_id": "train:0", "pass_rate": 0.5}}, with a rate '
                "from 0 to 1"
            )
        rates[prompt_id] = rate
    return rates
