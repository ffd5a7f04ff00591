"""Scores groups while others are still being generated."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor

from megatron_bapo.config.schema import RewardConfig
from megatron_bapo.records import Group
from megatron_bapo.rewards.scorer import Scorer
from megatron_bapo.rollout.generation import ScoredGroups, score_groups


class ScoringPool:
    """`reward.num_workers` scorers of one process each: a group that takes long holds up no more than its own."""

    def __init__(self, config: RewardConfig) -> None:
        """Raises UserError when the reward function cannot be loaded."""
        alone = config.model_copy(update={"num_workers": 1})
        self._threads = ThreadPoolExecutor(config.num_workers, thread_name_prefix="scorer")
        self._free: asyncio.Queue[Scorer] = asyncio.Queue()
        self._scorers = [*self._threads.map(Scorer, [alone] * config.num_workers)]
        for scorer in self._scorers:
            self._free.put_nowait(scorer)

    def close(self) -> None:
        """Kill the workers; nothing may be being scored."""
        self._threads.shutdown()
        for scorer in self._scorers:
            scorer.close()

    async def score(self, group: Group) -> ScoredGroups:
        """The group with its rewards; raises what `Scorer.score` does."""
        scorer = await self._free.get()
        work = asyncio.get_running_loop().run_in_executor(self._threads, score_groups, [group], scorer)
        # Also when whoever waits is cancelled, the scorer is busy until its thread is done.
        work.add_done_callback(lambda _: self._free.put_nowait(scorer))
        return await asyncio.shield(work)
