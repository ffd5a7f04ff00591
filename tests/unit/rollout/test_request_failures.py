"""A lost engine is held against a request only if the request was alone on it."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import pytest

from megatron_bapo.errors import RunError
from megatron_bapo.rollout.generation import generate_group
from megatron_bapo.rollout.in_flight_group import InFlightGroup, create_in_flight_group
from megatron_bapo.rollout.messages import Completion, EngineLost, Generated, GenerationRequest, SegmentEnd
from megatron_bapo.rollout.quarantine import QuarantinedPrompt
from megatron_bapo.rollout.request_failures import FIRST_TRIAL_TOKENS, RequestFailures
from megatron_bapo.rollout.router import Router
from megatron_bapo.simulation.virtual_time import run_in_virtual_time
from tests.unit.simulation.modelled_engines import SAMPLING, TOKEN_S, FaultyEngine, decode, prompts

LONG = replace(SAMPLING, n=1, temperature=0.0, max_response_length=1000)
RESTART_S = 1.0


@dataclass
class Poisonable(FaultyEngine):
    """An engine that dies when a request of `poison` has that many response tokens, by the prompt's first token."""

    poison: dict[int, int] = field(default_factory=dict)

    async def generate(self, request: GenerationRequest) -> Generated:
        limit = self.poison.get(int(request.prompt_token_ids[0]))
        left = None if limit is None else limit - (len(request.prompt_token_ids) - 2)
        if left is None or left > request.max_tokens:
            return await super().generate(request)
        asyncio.get_running_loop().call_later(left * TOKEN_S, self.die)
        return await super().generate(request)


class Fleet:
    """Engines that are replaced after they died."""

    def __init__(self, num_engines: int, poison: dict[int, int], *, reports: bool = True) -> None:
        self.poison, self.reports = poison, reports
        self.router = Router(on_lost=lambda name, reason: self.replace(name))
        self.alive: dict[str, Poisonable] = {}
        self.num_lost = 0
        for i in range(num_engines):
            self.add(f"engine {i}")

    def add(self, name: str) -> None:
        self.alive[name] = Poisonable(name, mean_length=10**9, poison=self.poison)
        self.router.add(name, self.alive[name], 10**9)

    def replace(self, name: str) -> None:
        self.num_lost += 1
        asyncio.get_running_loop().call_later(RESTART_S, self.add, name)

    async def report(self) -> None:
        """Report what the engines have generated, as health checks do."""
        while self.reports:
            await asyncio.sleep(0.5)
            self.router.record_partial(await self.router.on_every(lambda engine: engine.progress()))

    async def kill_all(self, at: Sequence[float]) -> None:
        start = asyncio.get_running_loop().time()
        for time_s in at:
            await asyncio.sleep(start + time_s - asyncio.get_running_loop().time())
            for engine in self.alive.values():
                engine.die()

    async def generate(self, groups: list[InFlightGroup], max_failures: int = 3) -> list[object]:
        """Return None for each group that was generated, or the error."""
        send = self.router.generate
        work = (generate_group(group, send, decode, max_failures=max_failures) for group in groups)
        report = asyncio.ensure_future(self.report())
        try:
            return await asyncio.gather(*work, return_exceptions=True)
        finally:
            report.cancel()


def in_flight(num: int, n: int = 1) -> list[InFlightGroup]:
    sampling = replace(LONG, n=n)
    return [
        create_in_flight_group(p, sampling, batch_seed=1, index=i, prompt_serial=i) for i, p in enumerate(prompts(num))
    ]


@pytest.mark.parametrize("max_failures", [2, 3])
@pytest.mark.parametrize("num_engines", [1, 2])
def test_requests_that_were_on_many_dying_engines_are_not_quarantined(num_engines: int, max_failures: int):
    async def main() -> list[object]:
        fleet = Fleet(num_engines, {})
        kills = asyncio.ensure_future(fleet.kill_all([0.4, 1.8, 3.2]))
        results = await fleet.generate(in_flight(8, n=2), max_failures=max_failures)
        await kills
        assert fleet.num_lost == num_engines * 3
        return results

    assert run_in_virtual_time(main()) == [None] * 8


