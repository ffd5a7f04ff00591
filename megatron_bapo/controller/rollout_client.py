"""The trainer's side of the rollout service: plain calls with time limits, on the main rank only."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np

from megatron_bapo.config.schema import Config
from megatron_bapo.controller.cluster import ask, find
from megatron_bapo.controller.host_store import host_store_name
from megatron_bapo.errors import UserError
from megatron_bapo.records import Trajectory
from megatron_bapo.rollout.generation import ScoredGroups
from megatron_bapo.rollout.weight_probe import WeightProbe

SERVICE = "rollout service"
_QUICK_S = 120.0


class RolloutClient:
    """Holds the connection to the run's actors."""

    def __init__(self, config: Config, store_hosts: Sequence[int] = ()) -> None:
        """Of a process that is connected to the run's cluster.

        `store_hosts` are the engines' hosts whose stores are filled from the trainer's.
        """
        self._config = config
        self._stores = {host_store_name(host): find(host_store_name(host)) for host in store_hosts}
        self._service = find(SERVICE)

    def wait_for_engines(self) -> None:
        ask(self._service.wait_for_engines.remote(), SERVICE, self._config.rollout.start_timeout_s)

    @cached_property
    def probe_token_ids(self) -> np.ndarray:
        # The first call also waits for the service to have loaded its prompts.
        return ask(self._service.probe_token_ids.remote(), SERVICE, self._config.rollout.start_timeout_s)

    def worked_examples(self, num: int) -> list[Trajectory]:
        return ask(self._service.worked_examples.remote(num), SERVICE, self._config.rollout.start_timeout_s)

    def take(self) -> tuple[ScoredGroups, dict[str, float]]:
        """The next rollout batch, and the seconds of each phase of waiting for it."""
        # The service has the shorter limit, and says who did not answer.
        return ask(self._service.take.remote(), SERVICE, self._config.rollout.request_timeout_s + _QUICK_S)

    def validate(self, seed: int) -> ScoredGroups:
        return ask(self._service.validate.remote(seed), SERVICE, self._config.rollout.request_timeout_s)

    def request_answer(self, prompt: int, sample: int) -> Any:
        """The reference to what `RolloutService.answer` gives; whoever waits for many bounds the wait."""
        return self._service.answer.remote(prompt, sample)

    def failed(self) -> Any:
        """The reference that fails with what ends generation."""
        return self._service.failed.remote()

    def data_state(self) -> dict[str, Any]:
        return ask(self._service.data_state.remote(), SERVICE, _QUICK_S)

    def restore_data_state(self, state: dict[str, Any]) -> None:
        """Raises UserError for the state of a run without engines."""
        if "rollouts" not in state:
            raise UserError(
                f"{self._config.run_dir} was trained from files of rollouts, so engines do not know which prompts are "
                "left; continue with --rollouts-from, or choose run_dir=<another folder>"
            )
        ask(self._service.restore_data_state.remote(state), SERVICE, self._config.rollout.start_timeout_s)

    def load_weights(self, policy_version: int) -> int:
        """Every engine loads this version from its host's store; returns when all have.

        The bytes that came from the trainer's stores to those of the engines' own.
        """
        settings = self._config.rollout
        pulls = {name: store.pull.remote(policy_version) for name, store in self._stores.items()}
        num_bytes = sum(ask(pull, name, settings.start_timeout_s).num_bytes for name, pull in pulls.items())
        limit_s = settings.request_timeout_s + settings.start_timeout_s + _QUICK_S
        ask(self._service.load_weights.remote(policy_version), SERVICE, limit_s)
        return num_bytes

    def sleep(self, level: int) -> None:
        """Every engine frees its memory; returns when all have."""
        # One may have to start and to load weights first.
        ask(self._service.sleep.remote(level), SERVICE, 3 * self._config.rollout.start_timeout_s)

    def wake(self, tags: tuple[str, ...]) -> None:
        ask(self._service.wake.remote(tags), SERVICE, self._config.rollout.start_timeout_s)

    def probe(self, probe: WeightProbe) -> list[float]:
        """By how much each serving engine differs from the trainer; those that come back later have to pass, too."""
        limit_s = self._config.rollout.health_check_timeout_s + _QUICK_S
        return ask(self._service.probe.remote(probe), SERVICE, limit_s)
