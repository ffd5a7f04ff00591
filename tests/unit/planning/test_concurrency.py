"""How many responses an engine generates at once: the plan against the router with an engine in virtual time."""

import asyncio
from dataclasses import replace
from itertools import count

import numpy as np
import pytest

from megatron_bapo.planning.concurrency import concurrency
from megatron_bapo.planning.decode_cost import DecodeCost
from megatron_bapo.planning.response_lengths import lengths_of
from megatron_bapo.rollout.messages import GenerationRequest
from megatron_bapo.rollout.router import Router
from megatron_bapo.simulation.modelled_engine import PROMPT_TOKEN, EngineModel, ModelledEngine, countdown
from megatron_bapo.simulation.virtual_time import run_in_virtual_time
from tests.unit.planning.examples import recipe

PLAN = recipe("qwen2.5-7b_8gpus", "rollout.max_response_length=512", "data.max_prompt_length=64", "rollout.n=8")


def with_room_for(groups: float) -> int:
    """Return the tokens of a KV cache with room for so many groups of mean length."""
    lengths = lengths_of(PLAN.config, PLAN.assumptions)
    return int(groups * (lengths.prompt + PLAN.config.rollout.n * lengths.mean_response))


async def mean_running(kv_tokens: int, *, through_router: bool, num_groups: int = 80) -> float:
    """Return the mean number of running responses while groups are waiting, without the first and the last ones."""
    lengths, loop, serials = lengths_of(PLAN.config, PLAN.assumptions), asyncio.get_running_loop(), count()
    model = EngineModel(DecodeCost(0.03, 0.0, 0.0, 0.0), 0.0, 0.0, kv_tokens, max_num_seqs=10**6, load_s=0.0)
    engine, router = ModelledEngine("engine", model, countdown(np.array(lengths.responses))), Router()
    router.add("engine", engine, kv_tokens)
    ends: list[tuple[float, float]] = []

    async def generate() -> None:
        serial = next(serials)
        context, n = (np.full(round(lengths.prompt), PROMPT_TOKEN, np.int32),), PLAN.config.rollout.n
        request = GenerationRequest(f"{serial}", context, n, 1.0, 1.0, -1, 0.0, 512, serial * n)
        if through_router:
            await router.generate(request, prompt_serial=serial)
        else:
            await engine.generate(request)
        ends.append((loop.time(), engine.sequence_s))

    async def report() -> None:
        while True:
            await asyncio.sleep(1.0)
            router.record_partial(await router.on_every(lambda each: each.progress()))

    reporting = loop.create_task(report())
    await asyncio.gather(*(generate() for _ in range(num_groups)))
    reporting.cancel()
    (start_s, before), (end_s, after) = ends[num_groups // 4], ends[num_groups * 3 // 4]
    return (after - before) / (end_s - start_s)


@pytest.mark.parametrize("groups", [2.5, 5.5])
@pytest.mark.parametrize("through_router", [True, False])
def test_as_many_responses_are_planned_as_the_router_or_vllm_runs(groups: float, through_router: bool) -> None:
    kv_tokens = with_room_for(groups)
    engine = replace(PLAN.engine, kv_cache=kv_tokens * PLAN.engine.kv_per_token)
    planned = concurrency(PLAN.config, engine, PLAN.assumptions)

    running = run_in_virtual_time(mean_running(kv_tokens, through_router=through_router))

    assert planned == pytest.approx(running, rel=0.25)


def test_at_least_one_response_and_at_most_max_num_seqs_run() -> None:
    empty = replace(PLAN.engine, kv_cache=0)
    assert concurrency(PLAN.config, empty, PLAN.assumptions) == 1
    assert recipe("qwen2.5-7b_8gpus", "rollout.max_num_seqs=7").concurrency == 7
