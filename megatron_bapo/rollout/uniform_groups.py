"""Dynamic sampling: which of the groups whose rewards are all equal are dropped, in the order of their prompts."""

from __future__ import annotations

from collections.abc import Callable

from megatron_bapo.config.rollout import FilterGroupsConfig
from megatron_bapo.records import BufferedGroup, Group


def is_uniform(group: Group) -> bool:
    """Return whether all rewards of a group are equal, so that its advantages are 0.

    A group of one has nothing to be equal to: REINFORCE++ compares its reward with those of the batch.
    """
    return len(group.trajectories) > 1 and len({trajectory.reward for trajectory in group.trajectories}) == 1


class UniformGroups:
    """Holds the uniform groups of one batch: the first ones by prompt order are dropped, those beyond the limit kept.

    A group is held until no group of an earlier prompt is open, because only then its rank is known. Which groups are
    dropped therefore depends on the prompts and not on which response finished first.
    """

    def __init__(self, settings: FilterGroupsConfig, groups_per_batch: int) -> None:
        self._enabled = settings.enable
        self._limit = (settings.max_num_gen_batches - 1) * groups_per_batch
        self._held: dict[int, Group] = {}
        self.num_dropped = 0
        """Groups dropped since the last batch."""

    @property
    def num_kept(self) -> int:
        """Number of held groups that exceed the limit, which the next batch trains on."""
        return max(0, self.num_dropped + len(self._held) - self._limit)

    def accepts(self, group: Group) -> bool:
        """Return whether the filter applies to a group; if not, it goes to the replay buffer."""
        return self._enabled and is_uniform(group)

    def add(self, serial: int, group: Group) -> None:
        self._held[serial] = group

    def groups(self) -> list[BufferedGroup]:
        """Return the groups that are held, in the order of their prompts."""
        return [BufferedGroup(serial, group) for serial, group in sorted(self._held.items())]

    def drop_before(self, serial: float) -> list[int]:
        """Drop the groups that no open prompt precedes, `serial` being the first open one; return their serials."""
        decided = [each for each in sorted(self._held) if each < serial]
        return self._drop(decided[: self._limit - self.num_dropped])

    def remove_stale(self, is_stale: Callable[[int], bool]) -> list[int]:
        """Remove the groups whose oldest policy version is stale; return their serials."""
        stale = [entry.serial for entry in self.groups() if is_stale(entry.oldest_version)]
        for serial in stale:
            del self._held[serial]
        return stale

    def end_batch(self, num: int) -> tuple[list[int], list[BufferedGroup]]:
        """Drop groups up to the limit, and return their serials and `num` of the others, which the batch trains on.

        Any other groups are held for the next batch.
        """
        dropped = self._drop(sorted(self._held)[: self._limit - self.num_dropped])
        kept = self.groups()[: max(0, num)]
        for entry in kept:
            del self._held[entry.serial]
        self.num_dropped = 0
        return dropped, kept

    def _drop(self, serials: list[int]) -> list[int]:
        for serial in serials:
            del self._held[serial]
        self.num_dropped += len(serials)
        return serials
