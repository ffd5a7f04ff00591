"""The one scheduler of all rollouts: keeps the engines fed, scores groups as they finish, fills the buffer.

    prompts ─► in flight: segments on engines (router) ─► scoring ─► buffer ─► take: the trainer's batch
       ▲            │ failed too often: set aside            │ uniform, too old: dropped
       └────────────┴───── pump: may one more be started? ◄──┘

Synchronous, asynchronous and partial rollouts differ in the answer to that question and in nothing else. Plain asyncio,
no clock but the loop's: the service runs it against Ray actors, a simulation against modelled engines.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, NoReturn

import numpy as np

from megatron_bapo.config.rollout import RolloutConfig
from megatron_bapo.data.curriculum import pass_rate
from megatron_bapo.data.prompt_stream import PromptStream
from megatron_bapo.errors import FunctionFailed, RunError
from megatron_bapo.metrics.values import Metric, Sum
from megatron_bapo.records import Group, HeldRollouts
from megatron_bapo.rollout.accounting import Ledger, Outcome
from megatron_bapo.rollout.generation import (
    Decode,
    Environment,
    FailureAllowance,
    GrowingGroup,
    ScoredGroups,
    SetAside,
    grow,
    growing_group,
    rollout_sampling,
)
from megatron_bapo.rollout.messages import Generated, GenerationRequest
from megatron_bapo.rollout.replay_buffer import ReplayBuffer, staleness_metrics
from megatron_bapo.rollout.router import Router
from megatron_bapo.rollout.tokenization import TokenizedPrompt
from megatron_bapo.rollout.unfinished import restored_answer, unfinished_group

Score = Callable[[Group], Awaitable[ScoredGroups]]
"""One finished group with its rewards."""


@dataclass(frozen=True)
class Surroundings:
    """What the scheduler is given to work with."""

    stream: PromptStream
    prompts: Mapping[str, TokenizedPrompt]
    """By prompt id."""
    router: Router
    score: Score
    decode: Decode
    set_aside: Callable[[SetAside], None]
    """Told of each prompt that engines failed at too often, or whose reward failed."""
    environment: Environment | None = None
    """What replies between the turns of an answer."""


@dataclass
class _InFlight:
    growing: GrowingGroup
    task: asyncio.Task[None] | None = None
    """None in a resumed run that has not begun."""


@dataclass
class _Counts:
    """From one batch to the next."""

    reward_timeouts: int = 0
    uniform: int = 0
    """Groups dropped because their rewards are equal."""
    request_failures: int = 0


class Producer:
    """Owns all prompts between the stream and the trainer."""

    def __init__(self, settings: RolloutConfig, groups_per_batch: int, seed: int, surroundings: Surroundings) -> None:
        self._settings = settings
        self._groups_per_batch = groups_per_batch
        self._seed = seed
        self._given = surroundings
        self._sampling = rollout_sampling(settings)
        self._buffer = ReplayBuffer(max_staleness=settings.max_staleness, max_reuse=settings.max_reuse, seed=seed)
        self._ledger = Ledger(lambda: surroundings.stream.num_drawn)
        self._returned: deque[tuple[int, str]] = deque()
        self._unmeasured: dict[int, tuple[str, float]] = {}
        """Prompt ids and pass rates that the curriculum has not been told of, by serial number."""
        self._in_flight: dict[int, _InFlight] = {}
        self._changed = asyncio.Event()
        self._open = asyncio.Event()
        """Answers may get another segment."""
        if settings.mode == "async":
            self._open.set()
        self._failure: BaseException | None = None
        self._policy_version = 0
        self._num_batches = 0
        self._taken_version: int | None = None
        """Of the weights that the latest batch was handed out under; while they serve, the next batch will meet newer
        ones."""
        self._taking = False
        self._begun = False
        self._reset_counts()

    @property
    def num_batches(self) -> int:
        """That were handed out."""
        return self._num_batches

    async def take(self) -> ScoredGroups:
        """The next batch.

        Raises RunError that names who did not answer when it is not complete after `request_timeout_s`, and whatever
        ended scoring.
        """
        self._begin()
        self._taking = True
        self._open.set()
        self._pump()
        try:
            async with asyncio.timeout(self._settings.request_timeout_s):
                while self._failure is None and len(self._buffer.fresh()) < self._num_fresh_needed():
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            raise RunError(self._incomplete()) from None
        finally:
            self._taking = False
            if self._settings.mode == "sync":
                self._open.clear()
        if self._failure is not None:
            raise self._failure
        return self._hand_out()

    def fail(self, error: BaseException) -> None:
        """Nothing more is started; whoever takes is told why."""
        self._failure = self._failure or error
        self._changed.set()

    async def failed(self) -> NoReturn:
        """Wait for what ends generation, and raise it."""
        while self._failure is None:
            self._changed.clear()
            await self._changed.wait()
        raise self._failure

    async def refresh(self, policy_version: int, load: Callable[[], Awaitable[None]]) -> None:
        """Have `load` bring new weights to the engines, with nothing in flight on them meanwhile.

        Then groups whose tokens have become too old are dropped, in the buffer and in flight.
        """
        await self.pause()
        await load()
        self._policy_version = policy_version
        for entry in self._buffer.evict(policy_version):
            if entry.num_uses == 0:
                self._ledger.close(entry.serial, "dropped_stale")
        for serial, in_flight in [*self._in_flight.items()]:
            oldest = in_flight.growing.oldest_version
            if oldest is not None and not self._buffer.admits(oldest, policy_version):
                if in_flight.task is not None:
                    in_flight.task.cancel()
                self._close(serial, "dropped_stale")
        self._begin()
        self.resume()

    async def pause(self) -> None:
        """Return when the engines have nothing in flight; what they had goes on at `resume`, with what it has."""
        router, limit_s = self._given.router, self._settings.request_timeout_s
        router.pause()
        if self._settings.on_refresh != "drain":
            await router.abort(self._settings.health_check_timeout_s)
        await router.drain(limit_s)

    def resume(self) -> None:
        self._given.router.resume()
        self._pump()

    def take_worked_examples(self, num: int) -> list[TokenizedPrompt]:
        """Prompts for the warm start."""
        prompt_ids = self._take_prompts(num)
        self._ledger.draw_worked_examples(num)
        return [self._given.prompts[prompt_id] for prompt_id in prompt_ids]

    def state_dict(self) -> dict[str, Any]:
        """JSON values from which a producer continues, with what `held` gives at the same instant."""
        state: dict[str, Any] = {
            "num_batches": self._num_batches,
            "taken_version": self._taken_version,
            "ledger": self._ledger.state_dict(),
            "counts": asdict(self._counts),
            "reward_failures": self._allowance.num_used,
        }
        if self._given.stream.curriculum is not None:
            state["unmeasured"] = [[serial, *rate] for serial, rate in self._unmeasured.items()]
        return state

    def held(self) -> HeldRollouts:
        """What was generated for later batches: scored groups, and of the others what is known of their answers."""
        told = self._given.router.told()
        groups = [unfinished_group(serial, entry.growing, told) for serial, entry in self._in_flight.items()]
        return HeldRollouts(tuple(self._buffer.groups()), tuple(group for group in groups if group.answers))

    def load_state_dict(self, state: dict[str, Any], held: HeldRollouts = HeldRollouts()) -> None:  # noqa: B008
        """Continue: what is in `held` goes on as it was, prompts that were open and are not go back to the stream.

        The stream must have been restored before, and nothing may have been taken. Raises UserError when `held` is not
        of the same instant.
        """
        self._num_batches, self._taken_version = state["num_batches"], state.get("taken_version")
        self._ledger.load_state_dict(state["ledger"])
        for entry in held.buffered:
            if entry.num_uses == 0:
                self._ledger.take_back(entry.serial, entry.group.prompt.prompt_id, "buffered")
            self._buffer.add(entry.serial, entry.group, entry.num_uses)
        for group in held.unfinished:
            self._ledger.take_back(group.serial, group.prompt_id, "in_flight")
            growing = self._growing(group.serial, group.prompt_id)
            growing.answers = [restored_answer(answer) for answer in group.answers]
            self._in_flight[group.serial] = _InFlight(growing)
        self._returned = deque(self._ledger.returned())
        self._unmeasured = {serial: (prompt_id, rate) for serial, prompt_id, rate in state.get("unmeasured", [])}
        self._counts = _Counts(**state.get("counts", {}))
        self._allowance.num_used = state.get("reward_failures", 0)

    async def close(self) -> None:
        """Let go of everything in flight."""
        tasks = [in_flight.task for in_flight in self._in_flight.values() if in_flight.task is not None]
        self._in_flight.clear()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _begin(self) -> None:
        """From now on engines are asked, first for what a resumed run holds."""
        if not self._begun:
            self._begun = True
            for serial in self._in_flight:
                self._launch(serial)

    def _pump(self) -> None:
        """Start as many prompts as may be started."""
        while self._failure is None and self._may_start():
            self._start()

    def _may_start(self) -> bool:
        """Whether one more group would be used, and before its tokens are too old.

        A group that is started now is handed out after all those before it: so many batches from now, each of which
        meets weights that are one version newer.
        """
        num_ahead, settings = len(self._in_flight) + len(self._buffer.fresh()), self._settings
        if settings.mode == "sync":
            factor = settings.partial_rollout.over_sampling
            return self._taking and num_ahead < int(np.ceil(factor * self._num_fresh_needed()))
        if self._taking and num_ahead < self._num_fresh_needed():
            return True
        fresh_per_batch = -(-self._groups_per_batch // settings.max_reuse)
        num_newer = num_ahead // fresh_per_batch + (self._taken_version == self._policy_version)
        return self._begun and num_newer <= settings.max_staleness

    def _num_fresh_needed(self) -> int:
        return self._buffer.num_fresh_needed(self._groups_per_batch)

    def _start(self) -> None:
        if self._returned:
            serial, prompt_id = self._returned.popleft()
            self._ledger.move(serial, "in_flight")
        else:
            (prompt_id,) = self._take_prompts(1)
            serial = self._ledger.draw(prompt_id)
        self._in_flight[serial] = _InFlight(self._growing(serial, prompt_id))
        self._launch(serial)

    def _growing(self, serial: int, prompt_id: str) -> GrowingGroup:
        batch, index = divmod(serial, self._groups_per_batch)
        prompt, seed = self._given.prompts[prompt_id], _batch_seed(self._seed, batch)
        return growing_group(prompt, self._sampling, batch_seed=seed, index=index, order=serial)

    def _launch(self, serial: int) -> None:
        in_flight = self._in_flight[serial]
        in_flight.task = asyncio.get_running_loop().create_task(
            self._produce(serial, in_flight.growing), name=in_flight.growing.prompt.prompt.prompt_id
        )

    def _take_prompts(self, num: int) -> list[str]:
        stream = self._given.stream
        before = stream.num_skipped
        taken = [prompt.prompt_id for prompt in stream.take(num)]
        self._ledger.skip(stream.num_skipped - before)
        return taken

    async def _produce(self, serial: int, growing: GrowingGroup) -> None:
        """One prompt's way from the stream into the buffer, or to another end."""
        settings = self._settings
        try:
            await grow(
                growing,
                self._send,
                self._given.decode,
                self._given.environment,
                max_failures=settings.max_request_failures,
                sticky=settings.on_refresh == "keep",
            )
            scored = await self._given.score(growing.group(self._given.decode))
            self._admit(serial, growing, scored)
        except SetAside as reason:
            self._drop(serial, reason)
        except FunctionFailed as error:
            try:
                self._drop(serial, self._allowance.use(growing.prompt.prompt.prompt_id, error))
            except FunctionFailed as last:
                self.fail(last)
        except Exception as error:  # the task's end
            self.fail(error)
        self._counts.request_failures += growing.num_failures
        self._changed.set()
        self._pump()

    async def _send(self, request: GenerationRequest, *, order: int, prefer: str | None) -> tuple[str, Generated]:
        await self._open.wait()
        return await self._given.router.generate(request, order=order, prefer=prefer)

    def _admit(self, serial: int, growing: GrowingGroup, scored: ScoredGroups) -> None:
        (group,) = scored.groups
        oldest, filters = growing.oldest_version, self._settings.filter_groups
        assert oldest is not None, "a finished group has tokens"
        self._counts.reward_timeouts += scored.num_reward_timeouts
        if self._given.stream.curriculum is not None:
            self._unmeasured[serial] = (group.prompt.prompt_id, pass_rate(group))
        is_uniform = len({trajectory.reward for trajectory in group.trajectories}) == 1
        may_drop = self._counts.uniform < (filters.max_num_gen_batches - 1) * self._groups_per_batch
        if not self._buffer.admits(oldest, self._policy_version):
            self._close(serial, "dropped_stale")
        elif filters.enable and is_uniform and may_drop:
            self._counts.uniform += 1
            self._close(serial, "dropped_uniform")
        else:
            del self._in_flight[serial]
            self._buffer.add(serial, group)
            self._ledger.move(serial, "buffered")

    def _drop(self, serial: int, reason: SetAside) -> None:
        self._given.set_aside(reason)
        self._close(serial, "set_aside")

    def _close(self, serial: int, outcome: Outcome) -> None:
        del self._in_flight[serial]
        self._ledger.close(serial, outcome)

    def _hand_out(self) -> ScoredGroups:
        self._measure()
        taken = self._buffer.take(self._groups_per_batch, batch=self._num_batches)
        for entry in taken:
            if entry.num_uses == 1:
                self._ledger.close(entry.serial, "trained")
        self._num_batches += 1
        self._taken_version = self._policy_version
        groups = [entry.group for entry in taken]
        metrics: dict[str, Metric] = {
            **self._ledger.metrics(),
            **staleness_metrics(groups, self._policy_version, self._settings.max_staleness),
            "rollout/request_failures": Sum(self._counts.request_failures),
            "rollout/reward_failures": Sum(self._allowance.num_used),
        }
        scored = ScoredGroups(groups, self._counts.reward_timeouts, metrics)
        self._reset_counts()
        self._pump()
        return scored

    def _measure(self) -> None:
        """Tell the curriculum of the groups scored since the last batch: then, and in their order, so that it does not
        matter which was faster.
        """
        if (curriculum := self._given.stream.curriculum) is not None:
            for _, (prompt_id, rate) in sorted(self._unmeasured.items()):
                curriculum.measure(prompt_id, rate)
            self._unmeasured.clear()

    def _reset_counts(self) -> None:
        self._counts = _Counts()
        self._allowance = FailureAllowance(self._settings.max_reward_failures)

    def _incomplete(self) -> str:
        return (
            f"after rollout.request_timeout_s={self._settings.request_timeout_s:.0f} s the batch has "
            f"{len(self._buffer.fresh())} of {self._num_fresh_needed()} new groups; still to answer: "
            f"{self._given.router.unanswered()}; see the engines' logs, or raise the limit"
        )


def _batch_seed(seed: int, batch: int) -> int:
    return int(np.random.SeedSequence([seed, batch]).generate_state(1)[0] >> 1)
