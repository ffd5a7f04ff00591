"""The rollout service: a Ray actor with the rollout scheduler, the engine fleet and the reward worker processes."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar, cast

import numpy as np

from megatron_bapo.cluster.engine_actor import EngineActor
from megatron_bapo.cluster.engine_fleet import EngineFleet
from megatron_bapo.cluster.engine_transfers import EngineTransfers
from megatron_bapo.cluster.ray_cluster import put, put_key
from megatron_bapo.config.rollout import IDLE_LIMIT
from megatron_bapo.config.schema import Config
from megatron_bapo.controller.prompt_sets import TaskPrompts, load_task_prompts, prompt_stream
from megatron_bapo.data.in_flight_files import load_in_flight, save_in_flight
from megatron_bapo.errors import FunctionFailed, RunError
from megatron_bapo.event_loop import LoopClock, gather_progressing, unless_raised
from megatron_bapo.freed_memory import FreedMemory, release_freed_memory
from megatron_bapo.garbage_collection import GarbageCollector
from megatron_bapo.logs import redirect_output
from megatron_bapo.metrics.cpu_time import family_cpu_s
from megatron_bapo.metrics.row_writer import RowWriter
from megatron_bapo.metrics.values import Last, Max, Metric, Sum
from megatron_bapo.records import Group, Trajectory
from megatron_bapo.rewards.scorer import Scorer
from megatron_bapo.rollout.decoding import Decoder
from megatron_bapo.rollout.environment import FunctionEnvironment
from megatron_bapo.rollout.generation import ScoredGroups, generate_group
from megatron_bapo.rollout.hand_over import ResponseTexts, taken_apart, without_contents
from megatron_bapo.rollout.in_flight_group import Sampling, create_in_flight_group
from megatron_bapo.rollout.messages import CompletedRequest
from megatron_bapo.rollout.quarantine import FailureBudget, QuarantinedPrompt
from megatron_bapo.rollout.router import Router
from megatron_bapo.rollout.scheduler import RolloutScheduler
from megatron_bapo.rollout.scheduler_deps import SchedulerDeps
from megatron_bapo.rollout.scoring import score_group
from megatron_bapo.rollout.sft_demonstrations import SftDemonstrations, sft_demonstration
from megatron_bapo.rollout.teacher import Teacher
from megatron_bapo.rollout.tokenization import TokenizedPrompt, load_tokenizer, tokenize, transformers_without_torch
from megatron_bapo.rollout.weight_probe import ProbeDifference, WeightProbe
from megatron_bapo.run_directory import RunDirectory
from megatron_bapo.weight_sync.route import RENDEZVOUS_NAMESPACE, TransferGroup

_VALIDATION_SERIAL = -1
"""Prompt serial of held-out prompts: they go before all training prompts, because the trainer waits for them."""
T = TypeVar("T")


class RolloutService:
    """Generates and scores a run's rollouts; there is one service per run."""

    def __init__(self, config: Config, engines: Sequence[EngineActor], teachers: Sequence[EngineActor] = ()) -> None:
        """`teachers` are the teacher's engines, if `algorithm.distillation.engines` asks for any."""
        self._directory = RunDirectory(config.run_dir)
        redirect_output(self._directory.logs / "rollout-service.log")
        self._config = config
        self._freed = FreedMemory()
        with transformers_without_torch():
            self._tokenizer = load_tokenizer(config.model_path)
        prompts: TaskPrompts = load_task_prompts(config)
        self._validation = tokenize(prompts.validation, self._tokenizer, config.data)
        self._prompts = tokenize(prompts.train, self._tokenizer, config.data)
        self._tokenized = {prompt.prompt.prompt_id: prompt for prompt in self._prompts}
        self._cpu_s = family_cpu_s()
        """CPU seconds used when the last batch was taken."""
        self._loop_clock: LoopClock | None = None
        self._rows = RowWriter([*self._directory.service_records, self._directory.engine_events])
        self._saving: asyncio.Future[None] | None = None
        """The thread that writes the rollouts of the last checkpoint."""
        self._stream = prompt_stream(config, prompts.train)
        self._sft_demonstrations = SftDemonstrations(config, self._tokenizer)
        self._scorer = Scorer(config.reward)
        self._decoder = Decoder(self._tokenizer, config.model_path)
        logging = config.logging
        self._texts = ResponseTexts(
            self._decoder.decode, num_samples=logging.num_sample_responses, keep_all=logging.dump_rollouts
        )
        self._environment = None
        if config.environment is not None:
            self._environment = FunctionEnvironment(
                config.environment, config.data, self._tokenizer, config.reward.secret_variables
            )
        self._router = Router(lambda name, reason: self._fleet.on_lost(name, reason), self._record_request)
        self._teacher_router = Router(lambda name, reason: self._teacher_fleet.on_lost(name, reason))
        limit = config.rollout.max_request_failures
        self._teacher = Teacher(self._teacher_router.generate, limit) if teachers else None
        self._scheduler = RolloutScheduler(config.rollout, config.prompts_per_step, config.seed, self._scheduler_deps())
        self._fleet = self._fleet_of(engines, self._router, _transfers(config))
        self._teacher_fleet = self._fleet_of(teachers, self._teacher_router)
        self._waiting: dict[str, asyncio.Future[Any]] = {}
        """Calls of the trainer that wait for engines, by name."""
        self._garbage = GarbageCollector()

    def _scheduler_deps(self) -> SchedulerDeps:
        return SchedulerDeps(
            self._stream,
            self._tokenized,
            self._router,
            self._score_for_training,
            self._decoder.decode,
            self._quarantine,
            self._environment,
            None if self._teacher is None else self._teacher_router,
        )

    def _fleet_of(
        self, engines: Sequence[EngineActor], router: Router, transfers: EngineTransfers | None = None
    ) -> EngineFleet:
        named, settings = {engine.name: engine for engine in engines}, self._config.rollout
        return EngineFleet(named, router, settings, self._record_engine, self._scheduler.fail, transfers)

    async def wait_for_engines(self) -> None:
        """Return when all engines have started to serve the initial model, and the teacher's to serve the teacher."""
        if self._loop_clock is None:
            self._loop_clock = LoopClock.running()
            self._loop_clock.start()
        await asyncio.gather(self._fleet.start(), self._teacher_fleet.start())

    def probe_token_ids(self) -> np.ndarray:
        """Return int32 tokens of the first prompts and their ground truths, at most `weight_sync.probe_tokens`."""
        config = self._config
        size = min(config.weight_sync.probe_tokens, config.max_sequence_length - 1)
        tokens: list[int] = []
        for prompt in self._tokenized.values():
            demonstration = sft_demonstration(prompt, self._tokenizer)
            tokens += [*demonstration.prompt_token_ids.tolist(), *demonstration.response_token_ids.tolist()]
            if len(tokens) >= size:
                break
        return np.asarray(tokens[:size], np.int32)

    async def sft_demonstrations(self, num: int) -> list[Trajectory]:
        """Return demonstrations of the next training prompts, for the warm start."""
        return await self._sft_demonstrations.for_prompts(self._scheduler.take_sft_prompts(num))

    async def take(self) -> tuple[ScoredGroups, list[Any], dict[str, float]] | None:
        """Return the next rollout batch without its groups, references to parts of these, and the seconds of waiting.

        Returns None as soon as an engine needs weights from the trainer, which calls this function again after it has
        sent them.
        """
        return await self._unless_lacking("take", self._take)

    async def _unless_lacking(self, name: str, work: Callable[[], Coroutine[Any, Any, T]]) -> T | None:
        """Return the result of `work`, or None if an engine needs weights first; then the next call goes on waiting."""
        waiting = self._waiting.get(name)
        if waiting is None:
            waiting = self._waiting[name] = asyncio.ensure_future(work())
        if not await self._fleet.unless_lacking(waiting):
            return None
        self._waiting.pop(name, None)
        return waiting.result()

    async def _take(self) -> tuple[ScoredGroups, list[Any], dict[str, float]]:
        """Return what `take` does when it is complete."""
        loop = asyncio.get_running_loop()
        start = loop.time()
        scored = await self._scheduler.take()
        self._garbage.exempt_survivors()
        cpu_s, self._cpu_s = self._cpu_s, await asyncio.to_thread(family_cpu_s)  # it reads a file of every process
        scored.metrics["perf/cpu_s/rollouts"] = Last(self._cpu_s - cpu_s)
        scored.metrics["perf/cpu_cores"] = Last(len(os.sched_getaffinity(0)))
        if self._loop_clock is not None:
            stall_s, own_stall_s = self._loop_clock.take_max_delays_s()
            scored.metrics["rollout/event_loop_stall_max_s"] = Max(stall_s)
            scored.metrics["rollout/event_loop_own_stall_max_s"] = Max(own_stall_s)
        scored.metrics["rollout/engine_restarts"] = Last(self._fleet.num_restarts + self._teacher_fleet.num_restarts)
        if self._teacher is not None:
            scored.metrics.update(self._teacher.take_metrics())
        if self._environment is not None:
            scored.metrics["rollout/environment_timeouts"] = Last(self._environment.num_timeouts)
        waited_s = loop.time() - start
        return replace(scored, groups=[]), await self._parts(scored.groups), {"generate": waited_s}

    async def _parts(self, groups: list[Group]) -> list[Any]:
        """Move groups from the list to the object store; return references to parts of them.

        Each part is freed here when it is in the object store, so that the batch is in memory once.
        """
        parts = list[Any]()
        for start, part in taken_apart(groups):
            parts.append(await put(await self._texts.restored(part, start)))
            part.clear()
            release_freed_memory()
        return parts

    async def validate(self, seed: int) -> tuple[ScoredGroups, list[Any]] | None:
        """Return what metrics need of the scored responses to every held-out prompt, and references to their parts.

        There are parts only with `logging.dump_validation`. Returns None as `take` does. Raises RunError if no prompt
        is finished for `idle_limit_s`, or if every prompt was quarantined, and any error that ends generation.
        """
        return await self._unless_lacking(
            "validate", lambda: unless_raised(self._validate(seed), self._scheduler.failed())
        )

    async def _validate(self, seed: int) -> tuple[ScoredGroups, list[Any]]:
        n, limits = self._config.evaluation.n, self._config.rollout
        failure_budget, dumped = FailureBudget(limits.max_reward_failures), dict[int, Group]()

        async def sample_or_quarantine(prompt: TokenizedPrompt, index: int) -> ScoredGroups:
            try:
                scored = await self._sample_group(prompt, n, seed, index)
            except (QuarantinedPrompt, FunctionFailed) as error:
                self._quarantine(
                    error
                    if isinstance(error, QuarantinedPrompt)
                    else failure_budget.use(prompt.prompt.prompt_id, error)
                )
                return ScoredGroups([], 0)
            (group,) = scored.groups
            if self._config.logging.dump_validation:
                dumped[index] = group
            return replace(scored, groups=[without_contents(group)])

        work = (sample_or_quarantine(prompt, index) for index, prompt in enumerate(self._validation))
        try:
            results = await gather_progressing(work, limits.idle_limit_s)
        except TimeoutError:
            raise RunError(
                f"no held-out prompt was finished for {limits.idle_limit_s:.0f} s ({IDLE_LIMIT}); still pending: "
                f"{self._router.pending()}"
            ) from None
        groups = [group for scored in results for group in scored.groups]
        if not groups:
            raise RunError(f"every held-out prompt was quarantined; see {self._directory.quarantined} for the reasons")
        metrics: dict[str, Metric] = {"validation/quarantined": Sum(len(self._validation) - len(groups))}
        parts = await self._parts([dumped.pop(index) for index in sorted(dumped)])
        return ScoredGroups(groups, sum(scored.num_reward_timeouts for scored in results), metrics), parts

    async def sample_response(self, prompt: int, sample: int) -> ScoredGroups | None:
        """Return a scored response to a training prompt, sampled as for evaluation; None if it was quarantined."""
        try:
            return await self._sample_group(self._prompts[prompt], 1, self._config.seed, sample)
        except QuarantinedPrompt as reason:
            self._quarantine(reason)
            return None

    async def failed(self) -> None:
        """Wait until an error ends generation, and raise it."""
        await self._scheduler.failed()

    async def answer(self) -> None:
        """Show that this process serves calls."""

    async def load_weights(self, version: int) -> None:
        """Load a published version on every engine; an engine that is lost meanwhile is replaced with that version.

        No request is sent to engines with a new version before they are probed.
        """

        async def load() -> None:
            release_freed_memory()
            await self._fleet.load_weights(version)

        if version == self._fleet.policy_version:  # only for engines that lack it
            await load()
            return
        await self._scheduler.update_weights(version, load)

    async def begin_transfer(self, version: int, plan: str, broken: str) -> TransferGroup:
        """Return the group that transfers a version to the engines; `load_weights` comes next.

        A new version waits until no request is in flight, because the group's ranks wait for each other only shortly.
        """
        if version != self._fleet.policy_version:
            await self._scheduler.pause()
        return await self._fleet.begin_transfer(version, plan, broken)

    async def repeat_transfer(self, group: TransferGroup, reason: str) -> TransferGroup:
        """Return the group that repeats the transfer in which `group` has failed."""
        return await self._fleet.repeat_transfer(group, reason)

    async def sleep(self, level: int) -> None:
        """Have every engine free its GPU memory, after waiting for starting engines; return when all have."""
        await self._fleet.to_trainer()
        await self._on_every(lambda engine: engine.sleep(level))

    async def wake(self, tags: tuple[str, ...]) -> None:
        """Have every engine allocate the memory of `tags`; with the KV cache the engines' turn begins."""
        await self._on_every(lambda engine: engine.wake(tags))
        if "kv_cache" in tags:
            await self._fleet.to_engines()

    async def probe(self, probe: WeightProbe) -> list[ProbeDifference]:
        """Return how far the log-probs of each serving engine are from the trainer's, and let generation continue.

        Replacements of lost engines are probed before they serve. Raises ProbeFailed if an engine does not pass.
        """
        self._fleet.require(probe)
        scores = await self._on_every(lambda engine: engine.score(probe.token_ids, probe.num_decoded))
        differences = [probe.difference(name, score) for name, score in scores.items()]
        self._scheduler.resume()
        return differences

    async def _sample_group(self, prompt: TokenizedPrompt, n: int, seed: int, index: int) -> ScoredGroups:
        """Sample and score `n` responses with the settings of `evaluation`."""
        settings = self._config.evaluation
        sampling = Sampling(
            n=n,
            temperature=settings.temperature,
            top_p=settings.top_p,
            top_k=settings.top_k,
            min_p=settings.min_p,
            max_response_length=self._config.evaluated_length,
        )
        group = create_in_flight_group(prompt, sampling, batch_seed=seed, index=index, prompt_serial=_VALIDATION_SERIAL)
        limit = self._config.rollout.max_request_failures
        await generate_group(group, self._router.generate, self._decoder.decode, self._environment, max_failures=limit)
        sampled = await group.group(self._decoder.decode)
        # Only training needs routes and kept tokens, which may have many times the bytes of the tokens.
        plain = tuple(replace(t, routes=None, kept_tokens=None) for t in sampled.trajectories)
        return await self._score(Group(sampled.prompt, plain))

    async def _on_every(self, action: Callable[[EngineActor], Awaitable[T]]) -> dict[str, T]:
        return await self._router.on_every(lambda engine: action(cast(EngineActor, engine)))

    async def begin_saving(self, folder: Path) -> dict[str, Any]:
        """Return the state of stream, scheduler and record files at this instant.

        A thread begins to write what was generated for later batches into `folder`; generation goes on meanwhile.
        """
        state = {"stream": self._stream.state_dict(), "rollouts": self._scheduler.state_dict()}
        state["response_lengths"] = self._router.lengths.state_dict()
        in_flight, sizes = self._scheduler.in_flight_state(), self._rows.sizes()
        if self._saving is not None:  # Ray has sent this call twice, or a checkpoint was given up
            await asyncio.wait({self._saving})
        self._saving = asyncio.ensure_future(asyncio.to_thread(save_in_flight, folder, in_flight))
        names = {path.name for path in self._directory.service_records}
        sizes = await asyncio.wrap_future(sizes)
        return state | {"records": {name: size for name, size in sizes.items() if name in names}}

    async def finish_saving(self) -> None:
        """Return when the files of the last `begin_saving` are complete and on disk."""
        assert self._saving is not None, "begin_saving comes first"
        await asyncio.shield(self._saving)

    async def restore_data_state(self, state: dict[str, Any], checkpoint: Path) -> None:
        """Restore the state of a checkpoint, before the first batch is taken."""
        in_flight = await asyncio.to_thread(load_in_flight, checkpoint)
        self._stream.load_state_dict(state["stream"])
        self._scheduler.load_state_dict(state["rollouts"], in_flight)
        if "response_lengths" in state:  # checkpoints of earlier versions have none
            self._router.lengths.load_state_dict(state["response_lengths"])

    async def _score_for_training(self, group: Group) -> ScoredGroups:
        scored = await self._score(group)
        self._freed.add(sum(trajectory.num_bytes for trajectory in group.trajectories))
        groups = [self._texts.dropped(group) for group in scored.groups]
        if self._teacher is not None:
            groups = [await self._teacher.scored(group) for group in groups]
        return replace(scored, groups=groups)

    async def _score(self, group: Group) -> ScoredGroups:
        return await score_group(group, self._scorer)

    def _record_request(self, request: CompletedRequest) -> None:
        start_s = time.time() - asyncio.get_running_loop().time()
        unix_s = {name: round(start_s + vars(request)[name], 6) for name in ("sent_s", "answered_s")}
        self._rows.write(self._directory.requests, {"step": self._scheduler.num_batches + 1, **vars(request)} | unix_s)

    def _quarantine(self, reason: QuarantinedPrompt) -> None:
        self._rows.write(self._directory.quarantined, {"prompt_id": reason.prompt_id, "failures": reason.failures})

    def _record_engine(self, name: str, event: str, reason: str) -> None:
        row = {"time_s": time.time(), "engine": name, "event": event, "reason": reason}
        self._rows.write(self._directory.engine_events, row)


def _transfers(config: Config) -> EngineTransfers | None:
    """Return the transfers of a transport from GPU to GPU on which engines and trainer are separate."""
    if config.weight_sync.transport != "nccl":
        return None
    publish = partial(put_key, RENDEZVOUS_NAMESPACE)
    return EngineTransfers(config.parallel.world_size, publish, config.rollout.health_check_interval_s)
