"""The tokens that sampling keeps through partial rollouts, lost engines and checkpoints."""

from dataclasses import replace
from pathlib import Path

import numpy as np

from megatron_bapo.data.in_flight_files import load_in_flight, save_in_flight
from megatron_bapo.kept_tokens import kept_tokens_of
from megatron_bapo.records import InFlightState
from megatron_bapo.rollout.in_flight_state import UnfinishedGroups, restored_trajectory
from megatron_bapo.rollout.messages import Completion, Generated
from megatron_bapo.simulation.virtual_time import run_in_virtual_time
from tests.unit.rollout.test_generation import LosingRouter, generated_over_versions, partly_generated


def kept(token_ids: np.ndarray) -> np.ndarray:
    """Return sets from which the tokens can be read."""
    sampled = token_ids.tolist()
    return kept_tokens_of(sampled, [{token, 10_000 + token} for token in sampled])


def with_kept_tokens(completion: Completion) -> Completion:
    return replace(completion, kept_tokens=kept(completion.token_ids)) if len(completion.token_ids) else completion


class TruncatingRouter(LosingRouter):
    """Gives completions kept tokens, as an engine would, also one that is lost."""

    def reported(self, generated: Generated) -> Generated:
        return replace(generated, completions=tuple(map(with_kept_tokens, generated.completions)))


def test_a_response_has_the_kept_tokens_of_all_its_parts() -> None:
    for loses in (0, 1):
        router = TruncatingRouter()
        router.loses = loses
        for trajectory in run_in_virtual_time(generated_over_versions(router, router.send)).trajectories:
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
