"""A test environment for the scheduler: modelled engines, prompts, rewards and a trainer."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from megatron_bapo.config.data import CurriculumConfig
from megatron_bapo.config.rollout import RolloutConfig
from megatron_bapo.data.curriculum import Curriculum
from megatron_bapo.data.prompt_stream import PromptStream
from megatron_bapo.records import Group
from megatron_bapo.rollout.generation import Environment, ScoredGroups
from megatron_bapo.rollout.quarantine import QuarantinedPrompt
from megatron_bapo.rollout.router import Router
from megatron_bapo.rollout.scheduler import RolloutScheduler
from megatron_bapo.rollout.scheduler_deps import SchedulerDeps
from tests.unit.simulation.modelled_engines import FaultyEngine, decode, prompts

GREEDY = 1e-9
"""A temperature that the modelled engines treat as 0, which the training configuration refuses."""
UPDATE_S = 2.0


@dataclass
class World:
    """A scheduler with modelled engines, and a trainer that takes batches and updates the weights."""

    settings: RolloutConfig
    num_engines: int = 2
    groups_per_batch: int = 6
    num_prompts: int = 40
    mean_length: int = 20
    score_s: float = 0.05
    reward: Callable[[str, int], float] = lambda prompt_id, position: float(position)
    quarantined: list[QuarantinedPrompt] = field(default_factory=list)
    curriculum: dict[str, Any] | None = None
    environment: Environment | None = None
    update_s: float = UPDATE_S
    router: Router = field(default_factory=Router)
    version: int = 0

    def __post_init__(self) -> None:
        self.engines = [FaultyEngine(f"engine {i}", mean_length=self.mean_length) for i in range(self.num_engines)]
        for engine in self.engines:
            self.router.add(engine.name, engine, 10**9)
        tokenized = prompts(self.num_prompts)
        curriculum = None
        if self.curriculum is not None:
            curriculum = Curriculum(CurriculumConfig.model_validate(self.curriculum), ())
        self.stream = PromptStream([p.prompt for p in tokenized], seed=3, shuffle=True, curriculum=curriculum)
        deps = SchedulerDeps(
            self.stream,
            {p.prompt.prompt_id: p for p in tokenized},
            self.router,
            lambda group: self.score(group),
            decode,
            self.quarantined.append,
            self.environment,
        )
        self.scheduler = RolloutScheduler(self.settings, self.groups_per_batch, 7, deps)

    async def score(self, group: Group) -> ScoredGroups:
        await asyncio.sleep(self.score_s)
        scored = tuple(
            replace(t, reward=self.reward(group.prompt.prompt_id, i)) for i, t in enumerate(group.trajectories)
        )
        return ScoredGroups([Group(group.prompt, scored)], 0)

    async def step(self) -> ScoredGroups:
        scored = await self.scheduler.take()
        await asyncio.sleep(self.update_s)
        await self.update_weights()
        return scored

    async def update_weights(self) -> None:
        await self.scheduler.update_weights(self.version + 1, self.load_weights)
        self.scheduler.resume()

    async def load_weights(self) -> None:
        self.version += 1
        await asyncio.gather(*(engine.load_weights(self.version) for engine in self.engines if not engine.dead))

    async def train(self, num_steps: int) -> list[ScoredGroups]:
        return [await self.step() for _ in range(num_steps)]


def settings(**values: Any) -> RolloutConfig:
    return RolloutConfig.model_validate({"n": 2, "max_response_length": 50, "temperature": GREEDY} | values)
