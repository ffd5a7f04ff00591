import asyncio
import math
from itertools import pairwise

import numpy as np
import pytest

from megatron_bapo.config.rollout import KV_OVERCOMMIT
from megatron_bapo.errors import RunError
from megatron_bapo.rollout.messages import CompletedRequest, Completion, EngineLost, Generated, GenerationRequest
from megatron_bapo.rollout.response_lengths import UNKNOWN_FRACTION
from megatron_bapo.rollout.router import SENT_PER_TURN, Router
from megatron_bapo.simulation.virtual_time import run_in_virtual_time
from tests.unit.simulation.modelled_engines import FaultyEngine

NEVER_ENDING = 10**9
PLENTY = 10**9
EXPECTED = 100 // UNKNOWN_FRACTION
"""Expected length of a response to a `request` before any has ended."""


def request(name: str, *, prompt: int = 10, max_tokens: int = 100, n: int = 1) -> GenerationRequest:
    return GenerationRequest(name, (np.full(prompt, 7, np.int32),), n, 0.0, 1.0, -1, 0.0, max_tokens, seed=0)


def cache_for(num: int, tokens: int = 10 + EXPECTED) -> int:
    """Return the size of the KV cache of an engine that is sent `num` requests of so many expected tokens."""
    return math.ceil(num * tokens / KV_OVERCOMMIT)


def engines(num: int) -> list[FaultyEngine]:
    return [FaultyEngine(f"engine {i}", mean_length=NEVER_ENDING) for i in range(num)]


def served(engine: FaultyEngine) -> list[str]:
    return [request.request_id for _, request in engine.log]


def test_a_request_goes_to_the_engine_with_the_fewest_outstanding_tokens():
    async def main() -> list[list[str]]:
        router, fleet = Router(), engines(2)
        for engine in fleet:
            router.add(engine.name, engine, PLENTY)
        sizes = {"a": 100, "b": 40, "c": 60, "d": 40}
        await asyncio.gather(*(router.generate(request(name, max_tokens=size)) for name, size in sizes.items()))
        return [served(engine) for engine in fleet]

    assert run_in_virtual_time(main()) == [["a", "d"], ["b", "c"]]


def test_the_engine_that_has_the_prefix_is_preferred_until_it_is_full():
    async def main() -> list[list[str]]:
        router, fleet = Router(), engines(2)
        for engine in fleet:
            router.add(engine.name, engine, cache_for(2))
        await asyncio.gather(*(router.generate(request(name), prefer="engine 1") for name in "abc"))
        return [served(engine) for engine in fleet]

    assert run_in_virtual_time(main()) == [["c"], ["a", "b"]]


def test_each_served_request_is_recorded_with_its_engine_and_times():
    async def main() -> list[CompletedRequest]:
        found: list[CompletedRequest] = []
        router, (engine,) = Router(on_completed=found.append), engines(1)
        router.add(engine.name, engine, cache_for(1))
        await asyncio.gather(
            *(router.generate(request(name, max_tokens=50), prompt_serial=i) for i, name in enumerate("ab"))
        )
        return found

    first, second = run_in_virtual_time(main())
    assert first == CompletedRequest(0, "engine 0", 0.0, pytest.approx(0.5), 10, (50,))
    assert (second.prompt_serial, second.sent_s) == (1, pytest.approx(0.5))  # there was no room before


def test_an_engine_gets_up_to_its_room_and_the_oldest_waiting_prompt_goes_first():
    async def main() -> tuple[int, list[str]]:
        router, (engine,) = Router(), engines(1)
        router.add(engine.name, engine, cache_for(2))
        orders = {"a": 0, "b": 1, "late": 9, "middle": 5, "early": 2}
        await asyncio.gather(*(router.generate(request(name), prompt_serial=serial) for name, serial in orders.items()))
        return engine.most_in_flight, served(engine)

    assert run_in_virtual_time(main()) == (2, ["a", "b", "early", "middle", "late"])


def test_a_request_larger_than_the_kv_cache_goes_to_an_idle_engine():
    async def main() -> None:
        router, (engine,) = Router(), engines(1)
        router.add(engine.name, engine, 10)
        name, _ = await router.generate(request("large"))
        assert name == engine.name

    run_in_virtual_time(main())


def test_the_expected_length_of_a_request_is_the_mean_length_of_finished_completions():
    async def main() -> int:
        router, (engine,) = Router(), engines(1)
        router.add(engine.name, engine, cache_for(10, 10 + 12))
        await router.generate(request("short", max_tokens=12))
        await asyncio.gather(*(router.generate(request(str(i), max_tokens=300)) for i in range(12)))
        return engine.most_in_flight

    assert run_in_virtual_time(main()) == 10


