"""A run that was interrupted goes on with what it had generated: buffered groups, and answers as far as they were."""

import asyncio
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron_bapo.data.rollout_files import read_held, write_held
from megatron_bapo.errors import UserError
from megatron_bapo.metrics.values import scalars
from megatron_bapo.records import Group, HeldRollouts, Prompt, Trajectory
from megatron_bapo.rollout.generation import Reply, ScoredGroups
from megatron_bapo.rollout.virtual_time import run_in_virtual_time
from tests.unit.rollout.modelled_engines import log_prob, next_token
from tests.unit.rollout.world import World, settings

NUM_STEPS = 5
MEAN_LENGTH = 30
MODES: dict[str, dict[str, Any]] = {
    "sync": {},
    "reuse": {"max_reuse": 2},
    "over-sampling": {
        "partial_rollout": {"token_budget": 10, "over_sampling": 1.5},
        "max_staleness": 5,
        "on_refresh": "abort_and_resume",
    },
    "over-sampling, whole pieces": {"partial_rollout": {"token_budget": 10, "over_sampling": 2.0}, "max_staleness": 3},
    "async": {"mode": "async", "max_staleness": 2, "on_refresh": "keep"},
    "async, reuse": {"mode": "async", "max_staleness": 2, "max_reuse": 2, "on_refresh": "abort_and_resume"},
    "async, pieces": {"mode": "async", "max_staleness": 3, "partial_rollout": {"token_budget": 10}},
}


