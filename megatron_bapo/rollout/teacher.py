"""Scores finished responses with the teacher, which vLLM engines of its own serve.

    finished group ─► a request for each response (router) ─► an engine's prefill ─► log-probs of the sampled tokens

The teacher never changes. A response is therefore scored once, under no policy version, while others are generated.
Requests of a lost engine wait for its replacement or go to another engine.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from itertools import count

import numpy as np

from megatron_bapo.errors import RunError
from megatron_bapo.metrics.values import Mean, Metric
from megatron_bapo.records import Group, Trajectory
from megatron_bapo.rollout.generation import Send
from megatron_bapo.rollout.messages import GenerationRequest
from megatron_bapo.rollout.quarantine import QuarantinedPrompt
from megatron_bapo.rollout.request_failures import RequestFailures


class Teacher:
    """Gives finished trajectories the teacher's log-probs."""

    def __init__(self, send: Send, max_failures: int) -> None:
        """`send` sends a request to one of the teacher's engines (`Router.generate`)."""
        self._send, self._max_failures = send, max_failures
        self._numbers = count()
        self._seconds, self._num_groups = 0.0, 0

    async def scored(self, group: Group) -> Group:
        """Return the group with the log-probs; raises QuarantinedPrompt after `max_failures` failures in a row."""
        loop = asyncio.get_running_loop()
        start, prompt_id = loop.time(), group.prompt.prompt_id
        try:
            async with asyncio.TaskGroup() as tasks:
                found = [tasks.create_task(self._log_probs(prompt_id, each)) for each in group.trajectories]
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None
        self._seconds, self._num_groups = self._seconds + loop.time() - start, self._num_groups + 1
        pairs = zip(group.trajectories, found, strict=True)
        return Group(group.prompt, tuple(replace(each, teacher_log_probs=task.result()) for each, task in pairs))

    def take_metrics(self) -> dict[str, Metric]:
        """Return the metrics of the groups that were scored since the last call."""
        metrics: dict[str, Metric] = {"rollout/teacher_s": Mean(self._seconds, self._num_groups)}
        self._seconds, self._num_groups = 0.0, 0
        return metrics

    async def _log_probs(self, prompt_id: str, trajectory: Trajectory) -> np.ndarray:
        """Return the log-probs float32 [S] of the sampled tokens; an environment's tokens are only context."""
        context = trajectory.prompt_token_ids, trajectory.response_token_ids
        request = GenerationRequest(
            f"teacher {next(self._numbers)}: {prompt_id}",
            context,
            n=1,
            temperature=1.0,
            top_p=1.0,
            top_k=-1,
            min_p=0.0,
            max_tokens=1,  # vLLM generates at least one
            seed=0,
            scores_context=True,
        )
        failures = RequestFailures(self._max_failures)
        while True:
            sent, alone = failures.next_attempt(request), failures.must_be_alone
            try:
                engine, generated = await self._send(sent, prompt_serial=0, prefer=None, alone=alone)
                log_probs = generated.completions[0].context_log_probs
                if log_probs is None or len(log_probs) != request.num_prompt_tokens - 1:
                    raise RunError(f"{engine} returned no log-probs of a response to prompt {prompt_id}")
            except RunError as error:
                if failures.add(error):
                    raise QuarantinedPrompt(prompt_id, failures.reasons) from error
            else:
                return log_probs[len(trajectory.prompt_token_ids) - 1 + trajectory.sampled_positions]
