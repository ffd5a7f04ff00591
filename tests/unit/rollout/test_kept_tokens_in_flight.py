"""The tokens that sampling keeps through partial rollouts, lost engines and checkpoints."""

import asyncio
from dataclasses import replace
from pathlib import Path

import numpy as np

from megatron_bapo.data.in_flight_files import load_in_flight, save_in_flight
from megatron_bapo.kept_tokens import kept_tokens_of
from megatron_bapo.records import Group, InFlightState
from megatron_bapo.rollout.generation import generate_group
from megatron_bapo.rollout.in_flight_state import UnfinishedGroups, restored_trajectory
from megatron_bapo.rollout.messages import Completion, EngineLost, Generated, GenerationRequest
from megatron_bapo.rollout.router import Router
from megatron_bapo.simulation.virtual_time import run_in_virtual_time
from tests.unit.rollout.test_generation import GREEDY, in_flight, partly_generated, updated_twice
from tests.unit.simulation.modelled_engines import TOKEN_S, FaultyEngine, decode


def kept(token_ids: np.ndarray) -> np.ndarray:
    """Return sets from which the tokens can be read."""
    sampled = token_ids.tolist()
    return kept_tokens_of(sampled, [{token, 10_000 + token} for token in sampled])


def with_kept_tokens(completion: Completion) -> Completion:
    return replace(completion, kept_tokens=kept(completion.token_ids)) if len(completion.token_ids) else completion


class TruncatingRouter(Router):
    """Sends requests to modelled engines and gives their completions kept tokens, as an engine would."""

    loses: int = 0
    """Number of requests after which the engine is lost once, with its tokens."""

    async def send(self, request: GenerationRequest, **options: object) -> tuple[str, Generated]:
        name, generated = await self.generate(request, **options)
        generated = replace(generated, completions=tuple(map(with_kept_tokens, generated.completions)))
        self.loses -= 1
        if self.loses == 0:
            parts = tuple(replace(c, finish_reason="abort", text="") for c in generated.completions)
            raise EngineLost("lost", replace(generated, completions=parts))
        return name, generated


def test_a_response_has_the_kept_tokens_of_all_its_parts() -> None:
    async def main(loses: int) -> Group:
        router, engine, (group,) = TruncatingRouter(), FaultyEngine(mean_length=10**9), in_flight(1, GREEDY)
        router.loses = loses
        router.add(engine.name, engine, 10**9)
        task = asyncio.ensure_future(generate_group(group, router.send, decode, max_failures=3))
        await updated_twice(router, engine, every_s=15.5 * TOKEN_S)
        await task
        return await group.group(decode)

    for loses in (0, 1):
        for trajectory in run_in_virtual_time(main(loses)).trajectories:
            assert len({span.policy_version for span in trajectory.version_spans}) > 1
            assert trajectory.kept_tokens is not None
            assert trajectory.kept_tokens.tolist() == kept(trajectory.response_token_ids).tolist()


def test_a_checkpoint_keeps_those_of_partial_responses_and_of_requests_in_flight(tmp_path: Path) -> None:
    router = TruncatingRouter()
    group = run_in_virtual_time(partly_generated(router, router.send))
    new = with_kept_tokens(Completion(np.array([7, 8], np.int32), np.zeros(2, np.float32), "abort", ""))
    first = group.trajectories[0]
    in_flight = {f"{group.identity}:0:{first.num_tokens}#1": Generated(0, (new,))}
    save_in_flight(tmp_path, InFlightState(unfinished=UnfinishedGroups([group], in_flight)))
    (saved,) = load_in_flight(tmp_path).unfinished
    for position, (partial, each) in enumerate(zip(group.trajectories, saved.trajectories, strict=True)):
        restored = restored_trajectory(each)
        assert restored.num_tokens == partial.num_tokens + 2 * (position == 0) > 10
        tokens = np.concatenate([segment.token_ids for segment in restored.sampled])
        assert np.concatenate(restored.kept_tokens).tolist() == kept(tokens).tolist()
