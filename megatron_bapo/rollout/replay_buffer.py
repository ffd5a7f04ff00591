"""Replay buffer of scored groups: admission, eviction and reuse by staleness, and staleness metrics."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Literal

from megatron_bapo.metrics.values import Max, Mean, Metric
from megatron_bapo.records import BufferedGroup, Group

MAX_AGES_SHOWN = 16
"""The staleness histogram's last bin counts this age and all above."""


class ReplayBuffer:
    """Holds scored groups until their last use.

    The batches that it returns depend only on the groups added, the seed and the batch number. With `on_stale=wait` a
    group is part of `max_reuse` consecutive batches, so that no group is evicted before its last use. With
    `on_stale=drop` used groups are sampled, and old ones, which have long responses, are evicted after fewer uses.
    """

    def __init__(self, *, max_staleness: int, max_reuse: int, seed: int, on_stale: Literal["wait", "drop"]) -> None:
        self._max_staleness = max_staleness
        self._max_reuse = max_reuse
        self._seed = seed
        self._waits = on_stale == "wait"
        self.max_first_staleness = max_staleness - (max_reuse - 1) * self._waits
        """Maximum staleness of a group at its first use."""
        self._groups: dict[int, BufferedGroup] = {}
        self._num_used = 0
        """Number of groups that were used before."""

    @property
    def num_fresh(self) -> int:
        """Number of groups that were never used."""
        return len(self._groups) - self._num_used

    def fresh(self) -> list[BufferedGroup]:
        """Return the groups that were never used, in the order of their prompts."""
        return [entry for entry in self.groups() if entry.num_uses == 0]

    def num_fresh_needed(self, num: int) -> int:
        """Return how many of the next batch's `num` groups must be unused ones."""
        return num - min(self._num_used, num - self._num_fresh_at_least(num))

    def admits(self, oldest_version: int, policy_version: int) -> bool:
        """Return whether a group's oldest token is within `max_staleness`, so that it may be trained on."""
        return policy_version - oldest_version <= self._max_staleness

    def is_in_time(self, num: int, num_ahead: int, num_newer: int) -> bool:
        """Return whether a group that is started now is used before its tokens are too old.

        Batches have `num` groups, `num_ahead` unused groups are used before it, and the next batch is taken when the
        policy is `num_newer` versions newer than now.
        """
        return num_ahead // self._num_fresh_at_least(num) + num_newer <= self.max_first_staleness

    def must_wait(self, num: int, in_flight: Iterable[int], policy_version: int) -> bool:
        """Return whether unfinished groups would be too old for all later batches if a batch of `num` were taken now.

        `in_flight` are the oldest policy versions of the unfinished groups that have tokens. Those that are not newer
        than a version must fit into the batches until that version is too old. Waiting ends when they are finished or
        the batch is full of groups that are as old. With `on_stale=drop` there is no waiting.
        """
        if not self._waits:
            return False
        num_fresh = self.num_fresh_needed(num)
        ready, pending = Counter(entry.oldest_version for entry in self.fresh()), Counter(in_flight)
        num_ready = num_pending = 0
        for version in sorted(ready | pending):
            num_ready += ready[version]
            num_pending += pending[version]
            num_batches = max(0, version + self.max_first_staleness - policy_version)
            if num_ready < num_fresh and num_pending > num_batches * self._num_fresh_at_least(num):
                return True
        return False

    def add(self, serial: int, group: Group, num_uses: int = 0) -> None:
        self._groups[serial] = BufferedGroup(serial, group, num_uses)
        self._num_used += num_uses > 0

    def groups(self) -> list[BufferedGroup]:
        """Return all groups, in the order of their prompts."""
        return [entry for _, entry in sorted(self._groups.items())]

    def evict(self, policy_version: int) -> list[BufferedGroup]:
        """Remove and return the groups with a token that is too old under `policy_version`."""
        stale = [e for e in self._groups.values() if not self.admits(e.oldest_version, policy_version)]
        for entry in stale:
            self._remove(entry.serial)
        return stale

    def take(self, num: int, *, batch: int) -> list[BufferedGroup]:
        """Return the groups of the run's `batch`-th batch, in the order of their prompts.

        These are the unused groups with the oldest tokens and some used ones. A group is removed at its last use.
        """
        num_fresh = self.num_fresh_needed(num)
        fresh = sorted(self.fresh(), key=lambda entry: entry.oldest_version)[:num_fresh]
        assert len(fresh) == num_fresh, f"the batch needs {num_fresh} unused groups, the buffer has {len(fresh)}"
        generator = random.Random(f"{self._seed}/{batch}")
        if self._waits:
            reused = sorted(self._used(), key=lambda entry: entry.oldest_version)[: num - num_fresh]
            last = self._without_reuse(fresh, num, generator)
        else:
            reused, last = generator.sample(self._used(), num - num_fresh), set[int]()
        chosen = sorted(fresh + reused, key=lambda entry: entry.serial)
        taken = [replace(entry, num_uses=entry.num_uses + 1) for entry in chosen]
        for entry in taken:
            self._remove(entry.serial)
            if entry.num_uses < self._max_reuse and entry.serial not in last:
                self.add(entry.serial, entry.group, entry.num_uses)
        return taken

    def _remove(self, serial: int) -> None:
        self._num_used -= self._groups.pop(serial).num_uses > 0

    def _without_reuse(self, fresh: list[BufferedGroup], num: int, generator: random.Random) -> set[int]:
        """Return the serials of a random part of `fresh`, for which the following batches have no room."""
        if self._max_reuse == 1:
            return set()
        num_reused = (num - self._num_fresh_at_least(num)) // (self._max_reuse - 1)
        return {entry.serial for entry in generator.sample(fresh, max(0, len(fresh) - num_reused))}

    def _num_fresh_at_least(self, num: int) -> int:
        """Return how many unused groups every batch of `num` groups has."""
        return -(-num // self._max_reuse)

    def _used(self) -> list[BufferedGroup]:
        return [entry for entry in self.groups() if entry.num_uses > 0]


def staleness_metrics(groups: Sequence[Group], policy_version: int, max_staleness: int) -> dict[str, Metric]:
    """Return the ages of a batch's tokens, in policy versions behind the weights that are trained on it.

    These are the mean and the largest age over tokens, the fraction of tokens of each age, and the fraction of
    trajectories with tokens of several versions.
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
    of_ages: dict[str, Metric] = {
        f"rollout/staleness/age_{age}": Mean(shown[age], num_tokens) for age in range(last + 1)
    }
    return {
        "rollout/staleness/mean": Mean(sum(age * num for age, num in ages.items()), num_tokens),
        "rollout/staleness/max": Max(max(ages)),
        "rollout/staleness/mixed_responses": Mean(
            sum(len(t.version_spans) > 1 for t in trajectories), len(trajectories)
        ),
        **of_ages,
    }
