"""Scored groups between their scoring and their last use: admission, eviction, reuse, and how old their tokens are."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from megatron_bapo.metrics.values import Max, Mean, Metric
from megatron_bapo.records import BufferedGroup, Group

MAX_AGES_SHOWN = 16
"""The histogram's last bar holds this age and all above."""


class ReplayBuffer:
    """What it hands out depends on what was added, the seed and the number of batches before, on nothing else."""

    def __init__(self, *, max_staleness: int, max_reuse: int, seed: int) -> None:
        self._max_staleness = max_staleness
        self._max_reuse = max_reuse
        self._seed = seed
        self._groups: dict[int, BufferedGroup] = {}

    def fresh(self) -> list[BufferedGroup]:
        """Those never used, the prompt that was drawn first at the front."""
        return [entry for entry in self.groups() if entry.num_uses == 0]

    def num_fresh_needed(self, num: int) -> int:
        """How many of the next batch's `num` groups must be new ones."""
        return num - min(len(self._used()), num - -(-num // self._max_reuse))

    def admits(self, oldest_version: int, policy_version: int) -> bool:
        """Whether a group may be trained on: no token is older than the limit."""
        return policy_version - oldest_version <= self._max_staleness

    def add(self, serial: int, group: Group, num_uses: int = 0) -> None:
        self._groups[serial] = BufferedGroup(serial, group, num_uses)

    def groups(self) -> list[BufferedGroup]:
        """All of them, in the order of their prompts."""
        return [entry for _, entry in sorted(self._groups.items())]

    def evict(self, policy_version: int) -> list[BufferedGroup]:
        """Forget and return the groups with a token that is too old now that the weights are `policy_version`."""
        stale = [e for e in self._groups.values() if not self.admits(e.oldest_version, policy_version)]
        for entry in stale:
            del self._groups[entry.serial]
        return stale

    def take(self, num: int, *, batch: int) -> list[BufferedGroup]:
        """The groups of the run's `batch`-th batch: the oldest new ones, and used ones drawn by lot.

        In the order of their prompts. A group that is now used for the `max_reuse`-th time is forgotten.
        """
        num_fresh = self.num_fresh_needed(num)
        fresh = self.fresh()[:num_fresh]
        assert len(fresh) == num_fresh, f"{len(fresh)} new groups are there, {num_fresh} are needed"
        again = random.Random(f"{self._seed}/{batch}").sample(self._used(), num - num_fresh)
        chosen = sorted(fresh + again, key=lambda entry: entry.serial)
        taken = [replace(entry, num_uses=entry.num_uses + 1) for entry in chosen]
        for entry in taken:
            if entry.num_uses == self._max_reuse:
                del self._groups[entry.serial]
            else:
                self._groups[entry.serial] = entry
        return taken

    def _used(self) -> list[BufferedGroup]:
        return [entry for entry in self.groups() if entry.num_uses > 0]


def staleness_metrics(groups: Sequence[Group], policy_version: int, max_staleness: int) -> dict[str, Metric]:
    """How many policy versions lie between the tokens of a batch and the weights that are trained on it.

    Mean and largest age over tokens, the fraction of tokens of each age, and answers with tokens of several versions.
    """
    ages: Counter[int] = Counter()
    trajectories = [t for group in groups for t in group.trajectories]
    for trajectory in trajectories:
        for span in trajectory.version_spans:
            ages[policy_version - span.policy_version] += span.num_tokens
    num_tokens = ages.total()
    last = min(max_staleness, MAX_AGES_SHOWN)
    shown = Counter[int]()
    for age, num in ages.items():
        shown[min(age, last)] += num
    return {
        "rollout/staleness/mean": Mean(sum(age * num for age, num in ages.items()), num_tokens),
        "rollout/staleness/max": Max(max(ages)),
        "rollout/staleness/mixed_answers": Mean(sum(len(t.version_spans) > 1 for t in trajectories), len(trajectories)),
    } | {f"rollout/staleness/age_{age}": Mean(shown[age], num_tokens) for age in range(last + 1)}