@pytest.mark.parametrize("num_engines", [1, 3])
@pytest.mark.parametrize(("at_token", "reports"), [(1, True), (40, True), (400, True), (400, False)])
def test_the_request_that_ends_its_engines_is_quarantined_and_no_other(num_engines: int, at_token: int, reports: bool):
    async def main() -> tuple[list[object], int]:
        fleet = Fleet(num_engines, {4: at_token}, reports=reports)
        return await fleet.generate(in_flight(8)), fleet.num_lost

    results, num_lost = run_in_virtual_time(main())
    assert isinstance(results[3], QuarantinedPrompt)
    assert results[:3] + results[4:] == [None] * 7
    # Without reports it passes the first trial of 256 tokens, unless it happens to be alone before.
    assert num_lost == 5 if reports else num_lost in (5, 2 + 2 + 3)


def test_a_request_that_must_be_alone_gets_the_first_empty_engine_while_others_continue_elsewhere():
    def request(name: str, max_tokens: int) -> GenerationRequest:
        return GenerationRequest(name, (prompts(1)[0].token_ids,), 1, 0.0, 1.0, -1, 0.0, max_tokens, 0)

    async def main() -> None:
        router, engines = Router(), [FaultyEngine(f"engine {i}", mean_length=10**9) for i in range(2)]
        for engine in engines:
            router.add(engine.name, engine, 10**9)
        first = [asyncio.ensure_future(router.generate(request(f"first {i}", 100 + 50 * i))) for i in range(2)]
        await asyncio.sleep(0.1)
        alone = [asyncio.ensure_future(router.generate(request(f"alone {i}", 20), alone=True)) for i in range(2)]
        cancelled = asyncio.ensure_future(router.generate(request("cancelled", 20), alone=True))
        await asyncio.sleep(0.1)
        assert "no engine yet (3 requests)" in router.pending()
        cancelled.cancel()
        late = [asyncio.ensure_future(router.generate(request(f"late {i}", 10))) for i in range(3)]
        await asyncio.sleep(0.2)
        assert all(call.done() for call in late)  # on the engine that is not reserved
        await asyncio.gather(*first, *alone)
        after = await asyncio.gather(*(router.generate(request(f"after {i}", 10)) for i in range(2)))
        assert {name for name, _ in after} == {"engine 0", "engine 1"}
        served = {r.request_id: at for engine in engines for at, r in engine.log}
        assert served["alone 0"] == pytest.approx(100 * TOKEN_S)
        assert served["alone 1"] == pytest.approx(120 * TOKEN_S)
        assert "cancelled" not in served

    run_in_virtual_time(main())


def failed(failures: RequestFailures, *errors: RunError) -> list[bool]:
    return [failures.add(error) for error in errors]


def test_a_lost_engine_counts_only_if_the_request_was_alone_on_it():
    lost, alone = EngineLost("engine 0 died"), EngineLost("engine 0 died", was_alone=True)
    refused = RunError("engine 0 cannot answer")

    assert failed(RequestFailures(3), refused, refused, refused) == [False, False, True]
    assert failed(RequestFailures(3), *[lost] * 9) == [False] * 9
    assert failed(RequestFailures(3), alone, alone, alone) == [False, False, True]
    assert failed(RequestFailures(3), refused, lost, alone, refused) == [False, False, False, True]


def test_each_trial_is_longer_than_the_one_before_and_an_aborted_one_is_repeated():
    def generated(end: SegmentEnd) -> Generated:
        return Generated(0, (Completion(prompts(1)[0].token_ids, prompts(1)[0].token_ids, end, ""),))

    request = GenerationRequest("a", prompts(1)[0].token_ids, 1, 1.0, 1.0, -1, 0.0, 10**6, 0)
    failures, lengths = RequestFailures(2), []
    ends: tuple[SegmentEnd, ...] = ("abort", "length", "length")
    for end in ends:
        while not failures.must_be_alone:
            assert failures.next_attempt(request).max_tokens == 10**6
            failures.add(EngineLost("engine 0 died"))
        lengths.append(failures.next_attempt(request).max_tokens)
        failures.clear(generated(end))
    assert lengths == [FIRST_TRIAL_TOKENS, FIRST_TRIAL_TOKENS, 16 * FIRST_TRIAL_TOKENS]
    assert not failures.must_be_alone
