"""What the scheduler is given: the prompts, the engines' router, and the functions that score and decode."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass

from megatron_bapo.data.prompt_stream import PromptStream
from megatron_bapo.records import Group
from megatron_bapo.rollout.generation import Environment, ScoredGroups
from megatron_bapo.rollout.in_flight_group import Decode
from megatron_bapo.rollout.quarantine import QuarantinedPrompt
from megatron_bapo.rollout.router import Router
from megatron_bapo.rollout.tokenization import TokenizedPrompt

Score = Callable[[Group], Awaitable[ScoredGroups]]
"""Computes the rewards of one finished group."""


@dataclass(frozen=True)
class SchedulerDeps:
    """Dependencies of the scheduler."""

    stream: PromptStream
    prompts: Mapping[str, TokenizedPrompt]
    """All training prompts by prompt id."""
    router: Router
    score: Score
    decode: Decode
    quarantine: Callable[[QuarantinedPrompt], None]
    """Called for each prompt whose requests failed too often, or whose reward failed."""
    environment: Environment | None = None
    """Replies between the turns of a trajectory."""
    teacher: Router | None = None
    """Router of the engines with which `score` also scores."""

    def pending(self) -> str:
        """Describe the requests that have not returned."""
        return "; ".join(router.pending() for router in (self.router, self.teacher) if router is not None)