@dataclass
class Tool:
    """Replies twice, and not at once where that is asked for."""

    reply_s: float = 0.0
    max_turns: int = 3

    async def reply(self, prompt: Prompt, turns: Sequence[dict[str, str]]) -> Reply | None:
        await asyncio.sleep(self.reply_s)
        assert turns[-1]["role"] == "assistant"
        assert [turn["role"] for turn in turns] == ["assistant", "tool"] * (len(turns) // 2) + ["assistant"]
        return Reply({"role": "tool", "content": "200"}, np.array([200, 200], np.int32))


@dataclass
class Checkpoint:
    folder: Path
    version: int
    stream: dict[str, Any]
    producer: str


def world(values: dict[str, Any], tool: Tool | None, *, score_s: float = 0.0) -> World:
    return World(
        settings(max_response_length=60, **values),
        mean_length=MEAN_LENGTH,
        num_engines=1,  # of several, another one than before may go on with an answer, and another moment later
        num_prompts=400,
        environment=tool,
        score_s=score_s,
    )


def saved(one: World, folder: Path) -> Checkpoint:
    folder.mkdir()
    write_held(folder, one.producer.held())
    return Checkpoint(folder, one.version, one.stream.state_dict(), json.dumps(one.producer.state_dict()))


async def resumed(one: World, checkpoint: Checkpoint) -> HeldRollouts:
    held = read_held(checkpoint.folder)
    one.stream.load_state_dict(checkpoint.stream)
    one.producer.load_state_dict(json.loads(checkpoint.producer), held)
    one.version = checkpoint.version

    async def load() -> None:
        await asyncio.gather(*(engine.load_weights(one.version) for engine in one.engines))

    await one.producer.refresh(one.version, load)
    return held


def contents(batch: ScoredGroups) -> list[Any]:
    return [
        (g.prompt.prompt_id, [(t.response_token_ids.tolist(), t.version_spans, t.turns) for t in g.trajectories])
        for g in batch.groups
    ]


def accounting(batch: ScoredGroups) -> dict[str, float]:
    """Prompts without a token are in flight, whether they have been asked for again or not."""
    counts = {n.rsplit("/")[-1]: value or 0.0 for n, value in scalars(batch.metrics).items() if "accounting" in n}
    return counts | {"in_flight": counts["in_flight"] + counts.pop("returned")}


@pytest.mark.parametrize(
    ("mode", "tool"), [*((mode, None) for mode in MODES), ("over-sampling", Tool()), ("async, pieces", Tool())]
)
def test_batches_after_a_checkpoint_are_those_of_the_run_that_went_on(mode: str, tool: Tool | None, tmp_path: Path):
    async def whole() -> tuple[list[ScoredGroups], list[Checkpoint]]:
        one, batches, checkpoints = world(MODES[mode], tool), [], []
        for step in range(NUM_STEPS):
            batches.append(await one.step())
            checkpoints.append(saved(one, tmp_path / str(step)))
        await one.producer.close()
        return batches, checkpoints

    async def rest(checkpoint: Checkpoint, num_steps: int) -> list[ScoredGroups]:
        one = world(MODES[mode], tool)
        await resumed(one, checkpoint)
        batches = await one.train(num_steps)
        await one.producer.close()
        return batches

    batches, checkpoints = run_in_virtual_time(whole())
    for step, checkpoint in enumerate(checkpoints[:-1], start=1):
        after = run_in_virtual_time(rest(checkpoint, NUM_STEPS - step))
        assert [contents(batch) for batch in after] == [contents(batch) for batch in batches[step:]]
        for batch, expected in zip(after, batches[step:], strict=True):
            assert accounting(batch) == accounting(expected)
    if mode != "sync":
        assert any(any(checkpoint.folder.iterdir()) for checkpoint in checkpoints)


def check_tokens(trajectory: Trajectory) -> None:
    """Every sampled token and log-prob is what the policy of its version gives in its context."""
    versions = [span.policy_version for span in trajectory.version_spans for _ in range(span.num_tokens)]
    sampled = iter(zip(versions, trajectory.behaviour_log_probs, strict=True))
    mask = trajectory.loss_mask if trajectory.loss_mask is not None else [True] * len(trajectory.response_token_ids)
    context = trajectory.prompt_token_ids.tolist()
    for token, is_sampled in zip(trajectory.response_token_ids.tolist(), mask, strict=True):
        if is_sampled:
            version, value = next(sampled)
            assert token == next_token(version, context, greedy=True, seed=0, mean_length=MEAN_LENGTH)
            assert value == np.float32(log_prob(version, context, token))
        context.append(token)
    assert next(sampled, None) is None


def num_sampled(held: HeldRollouts) -> int:
    return sum(len(answer.behaviour_log_probs) for group in held.unfinished for answer in group.answers)


def check_continued(held: HeldRollouts, groups: dict[str, Group]) -> int:
    """Of what was held nothing is generated again; the number of half-finished answers that were trained on."""
    for entry in held.buffered:
        if (group := groups.get(entry.group.prompt.prompt_id)) is not None:
            assert contents(ScoredGroups([group], 0)) == contents(ScoredGroups([entry.group], 0))
    num = 0
    for unfinished in held.unfinished:
        if (group := groups.get(unfinished.prompt_id)) is None:
            continue
        for answer, trajectory in zip(unfinished.answers, group.trajectories, strict=True):
            size = len(answer.response_token_ids)
            num += 0 < size < len(trajectory.response_token_ids)
            assert trajectory.response_token_ids[:size].tolist() == answer.response_token_ids.tolist()
            assert trajectory.turns[: len(answer.turns)] == answer.turns
    return num


@pytest.mark.parametrize("mode", MODES)
def test_interrupted_at_any_time_nothing_is_lost_trained_too_often_or_generated_twice(mode: str, tmp_path: Path):
    async def main(at: float, folder: Path) -> int:
        one, before = world(MODES[mode], Tool(reply_s=0.2), score_s=0.1), []

        async def train() -> None:
            while True:
                before.append(await one.step())

        work = asyncio.ensure_future(train())
        await asyncio.sleep(at)
        num_known = num_sampled(one.producer.held())
        told = await one.router.on_every(lambda engine: engine.progress())
        one.router.keep(told)
        completions = [c for news in told.values() for generated in news.values() for c in generated.completions]
        assert num_sampled(one.producer.held()) == num_known + sum(len(c.token_ids) for c in completions)
        checkpoint = saved(one, folder)
        num_taken = one.producer.num_batches
        work.cancel()
        await one.producer.close()

        again = world(MODES[mode], Tool(reply_s=0.2), score_s=0.1)
        held = await resumed(again, checkpoint)
        after = await again.train(2)
        settings = again.settings
        uses = Counter(group.prompt.prompt_id for batch in before[:num_taken] + after for group in batch.groups)
        assert max(uses.values()) <= settings.max_reuse
        for batch in after:
            counts = accounting(batch)
            assert counts.pop("drawn") == sum(counts.values())
            assert scalars(batch.metrics)["rollout/staleness/max"] <= settings.max_staleness
        groups = {group.prompt.prompt_id: group for batch in after for group in batch.groups}
        for trajectory in (t for group in groups.values() for t in group.trajectories):
            check_tokens(trajectory)
        if num_taken == len(before):  # else a batch was being trained on, and its prompts are in no place
            ledger = again.producer.state_dict()["ledger"]
            still_open = {prompt_id for _, prompt_id in ledger["open"]}
            assert len(uses) + len(still_open) + ledger["closed"].get("dropped_stale", 0) == again.stream.num_drawn
            assert uses.keys().isdisjoint(still_open)
        await again.producer.close()
        return check_continued(held, groups)

    num_continued = [run_in_virtual_time(main(0.3737 + 1.93 * i, tmp_path / str(i))) for i in range(4)]
    assert sum(num_continued) > 0


def test_without_a_trainer_no_more_is_started_than_in_the_run_that_went_on(tmp_path: Path):
    """No weights come between two batches, so the next one does not meet newer ones yet."""

    async def main() -> None:
        one, again = world(MODES["async"], None), world(MODES["async"], None)
        await one.producer.take()
        checkpoint = saved(one, tmp_path / "held")
        again.stream.load_state_dict(checkpoint.stream)
        again.producer.load_state_dict(json.loads(checkpoint.producer), read_held(checkpoint.folder))
        expected, found = await one.producer.take(), await again.producer.take()
        assert contents(found) == contents(expected)
        assert again.stream.num_drawn == one.stream.num_drawn
        await asyncio.gather(one.producer.close(), again.producer.close())

    run_in_virtual_time(main())


def test_rollouts_of_another_checkpoint_are_refused():
    async def main() -> None:
        one, again = world(MODES["async"], None), world(MODES["async"], None)
        await one.step()
        held = one.producer.held()
        await one.train(2)
        again.stream.load_state_dict(one.stream.state_dict())
        with pytest.raises(UserError, match=r"prompt train:\d+ as number \d+, which is not open .*; delete"):
            again.producer.load_state_dict(one.producer.state_dict(), held)
        await one.producer.close()

    run_in_virtual_time(main())
