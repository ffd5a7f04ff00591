"""The trainer's client of the rollout service: blocking calls with timeouts, on the main rank only."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from megatron_bapo.cluster.ray_cluster import called_once, finished, get_actor, get_result
from megatron_bapo.cluster.store_transfer import StoreTransfer
from megatron_bapo.config.schema import Config
from megatron_bapo.errors import UserError
from megatron_bapo.records import Group, Trajectory
from megatron_bapo.rollout.generation import ScoredGroups
from megatron_bapo.rollout.weight_probe import ProbeDifference, WeightProbe
from megatron_bapo.weight_sync.plan import WeightPlan
from megatron_bapo.weight_sync.route import NUM_ATTEMPTS, TransferGroup

SERVICE = "rollout service"
_QUICK_S = 120.0
"""Timeout of a call that does not wait for engines. Added to the timeout of a call that the service itself bounds, so
that the service's error, which names the engine, comes first."""


class RolloutClient:
    """Calls the run's actors; the process must be connected to the run's Ray cluster."""

    def __init__(
        self, config: Config, sender_hosts: Sequence[int] = (), engine_hosts: Sequence[Sequence[int]] = ()
    ) -> None:
        """`sender_hosts` are the numbers of the trainer's hosts, and `engine_hosts` those of each node of an engine."""
        self._config = config
        self._transfer = StoreTransfer(
            tuple(dict.fromkeys(sender_hosts)),
            tuple(sorted({host for hosts in engine_hosts for host in hosts} - {*sender_hosts})),
            full_every=config.weight_sync.full_every,
            limit_s=config.rollout.start_timeout_s,
        )
        self._service = get_actor(SERVICE)

    def wait_for_engines(self) -> None:
        """Return when all engines have started."""
        limit_s = self._config.rollout.start_timeout_s + _QUICK_S
        get_result(self._service.wait_for_engines.remote(), SERVICE, limit_s)

    @cached_property
    def probe_token_ids(self) -> np.ndarray:
        """Tokens of the weight probe."""
        # The first call also waits until the service has loaded its prompts.
        return get_result(self._service.probe_token_ids.remote(), SERVICE, self._config.rollout.start_timeout_s)

    def sft_demonstrations(self, num: int) -> list[Trajectory]:
        """Return demonstrations of the next training prompts."""
        # A second call would take other prompts.
        call = called_once(self._service.sft_demonstrations).remote(num)
        return get_result(call, SERVICE, self._config.rollout.start_timeout_s)

    def take(self) -> tuple[ScoredGroups, dict[str, float]] | None:
        """Return the next rollout batch, and the seconds of each phase of waiting for it.

        Returns None if an engine needs weights first.
        """
        # A second call would take the batch after the one whose reply was lost.
        if (taken := self._awaited(called_once(self._service.take).remote())) is None:
            return None
        scored, parts, seconds = taken
        return replace(scored, groups=[group for part in _each(parts) for group in part]), seconds

    def validate(self, seed: int) -> tuple[ScoredGroups, Iterator[list[Group]]] | None:
        """Return the scores of responses to every held-out prompt, or None if an engine needs weights first.

        With `logging.dump_validation` the iterator yields parts of the whole responses, otherwise nothing.
        """
        if (validated := self._awaited(self._service.validate.remote(seed))) is None:
            return None
        scored, parts = validated
        return scored, _each(parts)

    def _awaited(self, reference: Any) -> Any:
        """Return the result of a call that the service bounds by its progress, for as long as the service answers."""
        while not finished({SERVICE: reference}, _QUICK_S):
            get_result(self._service.answer.remote(), SERVICE, _QUICK_S)
        return get_result(reference, SERVICE, _QUICK_S)

    def request_response(self, prompt: int, sample: int) -> Any:
        """Return a reference to the result of `RolloutService.sample_response`; the caller must bound its wait."""
        return self._service.sample_response.remote(prompt, sample)

    def failed(self) -> Any:
        """Return a reference that fails with the error that ends generation."""
        return self._service.failed.remote()

    def begin_saving(self, folder: Path) -> dict[str, Any]:
        """Return the state of the rollouts as JSON values; the service begins to write what the engines have generated.

        `folder` is the folder of a checkpoint that is being written.
        """
        return get_result(self._service.begin_saving.remote(folder), SERVICE, _QUICK_S)

    def finish_saving(self) -> None:
        """Return when the service has written what the engines had generated, and it is on disk."""
        get_result(self._service.finish_saving.remote(), SERVICE, self._config.rollout.start_timeout_s)

    def restore_data_state(self, state: dict[str, Any], checkpoint: Path) -> None:
        """Have the service restore a checkpoint's rollouts. Raises UserError for the state of a run without engines."""
        if "rollouts" not in state:
            raise UserError(
                f"{self._config.run_dir} was trained from rollout files, so its state does not tell which prompts are "
                "left; continue with --rollouts-from, or choose run_dir=<another folder>"
            )
        call = called_once(self._service.restore_data_state).remote(state, checkpoint)
        get_result(call, SERVICE, self._config.rollout.start_timeout_s)

    def load_weights(self, policy_version: int, plan: WeightPlan) -> int:
        """Have every engine load this version; return when all have.

        Returns the bytes that the trainer's hosts sent to other hosts' stores, or to engines' own stores.
        """
        settings = self._config.rollout
        is_stored = self._config.weight_sync.transport == "store"
        num_bytes = self._transfer.deliver(policy_version, plan) if is_stored else 0
        limit_s = settings.request_limit_s + NUM_ATTEMPTS * settings.start_timeout_s + _QUICK_S
        get_result(self._service.load_weights.remote(policy_version), SERVICE, limit_s)
        if is_stored:
            self._transfer.prepare(policy_version)
        return num_bytes

    def begin_transfer(self, policy_version: int, plan: str, broken: str) -> TransferGroup:
        """Return the group that transfers a version to the engines of `load_weights`, which comes next.

        `plan` is the plan's digest. `broken` is the name of the last group if it has failed.
        """
        # It waits for requests in flight, and for replacements that are probed.
        settings = self._config.rollout
        limit_s = settings.request_limit_s + settings.health_check_timeout_s + _QUICK_S
        return get_result(self._service.begin_transfer.remote(policy_version, plan, broken), SERVICE, limit_s)

    def repeat_transfer(self, group: TransferGroup, reason: str) -> TransferGroup:
        """Return the group that repeats the transfer in which `group` has failed."""
        limit_s = self._config.rollout.health_check_interval_s + _QUICK_S
        return get_result(self._service.repeat_transfer.remote(group, reason), SERVICE, limit_s)

    def sleep(self, level: int) -> None:
        """Have every engine free its GPU memory; return when all have."""
        # An engine may have to start and to load weights first.
        get_result(self._service.sleep.remote(level), SERVICE, 3 * self._config.rollout.start_timeout_s)

    def wake(self, tags: tuple[str, ...]) -> None:
        """Have every engine allocate the memory of `tags`; return when all have."""
        get_result(self._service.wake.remote(tags), SERVICE, self._config.rollout.start_timeout_s + _QUICK_S)

    def probe(self, probe: WeightProbe) -> list[ProbeDifference]:
        """Return how far the log-probs of each serving engine are from the trainer's.

        Replacements of lost engines must pass the probe, too, before they serve.
        """
        limit_s = self._config.rollout.health_check_timeout_s + _QUICK_S
        return get_result(self._service.probe.remote(probe), SERVICE, limit_s)


def _each(parts: list[Any]) -> Iterator[list[Group]]:
    """Yield the parts of a batch in order; each leaves the object store when nothing uses it any more."""
    while parts:
        yield get_result(parts.pop(0), SERVICE, _QUICK_S)
