"""Routes of engines through partial rollouts, lost engines, checkpoints and the format that the trainer needs."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from megatron_bapo.data.in_flight_files import load_in_flight, save_in_flight
from megatron_bapo.records import NO_ROUTE, Group, InFlightState, Trajectory
from megatron_bapo.rollout.engine_routes import RouteFormat
from megatron_bapo.rollout.generation import generate_group
from megatron_bapo.rollout.in_flight_state import UnfinishedGroups, restored_trajectory
from megatron_bapo.rollout.messages import Completion, Generated, GenerationRequest
from megatron_bapo.rollout.router import Router
from megatron_bapo.simulation.virtual_time import run_in_virtual_time
from tests.unit.config.test_model_checks import EXPERTS, hf_folder
from tests.unit.rollout.test_generation import (
    GREEDY,
    LosingRouter,
    generated_over_versions,
    in_flight,
    partly_generated,
)
from tests.unit.simulation.modelled_engines import FaultyEngine, decode


def routes_of(sequence: np.ndarray, version: int) -> np.ndarray:
    """Return routes from which token and policy version can be read, int8 [T, 1, 2]."""
    return np.stack([sequence % 127, np.full(len(sequence), version)], -1).astype(np.int8)[:, None]


class RoutedRouter(LosingRouter):
    """Gives completions routes, as an engine would; one that is lost has not returned them."""

    num_rows: int = 0
    """Rows that the engines have returned."""

    async def send(self, request: GenerationRequest, **options: object) -> tuple[str, Generated]:
        name, generated = await super().send(request, **options)
        return name, replace(
            generated, completions=tuple(self._routed(request, generated, c) for c in generated.completions)
        )

    def _routed(self, request: GenerationRequest, generated: Generated, completion: Completion) -> Completion:
        sequence = np.concatenate([*request.context, completion.token_ids])
        routes = routes_of(sequence, generated.policy_version)[request.num_routed : -1]
        self.num_rows += len(routes)
        return replace(completion, routes=routes)


def sequence_of(trajectory: Trajectory) -> np.ndarray:
    return np.concatenate([trajectory.prompt_token_ids, trajectory.response_token_ids])


def test_a_token_keeps_the_route_with_which_the_next_token_was_sampled() -> None:
    router = RoutedRouter()
    group = run_in_virtual_time(generated_over_versions(router, router.send))
    for trajectory in group.trajectories:
        assert trajectory.routes is not None
        tokens, versions = trajectory.routes[:, 0].T
        np.testing.assert_array_equal(tokens, sequence_of(trajectory)[:-1] % 127)
        sampled = [span.policy_version for span in trajectory.version_spans for _ in range(span.num_tokens)]
        assert len(set(sampled)) == 3
        num_prompt = len(trajectory.prompt_token_ids)
        assert versions.tolist() == [sampled[0]] * (num_prompt - 1) + sampled
    assert router.num_rows == sum(len(t.routes) for t in group.trajectories if t.routes is not None)  # none twice


def test_tokens_of_a_lost_engine_get_their_routes_from_the_engine_that_continues_them() -> None:
    router = RoutedRouter()
    router.loses = 1
    group = run_in_virtual_time(generated_over_versions(router, router.send))
    for trajectory in group.trajectories:
        assert trajectory.routes is not None
        np.testing.assert_array_equal(trajectory.routes[:, 0, 0], sequence_of(trajectory)[:-1] % 127)


def test_tokens_without_a_route_are_marked() -> None:
    (group,) = in_flight(1, GREEDY)
    partial, prompt = group.trajectories, group.prompt.token_ids
    del partial[:]
    known = routes_of(prompt, 0)

    async def main() -> Group:
        engine, router = FaultyEngine(), Router()
        router.add(engine.name, engine, 10**9)

        async def send(request: GenerationRequest, **options: object) -> tuple[str, Generated]:
            name, generated = await router.generate(request, **options)
            return name, replace(
                generated,
                completions=tuple(replace(c, routes=known[request.num_routed :]) for c in generated.completions),
            )

        await generate_group(group, send, decode, max_failures=1)
        return await group.group(decode)

    for trajectory in run_in_virtual_time(main()).trajectories:
        assert trajectory.routes is not None
        assert len(trajectory.routes) == len(sequence_of(trajectory)) - 1
        np.testing.assert_array_equal(trajectory.routes[: len(known)], known)
        assert (trajectory.routes[len(known) :] == NO_ROUTE).all()


def test_a_checkpoint_keeps_the_routes_of_partial_responses(tmp_path: Path) -> None:
    router = RoutedRouter()
    group = run_in_virtual_time(partly_generated(router, router.send))
    save_in_flight(tmp_path, InFlightState(unfinished=UnfinishedGroups([group], {})))
    (saved,) = load_in_flight(tmp_path).unfinished
    for partial, each in zip(group.trajectories, saved.trajectories, strict=True):
        restored = restored_trajectory(each)
        assert sum(map(len, partial.routes)) > len(group.prompt.token_ids)
        np.testing.assert_array_equal(np.concatenate(restored.routes), np.concatenate(partial.routes))


@pytest.mark.parametrize(("num_experts", "dtype"), [(128, np.int8), (129, np.int16)])
def test_routes_have_the_layers_with_experts_in_the_smallest_type(
    tmp_path: Path, num_experts: int, dtype: type
) -> None:
    folder = hf_folder(tmp_path, **EXPERTS | {"num_experts": num_experts})
    assert json.loads((folder / "config.json").read_text())["mlp_only_layers"] == [0]
    experts = np.arange(5 * 4 * 2).reshape(5, 4, 2).astype(np.int16) % num_experts  # of all four layers
    completion = Completion(np.zeros(1, np.int32), np.zeros(1, np.float32), "stop", "")
    routed = RouteFormat.of(folder).attached(completion, experts, num_tokens=3)
    assert routed.routes is not None
    assert routed.routes.dtype == dtype
    np.testing.assert_array_equal(routed.routes, experts[:3, 1:])
    assert RouteFormat.of(folder).attached(completion, None, 3).routes is None
