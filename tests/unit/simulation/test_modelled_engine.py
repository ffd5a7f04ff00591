import asyncio
from itertools import count

import numpy as np
import pytest

from megatron_bapo.planning.decode_cost import DecodeCost
from megatron_bapo.rollout.messages import Generated, GenerationRequest
from megatron_bapo.simulation.modelled_engine import PROMPT_TOKEN, EngineModel, ModelledEngine, countdown
from megatron_bapo.simulation.virtual_time import run_in_virtual_time

NUMBERS = count()
OVERHEAD, PER_TOKEN, PER_SEQUENCE = 1.0, 0.01, 0.1


def engine(
    *lengths: int,
    kv_tokens: int = 10**6,
    max_num_seqs: int = 100,
    prefill_s: float = 0.0,
    sequence_s: float = 0.0,
    shares_prompts: bool = True,
) -> ModelledEngine:
    decode = DecodeCost(OVERHEAD, 0.0, PER_TOKEN, PER_SEQUENCE, waits=True)
    model = EngineModel(
        decode, prefill_s, sequence_s, kv_tokens, max_num_seqs, load_s=3.0, shares_prompts=shares_prompts
    )
    return ModelledEngine("engine 0", model, countdown(np.array(lengths, np.int32)))


def request(*, n: int = 1, max_tokens: int = 10**6, seed: int = 0, prompt: np.ndarray | None = None):
    tokens = np.full(4, PROMPT_TOKEN, np.int32) if prompt is None else prompt
    return GenerationRequest(f"request {next(NUMBERS)}", (tokens,), n, 1.0, 1.0, -1, 0.0, max_tokens, seed)


def step_s(num_sequences: int, num_tokens: int) -> float:
    return OVERHEAD + max(PER_TOKEN * num_tokens, PER_SEQUENCE * num_sequences)


def literal_seconds(lengths: list[int], prompt: int, max_num_seqs: int) -> float:
    """Simulate continuous batching step by step."""
    waiting, running, seconds = list(lengths), [], 0.0
    while waiting or running:
        while waiting and len(running) < max_num_seqs:
            running.append([prompt, waiting.pop(0)])
        seconds += step_s(len(running), sum(tokens for tokens, _ in running))
        running = [[tokens + 1, left - 1] for tokens, left in running if left > 1]
    return seconds


@pytest.mark.parametrize("max_num_seqs", [1, 2, 3, 10])
def test_responses_take_as_long_as_a_step_by_step_simulation(max_num_seqs: int):
    lengths = [7, 30, 3, 12, 12, 1, 25]

    async def main() -> float:
        one = engine(1, max_num_seqs=max_num_seqs)
        # The prompt's last token determines the response length.
        prompts = [np.array([PROMPT_TOKEN] * 3 + [length], np.int32) for length in lengths]
        await asyncio.gather(*(one.generate(request(prompt=prompt)) for prompt in prompts))
        assert one.busy_s == pytest.approx(asyncio.get_running_loop().time())
        return one.busy_s

    assert run_in_virtual_time(main()) == pytest.approx(literal_seconds(lengths, 4, max_num_seqs))


@pytest.mark.parametrize(("shares_prompts", "num_prompts"), [(True, 1), (False, 3)])
def test_only_an_engine_that_shares_prompts_reads_one_for_all_responses(shares_prompts: bool, num_prompts: int):
    length, prefill_s = 6, 2.0
    prompt = np.array([PROMPT_TOKEN] * 49 + [length], np.int32)

    async def main() -> float:
        one = engine(1, prefill_s=prefill_s, shares_prompts=shares_prompts)
        await one.generate(request(n=3, prompt=prompt))
        return one.busy_s

    steps = sum(step_s(3, 50 * num_prompts + 3 * step) for step in range(length))
    assert run_in_virtual_time(main()) == pytest.approx(50 * num_prompts * prefill_s + steps)


def test_a_later_request_joins_after_the_current_step():
    async def main() -> float:
        one = engine(10)
        first = asyncio.ensure_future(one.generate(request()))
        await asyncio.sleep(2.5)  # in the third step
        await one.generate(request())
        await first
        return asyncio.get_running_loop().time()

    seconds, contexts = 0.0, [4]
    for step in range(13):
        if step == 3:
            contexts.append(4)
        if step == 10:
            contexts.pop(0)
        seconds += step_s(len(contexts), sum(contexts))
        contexts = [tokens + 1 for tokens in contexts]
    assert run_in_virtual_time(main()) == pytest.approx(seconds)


def test_a_response_in_pieces_becomes_as_long_as_an_uninterrupted_one():
    async def main() -> list[Generated]:
        one, prompt, found = engine(20), np.full(4, PROMPT_TOKEN, np.int32), []
        while not found or found[-1].completions[0].finish_reason != "stop":
            found.append(await one.generate(request(prompt=prompt, max_tokens=8)))
            prompt = np.concatenate([prompt, found[-1].completions[0].token_ids])
        return found

    pieces = [piece.completions[0] for piece in run_in_virtual_time(main())]
    assert [(len(piece.token_ids), piece.finish_reason) for piece in pieces] == [
        (8, "length"),
        (8, "length"),
        (4, "stop"),
    ]


def test_an_abort_returns_partial_responses_and_allows_a_weight_update():
    async def main() -> None:
        one = engine(50)
        calls = [asyncio.ensure_future(one.generate(request(n=2, seed=seed))) for seed in range(2)]
        await asyncio.sleep(5.5)  # in the fourth step of 1.4 s
        await one.abort()
        responses = [completion for call in calls for completion in (await call).completions]
        assert {(len(response.token_ids), response.finish_reason) for response in responses} == {(4, "abort")}
        await one.load_weights(3)
        assert (await one.generate(request())).policy_version == 3

    run_in_virtual_time(main())


def test_sequences_that_outgrow_the_kv_cache_are_preempted_and_none_is_lost():
    async def main() -> float:
        small, large = engine(40, kv_tokens=100), engine(40)
        for one in (small, large):
            results = await asyncio.gather(*(one.generate(request(n=2, seed=seed)) for seed in range(3)))
            assert {len(c.token_ids) for result in results for c in result.completions} == {40}
        return small.busy_s / large.busy_s

    assert run_in_virtual_time(main()) > 1.2


def test_a_prompt_is_prefilled_once_for_all_its_responses():
    async def main() -> float:
        one = engine(5, prefill_s=100.0)
        await one.generate(request(n=3))
        return one.busy_s

    assert 400.0 < run_in_virtual_time(main()) < 410.0


def test_each_sequence_costs_its_admission():
    async def main() -> float:
        one = engine(5, sequence_s=100.0)
        await one.generate(request(n=3))
        return one.busy_s

    assert 300.0 < run_in_virtual_time(main()) < 310.0
