import asyncio
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from megatron_bapo.metrics.values import scalars
from megatron_bapo.records import Group, Prompt, Trajectory, VersionSpan
from megatron_bapo.rollout.messages import Generated, GenerationRequest
from megatron_bapo.rollout.quarantine import QuarantinedPrompt
from megatron_bapo.rollout.scheduler_deps import SchedulerDeps
from megatron_bapo.rollout.teacher import Teacher
from megatron_bapo.simulation.virtual_time import run_in_virtual_time
from tests.unit.cluster.test_engine_fleet import START_S, ModelledRun
from tests.unit.rollout.world import World, settings
from tests.unit.simulation.modelled_engines import TOKEN_S, context_log_probs

NUM_GROUPS, LIMIT = 20, 3


def trajectory(prompt: Sequence[int], response: Sequence[int], mask: Sequence[bool] | None = None) -> Trajectory:
    num = len(response) if mask is None else sum(mask)
    return Trajectory(
        prompt_token_ids=np.array(prompt, np.int32),
        response_token_ids=np.array(response, np.int32),
        behaviour_log_probs=np.zeros(num, np.float32),
        version_spans=(VersionSpan(5, num),),
        finish_reason="stop",
        text="",
        loss_mask=None if mask is None else np.array(mask),
    )


def group(number: int) -> Group:
    """Return a group of a whole response and of one with an environment's reply in its middle."""
    whole = trajectory([number, 7, 8], [9, 10])
    turns = trajectory([number, 7, 8], [9, 10, 11, 12, 13], [True, True, False, False, True])
    return Group(Prompt(f"p:{number}", (), "", "p"), (whole, turns))


def assert_scored(scored: Group, given: Group) -> None:
    for ours, theirs in zip(scored.trajectories, given.trajectories, strict=True):
        tokens = [*theirs.prompt_token_ids.tolist(), *theirs.response_token_ids.tolist()]
        mask = np.ones(len(theirs.response_token_ids), bool) if theirs.loss_mask is None else theirs.loss_mask
        expected = context_log_probs(0, tokens)[len(theirs.prompt_token_ids) - 1 :][mask]
        assert ours.teacher_log_probs is not None
        assert (ours.teacher_log_probs.dtype, ours.teacher_log_probs.tolist()) == (np.float32, expected.tolist())
        assert ours.num_sampled == len(ours.teacher_log_probs)


def test_sampled_tokens_get_the_teachers_log_probs_and_an_environments_replies_are_context():
    async def main() -> None:
        run = ModelledRun(1)
        await run.fleet.start()
        teacher = Teacher(run.router.generate, LIMIT)
        assert_scored(await teacher.scored(group(1)), group(1))
        assert scalars(teacher.take_metrics()) == {"rollout/teacher_s": pytest.approx(TOKEN_S)}
        assert {request.max_tokens for _, request in run.engines["engine 0"].log} == {1}
        await run.fleet.close()

    run_in_virtual_time(main())


def test_responses_wait_for_a_dead_engines_replacement_and_none_is_lost():
    async def main() -> None:
        run = ModelledRun(1)
        await run.fleet.start()
        teacher, loop = Teacher(run.router.generate, LIMIT), asyncio.get_running_loop()
        waiting = [asyncio.ensure_future(teacher.scored(group(number))) for number in range(NUM_GROUPS)]
        await asyncio.sleep(0)
        run.engines["engine 0"].die()
        scored = await asyncio.gather(*waiting)
        assert loop.time() >= START_S
        for number, each in enumerate(scored):
            assert_scored(each, group(number))
        assert [event for _, event, _ in run.events] == ["lost", "serves"]
        assert run.failures == []
        await run.fleet.close()

    run_in_virtual_time(main())


def test_a_prompt_whose_responses_no_engine_scores_is_quarantined_after_the_limit():
    async def main() -> None:
        run = ModelledRun(1)
        await run.fleet.start()
        run.engines["engine 0"].fails_on = {1}
        teacher = Teacher(run.router.generate, LIMIT)
        with pytest.raises(QuarantinedPrompt, match="prompt p:1 failed 3 times") as refusal:
            await teacher.scored(group(1))
        assert len(refusal.value.failures) == LIMIT
        assert_scored(await teacher.scored(group(2)), group(2))
        await run.fleet.close()

    run_in_virtual_time(main())


def test_an_engine_that_returns_no_log_probs_fails_the_request():
    async def main() -> None:
        run = ModelledRun(1)
        await run.fleet.start()

        async def without(request: GenerationRequest) -> Generated:
            return await generate(replace(request, scores_context=False))

        generate, run.engines["engine 0"].generate = run.engines["engine 0"].generate, without
        with pytest.raises(QuarantinedPrompt, match="engine 0 returned no log-probs of a response to prompt p:1"):
            await Teacher(run.router.generate, LIMIT).scored(group(1))
        await run.fleet.close()

    run_in_virtual_time(main())


def test_a_batch_that_waits_for_its_teacher_names_the_teachers_requests():
    async def main() -> None:
        run = ModelledRun(1)
        await run.fleet.start()
        run.engines["engine 0"].hangs = True
        scoring = asyncio.ensure_future(Teacher(run.router.generate, LIMIT).scored(group(1)))
        await asyncio.sleep(1)
        world = World(settings())
        deps = SchedulerDeps(
            world.stream, {}, world.router, world.score, lambda _: asyncio.sleep(0, ""), print, teacher=run.router
        )
        assert deps.pending() == "no request; engine 0 (2 requests)"
        scoring.cancel()
        await run.fleet.close()

    run_in_virtual_time(main())
