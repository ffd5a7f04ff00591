"""The rollout scheduler: keeps the engines busy, has finished groups scored, and fills the replay buffer.

    prompts ─► in flight: segments on engines (router) ─► scoring ─► buffer ─► take: the trainer's batch
       ▲            │ failed too often: quarantined            │ uniform, too old: dropped
       └────────────┴──── pump: may one more prompt start? ◄───┘

Synchronous, asynchronous and partial rollouts differ only in the rule that answers this question (`_may_start`). The
scheduler is plain asyncio and uses no clock but the event loop's: the rollout service runs it with Ray actors, the
simulator with modelled engines.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import asdict
from typing import Any, NoReturn

import numpy as np

from megatron_bapo.config.rollout import IDLE_LIMIT, RolloutConfig
from megatron_bapo.errors import FunctionFailed, RunError
from megatron_bapo.event_loop import TurnBudget, wait_progressing
from megatron_bapo.metrics.values import Metric, Sum
from megatron_bapo.records import InFlightState
from megatron_bapo.rollout.accounting import Ledger, Outcome
from megatron_bapo.rollout.batch_counts import BatchCounts
from megatron_bapo.rollout.generation import ScoredGroups, generate_group
from megatron_bapo.rollout.in_flight_group import (
    InFlightGroup,
    batch_seed,
    create_in_flight_group,
    oldest_versions,
    rollout_sampling,
)
from megatron_bapo.rollout.in_flight_state import UnfinishedGroups, restored_trajectory
from megatron_bapo.rollout.messages import Generated, GenerationRequest
from megatron_bapo.rollout.pass_rates import PassRates
from megatron_bapo.rollout.quarantine import FailureBudget, QuarantinedPrompt, QuarantineStreak
from megatron_bapo.rollout.replay_buffer import ReplayBuffer, staleness_metrics
from megatron_bapo.rollout.scheduler_deps import SchedulerDeps
from megatron_bapo.rollout.tokenization import TokenizedPrompt
from megatron_bapo.rollout.uniform_groups import UniformGroups

STARTS_PER_TURN = 32
"""Most groups that start in one turn of the event loop; each takes a tenth of a millisecond."""


class RolloutScheduler:
    """Owns all prompts between the prompt stream and the trainer."""

    def __init__(self, settings: RolloutConfig, groups_per_batch: int, seed: int, deps: SchedulerDeps) -> None:
        self._settings = settings
        self._groups_per_batch = groups_per_batch
        self._seed = seed
        self._deps = deps
        self._sampling = rollout_sampling(settings)
        limits = {"max_staleness": settings.max_staleness, "max_reuse": settings.max_reuse}
        self._buffer = ReplayBuffer(**limits, on_stale=settings.on_stale, seed=seed)
        self._uniform = UniformGroups(settings.filter_groups, groups_per_batch)
        self._ledger = Ledger(lambda: deps.stream.num_taken)
        self._returned: deque[tuple[int, str]] = deque()
        self._pass_rates = PassRates(deps.stream.curriculum)
        self._in_flight: dict[int, InFlightGroup] = {}
        self._tasks: dict[int, asyncio.Task[None]] = {}
        """Tasks of groups in flight; a group has none before it is launched."""
        self._resumed: deque[int] = deque()
        """Serial numbers of the groups that a checkpoint had in flight and that are not launched yet."""
        self._starts = TurnBudget(STARTS_PER_TURN, self._pump)
        self._oldest_versions: dict[int, int] = {}
        """Oldest versions of the groups that were in flight when the trainer began to wait; newer ones never expire."""
        self._streak = QuarantineStreak()
        self._changed, self._num_scored = asyncio.Event(), 0
        self._open = asyncio.Event()
        """Set while trajectories may request another segment."""
        if settings.mode == "async":
            self._open.set()
        self._failure: BaseException | None = None
        self._policy_version = 0
        self.num_batches = 0
        """Number of batches that the trainer has taken."""
        self._taken_version: int | None = None
        """Policy version when the latest batch was taken; while it is current, the next batch trains newer weights."""
        self._taking = False
        self._begun = False
        self._reset_counts()

    async def take(self) -> ScoredGroups:
        """Return the next batch when it is complete.

        With `on_stale=wait` it has all groups that would be too old for the following batch. Raises RunError that names
        the engines with pending requests if no group was scored for `idle_limit_s`, and any error that has ended it.
        """
        self._begin()
        self._taking = True
        self._oldest_versions = oldest_versions(self._in_flight)
        self._open.set()
        self._pump()
        try:
            await wait_progressing(self._changed, self._is_over, lambda: self._num_scored, self._settings.idle_limit_s)
        except TimeoutError:
            raise RunError(self._incomplete()) from None
        finally:
            self._taking = False
            if self._settings.mode == "sync":
                self._open.clear()
        if self._failure is not None:
            raise self._failure
        return self._take_batch()

    def fail(self, error: BaseException) -> None:
        """End generation: nothing more is started, and `take` raises the first such error."""
        self._failure = self._failure or error
        self._changed.set()

    async def failed(self) -> NoReturn:
        """Wait until an error ends generation, and raise it."""
        while self._failure is None:
            self._changed.clear()
            await self._changed.wait()
        raise self._failure

    async def update_weights(self, policy_version: int, load: Callable[[], Awaitable[None]]) -> None:
        """Have `load` update the engines' weights while no request is in flight; none is sent before `resume`.

        Groups whose tokens have become too old are then dropped from the buffer and from those in flight.
        """
        await self.pause()
        await load()
        self._policy_version = policy_version
        self._drop_stale()
        self._begin()

    async def pause(self) -> None:
        """Return when no request is in flight; aborted trajectories keep their tokens and continue at `resume`."""
        router, limit_s = self._deps.router, self._settings.request_limit_s
        router.pause()
        if self._settings.on_weight_update != "drain":
            await router.abort(self._settings.health_check_timeout_s)
        await router.drain(limit_s)

    def resume(self) -> None:
        self._deps.router.resume()
        self._pump()

    def take_sft_prompts(self, num: int) -> list[TokenizedPrompt]:
        """Take prompts from the stream for the warm start."""
        prompt_ids = self._take_prompts(num)
        self._ledger.add_warm_start(num)
        return [self._deps.prompts[prompt_id] for prompt_id in prompt_ids]

    def state_dict(self) -> dict[str, Any]:
        """Return the scheduler's state as JSON values, to be saved with `in_flight_state` of the same instant."""
        return {
            "num_batches": self.num_batches,
            "taken_version": self._taken_version,
            "ledger": self._ledger.state_dict(),
            "counts": asdict(self._counts) | {"uniform": self._uniform.num_dropped},
            "reward_failures": self._failure_budget.num_used,
            "unmeasured": self._pass_rates.state_dict(),
        }

    def in_flight_state(self) -> InFlightState:
        """Return what was generated for later batches: buffered groups and partial trajectories.

        Tokens are not copied, and later calls do not change the result.
        """
        unfinished = UnfinishedGroups(self._in_flight.values(), self._deps.router.partial_outputs())
        return InFlightState((*self._buffer.groups(), *self._uniform.groups()), unfinished)

    def load_state_dict(self, state: dict[str, Any], in_flight: InFlightState = InFlightState()) -> None:  # noqa: B008
        """Restore a checkpoint's state; open prompts without an entry in `in_flight` are generated from the start.

        The stream must have been restored before, and no batch taken. Raises UserError if `in_flight` is not of the
        same instant as `state`.
        """
        self.num_batches, self._taken_version = state["num_batches"], state.get("taken_version")
        self._ledger.load_state_dict(state["ledger"])
        for entry in in_flight.buffered:
            if entry.num_uses == 0:
                self._ledger.restore(entry.serial, entry.group.prompt.prompt_id, "buffered")
            if entry.num_uses == 0 and self._uniform.accepts(entry.group):
                self._uniform.add(entry.serial, entry.group)
            else:
                self._buffer.add(entry.serial, entry.group, entry.num_uses)
        for saved in in_flight.unfinished:
            self._ledger.restore(saved.serial, saved.prompt_id, "in_flight")
            group = self._in_flight_group(saved.serial, saved.prompt_id)
            group.trajectories = [restored_trajectory(trajectory) for trajectory in saved.trajectories]
            self._in_flight[saved.serial] = group
        self._returned = deque(self._ledger.returned())
        self._pass_rates.load_state_dict(state.get("unmeasured", []))
        counts = dict(state.get("counts", {}))
        self._uniform.num_dropped = counts.pop("uniform", 0)
        self._counts = BatchCounts(**counts)
        self._failure_budget.num_used = state.get("reward_failures", 0)

    async def close(self) -> None:
        """Cancel everything in flight."""
        self._starts.close()
        tasks = [*self._tasks.values()]
        self._in_flight.clear()
        self._tasks.clear()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _begin(self) -> None:
        """Launch the groups that a checkpoint had in flight; has no effect after the first call."""
        if not self._begun:
            self._begun = True
            self._resumed.extend(self._in_flight)

    def _pump(self) -> None:
        """Start prompts as long as `_may_start` allows, after those that a checkpoint had in flight."""
        try:
            while self._failure is None and (self._resumed or self._may_start()) and self._starts.take():
                if self._resumed:
                    self._launch(self._resumed.popleft())
                else:
                    self._start()
        except Exception as error:  # the event loop may be the caller; `take` raises the error
            self.fail(error)

    def _may_start(self) -> bool:
        """Return whether one more group would be used, and before its tokens are too old.

        Each batch makes the weights one version newer. With `on_stale=drop`, over-sampling starts more groups than can
        be used in time if all of them are slow.
        """
        num_ahead, settings = len(self._in_flight) + self._num_ready(), self._settings
        if self._taking and num_ahead < self._num_fresh_needed():
            return True
        num_newer = int(self._taken_version == self._policy_version)
        in_time = self._buffer.is_in_time(self._groups_per_batch, num_ahead, num_newer)
        if settings.mode == "async":
            return self._begun and in_time
        num_wanted = int(np.ceil(settings.partial_rollout.over_sampling * self._num_fresh_needed()))
        return self._taking and num_ahead < num_wanted and (in_time or settings.on_stale == "drop")

    def _is_over(self) -> bool:
        return self._failure is not None or self._is_complete()

    def _is_complete(self) -> bool:
        """Return whether the trainer may take the batch."""
        if self._num_ready() < self._num_fresh_needed():
            return False
        in_flight = [version for serial, version in self._oldest_versions.items() if serial in self._in_flight]
        return not self._buffer.must_wait(self._groups_per_batch, in_flight, self._policy_version)

    def _num_ready(self) -> int:
        """Return the number of scored groups that were never trained on."""
        return self._buffer.num_fresh + self._uniform.num_kept

    def _num_fresh_needed(self) -> int:
        return self._buffer.num_fresh_needed(self._groups_per_batch)

    def _start(self) -> None:
        if self._returned:
            serial, prompt_id = self._returned.popleft()
            self._ledger.move(serial, "in_flight")
        else:
            (prompt_id,) = self._take_prompts(1)
            serial = self._ledger.open(prompt_id)
        self._in_flight[serial] = self._in_flight_group(serial, prompt_id)
        self._launch(serial)

    def _in_flight_group(self, serial: int, prompt_id: str) -> InFlightGroup:
        batch, index = divmod(serial, self._groups_per_batch)
        prompt, seed = self._deps.prompts[prompt_id], batch_seed(self._seed, batch)
        return create_in_flight_group(prompt, self._sampling, batch_seed=seed, index=index, prompt_serial=serial)

    def _launch(self, serial: int) -> None:
        if (group := self._in_flight.get(serial)) is None:  # dropped as stale before it was launched
            return
        work, name = self._run_group(serial, group), group.prompt.prompt.prompt_id
        self._tasks[serial] = asyncio.get_running_loop().create_task(work, name=name)

    def _take_prompts(self, num: int) -> list[str]:
        stream = self._deps.stream
        before = stream.num_skipped
        taken = [prompt.prompt_id for prompt in stream.take(num)]
        self._ledger.skip(stream.num_skipped - before)
        return taken

    async def _run_group(self, serial: int, group: InFlightGroup) -> None:
        """Generate and score a group, and put it into the buffer or drop it."""
        try:
            await self._generate(serial, group)
            self._counts.request_failures += group.num_failures
            if self._settings.filter_groups.enable:
                still_open = (*self._in_flight, *(each for each, _ in self._returned))
                self._close_uniform(self._uniform.drop_before(min(still_open, default=math.inf)))
        except Exception as error:  # nobody awaits this task; `take` raises its error
            self.fail(error)
        self._changed.set()
        self._pump()

    async def _generate(self, serial: int, group: InFlightGroup) -> None:
        """Generate and score a group or quarantine its prompt. Raises the error that ends generation."""
        deps, limit, sticky = self._deps, self._settings.max_request_failures, self._settings.on_weight_update == "keep"
        try:
            await generate_group(group, self._send, deps.decode, deps.environment, max_failures=limit, sticky=sticky)
            self._admit(serial, group.oldest_version, await deps.score(await group.group(deps.decode)))
        except (QuarantinedPrompt, FunctionFailed) as error:
            if serial not in self._in_flight:  # dropped as stale while a task group awaited the failed task's siblings
                return
            if isinstance(error, FunctionFailed):
                self._quarantine(serial, self._failure_budget.use(group.prompt.prompt.prompt_id, error))
            else:
                self._quarantine(serial, self._streak.add(error, len(self._in_flight)))

    async def _send(
        self, request: GenerationRequest, *, prompt_serial: int, prefer: str | None, alone: bool
    ) -> tuple[str, Generated]:
        await self._open.wait()
        return await self._deps.router.generate(request, prompt_serial=prompt_serial, prefer=prefer, alone=alone)

    def _admit(self, serial: int, oldest: int | None, scored: ScoredGroups) -> None:
        (group,) = scored.groups
        assert oldest is not None, "a finished group has tokens"
        self._counts.reward_timeouts += scored.num_reward_timeouts
        self._streak.clear()
        self._pass_rates.add(serial, group)
        if not self._buffer.admits(oldest, self._policy_version):
            self._counts.add_stale(self._in_flight[serial].lengths)
            self._close(serial, "dropped_stale")
            return
        del self._in_flight[serial], self._tasks[serial]
        self._ledger.move(serial, "buffered")
        self._num_scored += 1
        if self._uniform.accepts(group):
            self._uniform.add(serial, group)
        else:
            self._buffer.add(serial, group)

    def _drop_stale(self) -> None:
        """Drop the groups with tokens that are too old under the current policy version."""
        for entry in self._buffer.evict(self._policy_version):
            if entry.num_uses == 0:
                self._counts.add_stale(entry.group.lengths)
                self._ledger.close(entry.serial, "dropped_stale")
        for serial, version in oldest_versions(self._in_flight).items():
            if not self._buffer.admits(version, self._policy_version):
                if serial in self._tasks:
                    self._tasks[serial].cancel()
                self._counts.add_stale(self._in_flight[serial].lengths)
                self._close(serial, "dropped_stale")
        self._close_uniform(self._uniform.remove_stale(lambda v: not self._buffer.admits(v, self._policy_version)))

    def _close_uniform(self, serials: list[int]) -> None:
        for serial in serials:
            self._ledger.close(serial, "dropped_uniform")

    def _quarantine(self, serial: int, reason: QuarantinedPrompt) -> None:
        self._deps.quarantine(reason)
        self._close(serial, "quarantined")

    def _close(self, serial: int, outcome: Outcome) -> None:
        del self._in_flight[serial]
        self._tasks.pop(serial, None)
        self._ledger.close(serial, outcome)

    def _take_batch(self) -> ScoredGroups:
        self._pass_rates.report()
        dropped, kept = self._uniform.end_batch(self._num_fresh_needed() - self._buffer.num_fresh)
        self._close_uniform(dropped)
        for entry in kept:
            self._buffer.add(entry.serial, entry.group)
        taken = self._buffer.take(self._groups_per_batch, batch=self.num_batches)
        for entry in taken:
            if entry.num_uses == 1:
                self._ledger.close(entry.serial, "trained")
        self.num_batches += 1
        self._taken_version = self._policy_version
        groups = [entry.group for entry in taken]
        metrics: dict[str, Metric] = {
            **self._ledger.metrics(),
            **staleness_metrics(groups, self._policy_version, self._settings.max_staleness),
            **self._counts.metrics(),
            "rollout/reward_failures": Sum(self._failure_budget.num_used),
        }
        scored = ScoredGroups(groups, self._counts.reward_timeouts, metrics)
        self._reset_counts()
        self._pump()
        return scored

    def _reset_counts(self) -> None:
        self._counts = BatchCounts()
        self._failure_budget = FailureBudget(self._settings.max_reward_failures)

    def _incomplete(self) -> str:
        num, needed, limit_s = self._num_ready(), self._num_fresh_needed(), self._settings.idle_limit_s
        awaited = ", but older ones are unfinished (rollout.on_stale=wait)" if num >= needed else ""
        return (
            f"no group was scored for {limit_s:.0f} s ({IDLE_LIMIT}); the batch has {num} of {needed} new groups"
            f"{awaited}; still pending: {self._deps.pending()}; see the engines' logs, or raise the limit"
        )
