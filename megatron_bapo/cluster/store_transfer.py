"""Delivers versions from the stores of the trainer's hosts to those of all other hosts."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping
from typing import Any

from megatron_bapo.cluster.host_store import host_store_name
from megatron_bapo.cluster.ray_cluster import finished, get_actor, get_result, head_address, unanswered
from megatron_bapo.errors import RunError
from megatron_bapo.weight_sync.plan import WeightPlan
from megatron_bapo.weight_sync.ray_store import RayStore

NUM_ATTEMPTS = 3
"""Number of times that a transfer is tried before the error of a host ends the run."""
_QUICK_S = 60.0
"""Timeout of a call that waits for no other host."""


class StoreTransfer:
    """Calls the hosts' `HostStore` actors for each version; used by the main rank only.

    The hosts' process group is kept for all versions. When a host fails, the others drop the group, and a new one is
    formed with the restarted actor for those hosts that do not have the version yet.
    """

    def __init__(
        self, senders: tuple[int, ...], receivers: tuple[int, ...], *, full_every: int, limit_s: float
    ) -> None:
        """`senders` are the numbers of the trainer's hosts and `receivers` those of the hosts with their own stores.

        Every `full_every`-th version is sent whole; `limit_s` limits one transfer.
        """
        self._senders, self._receivers = senders, receivers
        self._full_every, self._limit_s = full_every, limit_s
        hosts = (*senders, *receivers) if receivers else ()
        self._stores = {host: get_actor(host_store_name(host)) for host in hosts}
        self._has_group = False

    def deliver(self, version: int, plan: WeightPlan) -> int:
        """Bring a committed version to every host and return the bytes that the trainer's hosts sent in all attempts.

        Raises RunError, which names the host, if a host does not receive the version in `NUM_ATTEMPTS` attempts.
        """
        sent: list[int] = []
        for attempt in range(1, NUM_ATTEMPTS + 1):
            try:
                self._transfer(version, plan, sent, may_send_differences=attempt == 1)
                return sum(sent)
            except RunError as error:
                self._has_group = False
                if attempt == NUM_ATTEMPTS:
                    raise
                print(f"{error}; policy version {version} is transferred again", flush=True)
        raise AssertionError

    def prepare(self, version: int) -> None:
        """Have the hosts prepare for differences to a version that all engines have loaded, without waiting for it."""
        if not self._is_whole(version + 1):
            for host in self._receivers:
                self._stores[host].prepare.remote(version)

    def _is_whole(self, version: int) -> bool:
        """Whether a version is sent whole, and not as differences to an older one."""
        return version % self._full_every == 0

    def _transfer(self, version: int, plan: WeightPlan, sent: list[int], *, may_send_differences: bool) -> None:
        """Bring a version to the hosts that lack it; the bytes of each sender are added to `sent`."""
        stored: dict[int, list[int]] = self._call(
            self._stores, lambda _, store: store.versions.remote(plan.digest), _QUICK_S
        )
        receivers = tuple(host for host in self._receivers if version not in stored[host])
        if not receivers:
            return
        self._join(plan)
        common = set.intersection(*(set(stored[host]) for host in (*self._senders, *receivers)))
        base = max((older for older in common if older < version), default=None)
        if not may_send_differences or self._is_whole(version):
            base = None

        def take_part(host: int, store: Any) -> Any:
            call = store.send if host in self._senders else store.receive
            return call.remote(version, receivers, base)

        taking_part = {host: store for host, store in self._stores.items() if host in (*self._senders, *receivers)}
        results, failure = self._results(taking_part, take_part, self._limit_s)
        sent += [results[host] for host in self._senders if host in results]
        if failure is not None:
            raise failure

    def _join(self, plan: WeightPlan) -> None:
        if self._has_group or not self._stores:
            return
        name, hosts = secrets.token_hex(8), tuple(self._stores)
        try:
            self._call(self._stores, lambda _, store: store.join.remote(name, hosts, plan), self._limit_s)
        finally:
            RayStore(head_address(), _QUICK_S).delete_all(f"{name}/")
        self._has_group = True

    def _call(self, stores: Mapping[int, Any], call: Callable[[int, Any], Any], limit_s: float) -> dict[int, Any]:
        """Return the results of a call to each store. Raises the error of a host that failed."""
        results, failure = self._results(stores, call, limit_s)
        if failure is not None:
            raise failure
        return results

    def _results(
        self, stores: Mapping[int, Any], call: Callable[[int, Any], Any], limit_s: float
    ) -> tuple[dict[int, Any], RunError | None]:
        """Return the results of a call to each store that did not fail, and the error of the last host that did.

        Hosts later in the chain are those that notice damaged data. `limit_s` limits the wait for all of them together.
        """
        references = {host: call(host, store) for host, store in stores.items()}
        results, failure, ready = {}, None, finished(references, limit_s)
        for host, reference in references.items():
            try:
                if host not in ready:
                    raise unanswered(host_store_name(host), limit_s)
                results[host] = get_result(reference, host_store_name(host), limit_s)
            except RunError as error:
                failure = error
        return results, failure
