"""Process groups of trainer ranks and engine ranks: they form, they transfer versions, and they end when a rank fails.

    every rank                  in the store                    main trainer rank
    ----------                  ------------                    -----------------
    join ────────────────────►  ready/<place>               ──► waits for all of them
    connect  ◄────────────────  formed                      ◄── when all have joined
    transfer a version ──────►  received/<version>/<place>  ──► waits for all of them
    finish loading  ◄─────────  committed/<version>         ◄── commit
    notice a fault ──────────►  failed  ◄── or the rollout service, when an engine is lost
    give the group up ◄───────  failed
    join the next group ◄─────  next    ◄── the rollout service, with the engines that are left

A group is kept for all versions until a fault or until other engines take part. Then a new group forms, in which the
transfer is repeated. An engine rank keeps what it has loaded of the version, because a version's bytes never change.

Only the main trainer rank, which has the first place, looks for a key of every rank. If each of thousands of ranks did,
Ray's head would be asked for millions of keys twice a second.
"""

from __future__ import annotations

import json
import time
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import cache
from threading import Event, Thread
from typing import Any

from torch._C._distributed_c10d import PrefixStore, Store

from megatron_bapo.errors import RunError
from megatron_bapo.weight_sync.host_chain import Chain
from megatron_bapo.weight_sync.plan import WeightPlan
from megatron_bapo.weight_sync.ray_store import open_store
from megatron_bapo.weight_sync.route import TransferGroup

_FIRST_POLL_S, _POLL_S = 0.005, 0.5
"""Shortest and longest time between looks for a key. It grows, because thousands of ranks may wait for a slow one."""


def offer_plan(store: Store, plan: WeightPlan) -> None:
    """Write a plan to the store, where ranks of engines find it by its digest."""
    content = zlib.compress(json.dumps(plan.to_json()).encode())
    store.set(f"plan-{plan.digest}", content)  # pyright: ignore[reportArgumentType]  (torch's stubs name only str)


@cache
def fetch_plan(rendezvous: str, digest: str, timeout_s: float) -> WeightPlan:
    """Return the plan with this digest from the store at `rendezvous`; it is cached, because a plan never changes."""
    store = open_store(rendezvous, timeout_s)
    return WeightPlan.from_json(json.loads(zlib.decompress(store.get(f"plan-{digest}"))))


class TransferFailed(RunError):
    """A transfer has failed in a group, which has ended for all its ranks."""


