"""A resumed run continues with everything that was generated: buffered groups and partial trajectories."""

import asyncio
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron_bapo.data.in_flight_files import load_in_flight, save_in_flight
from megatron_bapo.errors import UserError
from megatron_bapo.metrics.values import scalars
from megatron_bapo.records import Group, InFlightState, Prompt, Trajectory
from megatron_bapo.rollout.generation import ScoredGroups
from megatron_bapo.rollout.in_flight_group import Reply
from megatron_bapo.simulation.virtual_time import run_in_virtual_time
from tests.unit.rollout.world import World, settings
from tests.unit.simulation.modelled_engines import log_prob, next_token

NUM_STEPS = 5
MEAN_LENGTH = 30
MODES: dict[str, dict[str, Any]] = {
    "sync": {},
    "reuse": {"max_reuse": 2},
    "over-sampling": {
        "partial_rollout": {"token_budget": 10, "over_sampling": 1.5},
        "max_staleness": 5,
        "on_weight_update": "abort_and_resume",
    },
    "over-sampling, whole pieces": {"partial_rollout": {"token_budget": 10, "over_sampling": 2.0}, "max_staleness": 3},
    "async": {"mode": "async", "max_staleness": 2, "on_weight_update": "keep"},
    "async, reuse": {"mode": "async", "max_staleness": 2, "max_reuse": 2, "on_weight_update": "abort_and_resume"},
    "async, pieces": {"mode": "async", "max_staleness": 3, "partial_rollout": {"token_budget": 10}},
}


@dataclass
class Tool:
    """Replies to each turn but the last, after `reply_s` seconds."""

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
    scheduler: str


def world(values: dict[str, Any], tool: Tool | None, *, score_s: float = 0.0) -> World:
    return World(
        settings(max_response_length=60, **values),
        mean_length=MEAN_LENGTH,
        num_engines=1,  # with several, a trajectory might continue on another engine at another time
        num_prompts=400,
        environment=tool,
        score_s=score_s,
    )


def saved(one: World, folder: Path) -> Checkpoint:
    folder.mkdir()
    save_in_flight(folder, one.scheduler.in_flight_state())
    return Checkpoint(folder, one.version, one.stream.state_dict(), json.dumps(one.scheduler.state_dict()))


async def resumed(one: World, checkpoint: Checkpoint) -> InFlightState:
    in_flight = load_in_flight(checkpoint.folder)
    one.stream.load_state_dict(checkpoint.stream)
    one.scheduler.load_state_dict(json.loads(checkpoint.scheduler), in_flight)
    one.version = checkpoint.version

    async def load() -> None:
        await asyncio.gather(*(engine.load_weights(one.version) for engine in one.engines))

    await one.scheduler.update_weights(one.version, load)
    one.scheduler.resume()
    return in_flight


def contents(batch: ScoredGroups) -> list[Any]:
    return [
        (g.prompt.prompt_id, [(t.response_token_ids.tolist(), t.version_spans, t.turns) for t in g.trajectories])
        for g in batch.groups
    ]


def accounting(batch: ScoredGroups) -> dict[str, float]:
    """Return the counts by place, with returned prompts counted as in flight."""
    counts = {n.rsplit("/")[-1]: value or 0.0 for n, value in scalars(batch.metrics).items() if "accounting" in n}
    return counts | {"in_flight": counts["in_flight"] + counts.pop("returned")}


@pytest.mark.parametrize(
    ("mode", "tool"), [*((mode, None) for mode in MODES), ("over-sampling", Tool()), ("async, pieces", Tool())]
)
def test_batches_after_a_resume_equal_those_of_the_uninterrupted_run(mode: str, tool: Tool | None, tmp_path: Path):
    async def whole() -> tuple[list[ScoredGroups], list[Checkpoint]]:
        one, batches, checkpoints = world(MODES[mode], tool), [], []
        for step in range(NUM_STEPS):
            batches.append(await one.step())
            checkpoints.append(saved(one, tmp_path / str(step)))
        await one.scheduler.close()
        return batches, checkpoints

    async def rest(checkpoint: Checkpoint, num_steps: int) -> list[ScoredGroups]:
        one = world(MODES[mode], tool)
        await resumed(one, checkpoint)
        batches = await one.train(num_steps)
        await one.scheduler.close()
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
    """Every sampled token and log-prob is that of the recorded policy version in its context."""
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


def num_sampled(in_flight: InFlightState) -> int:
    return sum(
        len(trajectory.behaviour_log_probs) for group in in_flight.unfinished for trajectory in group.trajectories
    )


def check_continued(in_flight: InFlightState, groups: dict[str, Group]) -> int:
    """Check that saved tokens are not generated again; return the number of continued partial trajectories."""
    for entry in in_flight.buffered:
        if (group := groups.get(entry.group.prompt.prompt_id)) is not None:
            assert contents(ScoredGroups([group], 0)) == contents(ScoredGroups([entry.group], 0))
    num = 0
    for unfinished in in_flight.unfinished:
        if (group := groups.get(unfinished.prompt_id)) is None:
            continue
        for saved_one, trajectory in zip(unfinished.trajectories, group.trajectories, strict=True):
            size = len(saved_one.response_token_ids)
            num += 0 < size < len(trajectory.response_token_ids)
            assert trajectory.response_token_ids[:size].tolist() == saved_one.response_token_ids.tolist()
            assert trajectory.turns[: len(saved_one.turns)] == saved_one.turns
    return num