def reported(*lengths: int, ended: int = 0, before: tuple[int, ...] = ()) -> Generated:
    """Return a report in which the first `ended` completions have ended."""
    completions = [
        Completion(np.ones(num, np.int32), np.zeros(num, np.float32), "stop" if i < ended else "abort", "", start)
        for i, (num, start) in enumerate(zip(lengths, before or (0,) * len(lengths), strict=True))
    ]
    return Generated(0, tuple(completions))


def filling(tokens: int) -> GenerationRequest:
    """Return a request that is expected to need so many tokens of the KV cache."""
    return request(str(tokens), prompt=tokens - 1, max_tokens=1)


async def needed_tokens(router: Router, engine: FaultyEngine, limit: int) -> int:
    """Return what the requests on an engine are expected to need, as the largest request shows that it still gets."""
    num = len(served(engine))
    for tokens in range(limit, 1, -1):
        call = asyncio.ensure_future(router.generate(filling(tokens)))
        await asyncio.sleep(0.1)
        call.cancel()
        await asyncio.wait({call})
        if len(served(engine)) > num:
            return limit - tokens
    raise AssertionError("the engine gets no request")


def test_reports_correct_what_a_request_is_expected_to_need():
    async def main() -> list[int]:
        router, (engine,) = Router(), engines(1)
        router.add(engine.name, engine, limit)
        engine.hangs = True
        half = asyncio.ensure_future(router.generate(filling(limit // 2)))  # a request counts as at most a cache
        call = asyncio.ensure_future(router.generate(request("a", n=3)))
        await asyncio.sleep(0.1)
        found = [await needed_tokens(router, engine, limit)]
        for each in (
            reported(5, 5, 5),
            reported(0, 35, 35, ended=1, before=(5, 5, 5)),
            reported(0, 0, 10, ended=2, before=(5, 40, 40)),
        ):
            router.record_partial({engine.name: {"a": each}})
            found.append(await needed_tokens(router, engine, limit))
        assert router.lengths.expected(100) == -(-(5 + 40) // 2)
        call.cancel()
        await asyncio.wait({call})
        following = asyncio.ensure_future(router.generate(filling(20)))
        await asyncio.sleep(0.1)
        found.append(await needed_tokens(router, engine, limit))
        following.cancel()
        half.cancel()
        return found

    longest, limit = 3 * EXPECTED, 600
    assert KV_OVERCOMMIT * limit - limit // 2 == limit
    assert run_in_virtual_time(main()) == [10 + longest, 10 + longest, 10 + 40 + 40, 10 + 50, 20]


def test_a_request_larger_than_the_cache_waits_for_half_a_cache_and_not_for_an_idle_engine():
    """Otherwise it would hold up all requests behind it until an engine has none."""

    async def main() -> tuple[list[str], list[str]]:
        router, (engine,) = Router(), engines(1)
        router.add(engine.name, engine, 4 * (10 + EXPECTED))
        names = {"a": 1, "b": 1, "c": 1, "large": 8, "d": 1}
        calls = [asyncio.create_task(router.generate(request(name, n=n))) for name, n in names.items()]
        await asyncio.sleep(0.1)
        before = served(engine)
        calls[0].cancel()
        await asyncio.sleep(0.1)
        for call in calls[1:]:
            call.cancel()
        return before, served(engine)

    assert run_in_virtual_time(main()) == (["a", "b", "c"], ["a", "b", "c", "large"])


def test_a_restored_estimate_of_lengths_is_used_for_the_first_request():
    async def main() -> int:
        router, (engine,) = Router(), engines(1)
        router.lengths.load_state_dict({"num": 3, "num_tokens": 30})
        router.add(engine.name, engine, cache_for(5, 20))
        await asyncio.gather(*(router.generate(request(str(i))) for i in range(12)))
        return engine.most_in_flight

    assert run_in_virtual_time(main()) == 5


def test_requests_of_a_lost_engine_fail_and_waiting_requests_go_to_a_new_engine():
    async def main() -> None:
        lost = []
        router, (first, second) = Router(on_lost=lambda *what: lost.append(what)), engines(2)
        router.add(first.name, first, PLENTY)
        call = asyncio.ensure_future(router.generate(request("a")))
        await asyncio.sleep(0.1)
        router.remove(first.name, "it hangs")
        with pytest.raises(EngineLost, match="it hangs"):
            await call
        waiting = asyncio.ensure_future(router.generate(request("b")))
        await asyncio.sleep(0.1)
        assert not waiting.done()
        router.add(second.name, second, PLENTY)
        assert (await waiting)[0] == second.name
        assert lost == [(first.name, "it hangs")]

    run_in_virtual_time(main())


def test_an_engine_that_dies_during_a_request_gets_no_further_requests():
    async def main() -> None:
        lost = []
        router, (first, second) = Router(on_lost=lambda *what: lost.append(what)), engines(2)
        for engine in (first, second):
            router.add(engine.name, engine, PLENTY)
        first.die()
        with pytest.raises(EngineLost):
            await router.generate(request("a"))
        assert [(await router.generate(request(name)))[0] for name in "bc"] == [second.name] * 2
        assert lost == [(first.name, "engine 0 died")]

    run_in_virtual_time(main())


def test_a_paused_router_starts_no_request_and_a_drain_timeout_names_the_engine():
    async def main() -> None:
        router, (engine,) = Router(), engines(1)
        router.add(engine.name, engine, PLENTY)
        engine.hangs = True
        stuck = asyncio.ensure_future(router.generate(request("a")))
        await asyncio.sleep(0.1)
        router.pause()
        waiting = asyncio.ensure_future(router.generate(request("b")))
        message = r"30 s; still pending: engine 0 \(1 requests\), no engine yet \(1 requests\)"
        with pytest.raises(RunError, match=message):
            await router.drain(30.0)
        assert served(engine) == ["a"]
        stuck.cancel()
        await asyncio.sleep(0)
        await router.drain(30.0)
        engine.hangs = False
        router.resume()
        await waiting

    run_in_virtual_time(main())


def test_requests_that_are_cancelled_leave_nothing_outstanding():
    async def main() -> None:
        router, (engine,) = Router(), engines(1)
        router.add(engine.name, engine, cache_for(1))
        calls = [asyncio.ensure_future(router.generate(request(str(i)))) for i in range(3)]
        await asyncio.sleep(0.1)
        for call in (calls[1], calls[0]):  # a waiting request, then the one in flight
            call.cancel()
        await calls[2]
        await router.drain(1.0)
        assert engine.most_in_flight == 1
        await asyncio.gather(*(router.generate(filling(num)) for num in (20, 16)))
        assert engine.most_in_flight == 2, "together they need all that the engine gets"

    run_in_virtual_time(main())


def test_a_request_that_reaches_its_engine_after_the_abort_is_aborted_too():
    class Slow(FaultyEngine):
        async def generate(self, request: GenerationRequest) -> Generated:
            await asyncio.sleep(0.2)
            return await super().generate(request)

    async def main() -> tuple[str, float]:
        router, engine, loop = Router(), Slow("engine 0", mean_length=NEVER_ENDING), asyncio.get_running_loop()
        router.add(engine.name, engine, PLENTY)
        call = asyncio.ensure_future(router.generate(request("a", max_tokens=1000)))
        await asyncio.sleep(0.1)
        router.pause()
        await router.abort(30.0)
        _, generated = await call
        return generated.completions[0].finish_reason, loop.time()

    reason, end_s = run_in_virtual_time(main())
    assert reason == "abort"
    assert end_s < 2.0


def test_an_engine_that_does_not_end_aborted_requests_in_time_is_lost():
    async def main() -> list[str]:
        lost: list[str] = []
        router, (engine,) = Router(on_lost=lambda _, reason: lost.append(reason)), engines(1)
        router.add(engine.name, engine, PLENTY)
        engine.hangs = True
        call = asyncio.ensure_future(router.generate(request("a")))
        await asyncio.sleep(0.1)
        router.pause()
        await router.abort(30.0)
        with pytest.raises(EngineLost):
            await call
        await router.drain(1.0)
        return lost

    assert run_in_virtual_time(main()) == ["engine 0 did not abort its requests within 30 s"]


def report(*num_before: int, tokens: int = 2) -> Generated:
    """Return a progress report; each token is its position in the response."""
    return Generated(
        1,
        tuple(
            Completion(np.arange(num, num + tokens, dtype=np.int32), np.zeros(tokens, np.float32), "abort", "", num)
            for num in num_before
        ),
    )


@pytest.mark.parametrize(
    ("reports", "num_recorded"),
    [
        ([report(0, 0), report(2, 2), report(4, 4)], 6),
        ([report(0, 0), report(4, 4), report(6, 6)], 2),  # a report was lost
        ([report(0, 0), report(2, 2), report(0, 0, tokens=3), report(3, 3)], 5),  # the engine began anew
    ],
)
def test_progress_that_is_lost_or_reported_again_leaves_no_gap_and_no_duplicate(reports, num_recorded):
    async def main() -> Generated:
        router, (engine,) = Router(), engines(1)
        router.add(engine.name, engine, PLENTY)
        engine.hangs = True
        call = asyncio.ensure_future(router.generate(request("a", n=2)))
        await asyncio.sleep(0.1)
        for each in reports:
            router.record_partial({engine.name: {"a": each}})
        recorded = router.partial_outputs()["a"]
        call.cancel()
        return recorded

    for completion in run_in_virtual_time(main()).completions:
        assert completion.token_ids.tolist() == [*range(num_recorded)]


class Reluctant(FaultyEngine):
    """Takes a second to release a cancelled request."""

    async def generate(self, request: GenerationRequest) -> Generated:
        try:
            return await super().generate(request)
        finally:
            await asyncio.sleep(1.0)


def test_a_cancelled_request_is_in_flight_until_its_engine_has_released_it():
    async def main() -> float:
        router, engine, loop = Router(), Reluctant("engine 0", mean_length=NEVER_ENDING), asyncio.get_running_loop()
        router.add(engine.name, engine, PLENTY)
        call = asyncio.ensure_future(router.generate(request("a")))
        await asyncio.sleep(0.1)
        call.cancel()
        start = loop.time()
        await router.drain(5.0)
        assert call.cancelled()
        return loop.time() - start

    assert run_in_virtual_time(main()) == pytest.approx(1.0)


class Failing(FaultyEngine):
    def __init__(self, name: str, error: Exception) -> None:
        super().__init__(name)
        self._error = error

    async def load_weights(self, version: int) -> None:
        raise self._error


def test_engines_lost_during_on_every_are_removed_and_the_others_complete_the_action():
    async def main() -> None:
        lost: list[tuple[str, str]] = []
        router = Router(on_lost=lambda name, reason: lost.append((name, reason)))
        fleet = [
            FaultyEngine("engine 0"),
            Failing("engine 1", EngineLost("engine 1 died")),
            FaultyEngine("engine 2"),
        ]
        for engine in fleet:
            router.add(engine.name, engine, PLENTY)
        loading = asyncio.ensure_future(router.on_every(lambda engine: engine.load_weights(3)))
        await asyncio.sleep(0.1)
        router.remove("engine 2", "it did not answer a probe")
        assert await loading == {"engine 0": None}
        assert fleet[0].version == 3
        assert lost == [("engine 1", "engine 1 died"), ("engine 2", "it did not answer a probe")]
        assert [*router.engines] == ["engine 0"]

    run_in_virtual_time(main())


def test_another_error_of_an_engine_is_raised_when_all_engines_have_returned():
    async def main() -> None:
        router = Router()
        good, refusing = FaultyEngine("engine 0"), Failing("engine 1", RunError("policy version 3 lacks tensor a"))
        for engine in (good, refusing):
            router.add(engine.name, engine, PLENTY)
        with pytest.raises(RunError, match="lacks tensor a"):
            await router.on_every(lambda engine: engine.load_weights(3))
        assert good.version == 3
        assert [*router.engines] == ["engine 0", "engine 1"]

    run_in_virtual_time(main())


def test_hundreds_of_requests_are_sent_over_many_turns_of_the_event_loop_in_the_order_of_their_prompts():
    async def main() -> tuple[list[int], list[int]]:
        router, (engine,) = Router(), engines(1)
        router.add(engine.name, engine, PLENTY)
        router.pause()
        calls = [
            asyncio.ensure_future(router.generate(request(str(i), max_tokens=1), prompt_serial=i))
            for i in reversed(range(300))
        ]
        await asyncio.sleep(0)
        num_sent = [len(engine.log)]
        router.resume()
        while num_sent[-1] < 300:
            await asyncio.sleep(0)
            num_sent.append(len(engine.log))
        await asyncio.gather(*calls)
        return num_sent, [int(name) for name in served(engine)]

    num_sent, order = run_in_virtual_time(main())
    assert num_sent[0] == 0
    assert max(after - before for before, after in pairwise(num_sent)) <= SENT_PER_TURN
    assert order == [*range(300)]


def test_a_pause_also_stops_the_requests_that_a_later_turn_would_send():
    async def main() -> tuple[int, int]:
        router, (engine,) = Router(), engines(1)
        router.add(engine.name, engine, PLENTY)
        calls = [asyncio.ensure_future(router.generate(request(str(i), max_tokens=1))) for i in range(100)]
        await asyncio.sleep(0)
        router.pause()
        await router.drain(60.0)
        num_before = len(engine.log)
        router.resume()
        await asyncio.gather(*calls)
        return num_before, len(engine.log)

    num_before, num = run_in_virtual_time(main())
    assert 0 < num_before <= 2 * SENT_PER_TURN
    assert num == 100