class Membership:
    """One rank's membership in the current group."""

    def __init__(
        self,
        store: Store,
        place: int,
        connect: Callable[[Store, int, int], Any],
        give_up: Callable[[Any], None],
        limit_s: float,
    ) -> None:
        """`connect` creates the process group of a rank and a size; `give_up` ends its operations from any thread.

        `limit_s` limits the formation of a group and one transfer.
        """
        self._store, self._place, self._limit_s = store, place, limit_s
        self._connect, self._give_up = connect, give_up
        self._group: TransferGroup | None = None
        self._chain: Chain | None = None
        self._gave_up = False
        """Whether the group was given up while it transferred, so that what has arrived may be anything."""
        self._is_committed = False
        """Whether all ranks have the version, so that a fault concerns only the next one."""

    @property
    def group(self) -> TransferGroup:
        assert self._group is not None, "join comes first"
        return self._group

    def join(self, group: TransferGroup) -> None:
        """Join a group; does nothing for a member.

        Raises TransferFailed if another rank does not join, or if a fault was noticed meanwhile.
        """
        if self._group == group:
            return
        self._group, self._chain, self._gave_up = group, None, False
        self._store.set(group.ready_key(self._place), "1")
        first = group.places[0]
        with self._failing():
            if self._place == first:
                self.wait_for({group.ready_key(place): place for place in group.places}, "join")
                self._store.set(group.formed_key, "1")
            else:
                self.wait_for({group.formed_key: first}, "confirm that all ranks have joined")
            ranks = {place: rank for rank, place in enumerate(group.places)}
            store = PrefixStore(group.name, self._store)
            connected = self._connect(store, ranks[self._place], len(ranks))
            self._chain = Chain(connected, ranks, group.places)

    @contextmanager
    def transfer(self) -> Iterator[Chain]:
        """Yield the chain for one transfer. Raises TransferFailed if it fails here or elsewhere, also by damaged data.

        Any other error of the context ends the group, too.
        """
        if self._chain is None:
            raise TransferFailed(f"the group of place {self._place} in the weight transfer plan has failed")
        chain, ended, self._is_committed = self._chain, Event(), False
        watch = Thread(target=self._watch, args=(chain.group, ended), daemon=True)
        watch.start()
        try:
            with self._failing():
                yield chain
        finally:
            ended.set()

    def received(self, version: int) -> None:
        """Tell that this rank has all of a version, and wait until every rank has. Raises TransferFailed if not."""
        self._store.set(self.group.received_key(version, self._place), "1")
        committed = {self.group.committed_key(version): self.group.places[0]}
        self.wait_for(committed, f"confirm that all ranks have policy version {version}")
        self._is_committed = True

    def commit(self, version: int, num_senders: int) -> None:
        """Wait until the ranks of all engines have a version, and let them use it; called by the main trainer rank.

        The first `num_senders` places are those of the trainer.

        Raises TransferFailed if a fault is noticed first.
        """
        keys = {self.group.received_key(version, each): each for each in self.group.places if each >= num_senders}
        with self._failing():
            self.wait_for(keys, f"receive policy version {version}")
            self._store.set(self.group.committed_key(version), "1")
            self._is_committed = True

    def forget(self, version: int) -> None:
        """Remove the keys of a version that all engines have loaded, if there was an engine."""
        if (group := self._group) is None:
            return
        self._store.delete_key(group.committed_key(version))
        for place in group.places:
            self._store.delete_key(group.received_key(version, place))

    def wait_for(self, keys: Mapping[str, int], what: str) -> None:
        """Wait until all keys are set, each by the rank at its place; `what` says what setting a key means.

        Raises TransferFailed if a fault is noticed first, or after the limit.
        """
        for is_over in self._waits():
            if self._store.check([*keys]):
                return
            self.check()
            if is_over:
                missing = [str(place) for key, place in keys.items() if not self._store.check([key])]
                raise TransferFailed(
                    f"the ranks at places {', '.join(missing)} of the weight transfer plan did not {what} within "
                    f"{self._limit_s:.0f} s"
                )

    def check(self) -> None:
        """Raise TransferFailed if a fault was noticed in the group."""
        if self._store.check([self.group.failed_key]):
            raise TransferFailed(self._store.get(self.group.failed_key).decode())

    def next_group(self) -> TransferGroup:
        """Return the group after a failed one. Raises RunError if there is none within the limit."""
        for is_over in self._waits():
            if self._store.check([self.group.next_key]):
                break
            if is_over:
                raise RunError(f"the trainer did not repeat a weight transfer within {self._limit_s:.0f} s")
        return TransferGroup.from_json(self._store.get(self.group.next_key))

    def _waits(self) -> Iterator[bool]:
        """Wait longer and longer between iterations; yields whether the limit is over."""
        deadline, wait_s = time.monotonic() + self._limit_s, _FIRST_POLL_S
        while True:
            yield time.monotonic() > deadline
            time.sleep(wait_s)
            wait_s = min(1.5 * wait_s, _POLL_S)

    @contextmanager
    def _failing(self) -> Iterator[None]:
        """End the group of all ranks if the context raises an error, and turn errors of the network into ours."""
        try:
            yield
            if self._gave_up and not self._is_committed:
                raise TransferFailed("another rank has failed")
        except BaseException as error:
            self._end(f"place {self._place} of the weight transfer plan: {error or type(error).__name__}")
            if isinstance(error, Exception) and (self._gave_up or isinstance(error, RuntimeError | TimeoutError)):
                self.check()
                raise TransferFailed(str(error)) from error
            raise

    def _end(self, reason: str) -> None:
        """Tell all ranks of the group that it has failed, unless they know, and leave it."""
        chain, self._chain = self._chain, None
        with suppress(RuntimeError, TimeoutError):  # Ray's head may be what failed
            if not self._store.check([self.group.failed_key]):
                self._store.set(self.group.failed_key, reason)
        if chain is not None:
            self._give_up(chain.group)

    def _watch(self, group: Any, ended: Event) -> None:
        """Give the group up when another process has noticed a fault, or after the limit."""
        deadline = time.monotonic() + self._limit_s
        while not ended.wait(_POLL_S):
            with suppress(RuntimeError, TimeoutError):  # Ray's head may be unreachable for a while
                if self._store.check([self.group.failed_key]) or time.monotonic() > deadline:
                    self._gave_up = True
                    self._give_up(group)
                    return