@pytest.mark.parametrize("mode", MODES)
def test_after_an_interruption_nothing_is_lost_trained_too_often_or_generated_twice(mode: str, tmp_path: Path):
    async def main(at: float, folder: Path) -> int:
        one, before = world(MODES[mode], Tool(reply_s=0.2), score_s=0.1), []

        async def train() -> None:
            while True:
                before.append(await one.step())

        work = asyncio.ensure_future(train())
        await asyncio.sleep(at)
        num_recorded = num_sampled(one.scheduler.in_flight_state())
        outputs = await one.router.on_every(lambda engine: engine.progress())
        one.router.record_partial(outputs)
        completions = [c for delta in outputs.values() for generated in delta.values() for c in generated.completions]
        assert num_sampled(one.scheduler.in_flight_state()) == num_recorded + sum(len(c.token_ids) for c in completions)
        checkpoint = saved(one, folder)
        num_taken = one.scheduler.num_batches
        work.cancel()
        await one.scheduler.close()

        again = world(MODES[mode], Tool(reply_s=0.2), score_s=0.1)
        in_flight = await resumed(again, checkpoint)
        after = await again.train(2)
        settings = again.settings
        uses = Counter(group.prompt.prompt_id for batch in before[:num_taken] + after for group in batch.groups)
        assert max(uses.values()) <= settings.max_reuse
        for batch in after:
            counts = accounting(batch)
            assert counts.pop("taken") == sum(counts.values())
            assert scalars(batch.metrics)["rollout/staleness/max"] <= settings.max_staleness
        groups = {group.prompt.prompt_id: group for batch in after for group in batch.groups}
        for trajectory in (t for group in groups.values() for t in group.trajectories):
            check_tokens(trajectory)
        if num_taken == len(before):  # otherwise a batch was in training, and its prompts are in neither set
            ledger = again.scheduler.state_dict()["ledger"]
            still_open = {prompt_id for _, prompt_id in ledger["open"]}
            assert len(uses) + len(still_open) + ledger["closed"].get("dropped_stale", 0) == again.stream.num_taken
            assert uses.keys().isdisjoint(still_open)
        await again.scheduler.close()
        return check_continued(in_flight, groups)

    num_continued = [run_in_virtual_time(main(0.3737 + 1.93 * i, tmp_path / str(i))) for i in range(4)]
    assert sum(num_continued) > 0


def test_without_weight_updates_a_resumed_run_starts_as_many_prompts_as_the_uninterrupted_run(tmp_path: Path):
    """No weight update comes between the two batches, so both are trained on at the same policy version."""

    async def main() -> None:
        one, again = world(MODES["async"], None), world(MODES["async"], None)
        await one.scheduler.take()
        checkpoint = saved(one, tmp_path / "checkpoint")
        again.stream.load_state_dict(checkpoint.stream)
        again.scheduler.load_state_dict(json.loads(checkpoint.scheduler), load_in_flight(checkpoint.folder))
        expected, found = await one.scheduler.take(), await again.scheduler.take()
        assert contents(found) == contents(expected)
        assert again.stream.num_taken == one.stream.num_taken
        await asyncio.gather(one.scheduler.close(), again.scheduler.close())

    run_in_virtual_time(main())


def test_rollouts_of_another_checkpoint_are_refused():
    async def main() -> None:
        one, again = world(MODES["async"], None), world(MODES["async"], None)
        await one.step()
        in_flight = one.scheduler.in_flight_state()
        await one.train(2)
        again.stream.load_state_dict(one.stream.state_dict())
        with pytest.raises(UserError, match=r"prompt train:\d+ with serial number \d+, which is not open .*; delete"):
            again.scheduler.load_state_dict(one.scheduler.state_dict(), in_flight)
        await one.scheduler.close()

    run_in_virtual_time(main())


def test_in_flight_state_is_that_of_its_instant_and_does_not_copy_tokens():
    async def main() -> None:
        one = world(MODES["async, pieces"], None)
        await one.scheduler.take()
        await asyncio.sleep(0.25)
        one.router.record_partial(await one.router.on_every(lambda engine: engine.progress()))
        state = one.scheduler.in_flight_state()
        before = [[t.response_token_ids.tolist() for t in group.trajectories] for group in state.unfinished]
        first, second = one.router.partial_outputs(), one.router.partial_outputs()
        for name, output in first.items():
            for one_completion, other in zip(output.completions, second[name].completions, strict=True):
                assert np.shares_memory(one_completion.token_ids, other.token_ids) or not len(other.token_ids)
        await one.train(2)
        after = [[t.response_token_ids.tolist() for t in group.trajectories] for group in state.unfinished]
        assert after == before
        assert sum(map(len, (tokens for group in before for tokens in group))) > 0
        await one.scheduler.close()

    run_in_virtual_time(main())


def test_many_resumed_groups_are_launched_over_several_turns_and_none_twice(tmp_path: Path):
    async def main() -> None:
        one = World(settings(mode="async", max_staleness=1), groups_per_batch=60, num_prompts=400)
        await one.scheduler.take()
        checkpoint = saved(one, tmp_path / "checkpoint")
        expected = contents(await one.scheduler.take())
        again = World(settings(mode="async", max_staleness=1), groups_per_batch=60, num_prompts=400)
        again.stream.load_state_dict(checkpoint.stream)
        again.scheduler.load_state_dict(json.loads(checkpoint.scheduler), load_in_flight(checkpoint.folder))
        found = contents(await again.scheduler.take())
        assert found == expected
        identities = [request.request_id for engine in again.engines for _, request in engine.log]
        assert len(identities) == len(set(identities))
        await asyncio.gather(one.scheduler.close(), again.scheduler.close())

    run_in_virtual_time(main())
