"""The rollout scheduler with a real vLLM engine; Hugging Face computes the expected log-probs."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from megatron_bapo.config.data import DataConfig
from megatron_bapo.config.reward import EnvironmentConfig
from megatron_bapo.config.rollout import RolloutConfig
from megatron_bapo.data.prompt_stream import PromptStream
from megatron_bapo.metrics.values import scalars
from megatron_bapo.records import Group, Prompt
from megatron_bapo.rollout.engine import Engine
from megatron_bapo.rollout.environment import FunctionEnvironment
from megatron_bapo.rollout.generation import ScoredGroups
from megatron_bapo.rollout.messages import Generated, GenerationRequest
from megatron_bapo.rollout.router import Router
from megatron_bapo.rollout.scheduler import RolloutScheduler
from megatron_bapo.rollout.scheduler_deps import SchedulerDeps
from megatron_bapo.rollout.tokenization import TokenizedPrompt, load_tokenizer
from tests.e2e.test_engine import DENSE, END, VOCABULARY, Running, running_engine, save_tokenizer
from tests.tolerances import ENGINE_LOG_PROB

GROUPS_PER_BATCH = 4
KV_TOKENS = 400
"""KV cache for three groups at a time, so that weight updates interrupt some of them."""


@dataclass
class GreedyEngine:
    """Generates greedily, which the training configuration does not allow."""

    engine: Engine

    async def generate(self, request: GenerationRequest) -> Generated:
        # vLLM returns a single completion at temperature 0, because all would be the same.
        (completion,) = (generated := await self.engine.generate(replace(request, temperature=0.0, n=1))).completions
        return replace(generated, completions=(completion,) * request.n)

    async def abort(self) -> None:
        await self.engine.abort()

    async def load_weights(self, version: int) -> None:
        await self.engine.load_weights(version)

    async def progress(self) -> dict[str, Generated]:
        return await self.engine.progress()


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with running_engine(tmp_path_factory.mktemp("checkpoint"), DENSE) as run:
        yield run


class Weights:
    """Two sets of weights that are loaded in turn under new versions."""

    def __init__(self, run: Running) -> None:
        self._run = run
        self._states = []
        self.models: dict[int, PreTrainedModel] = {}
        """Models with the weights of each version."""
        self.version = 0
        for seed in range(2):
            run.perturb(seed)
            self._states.append({name: tensor.clone() for name, tensor in run.model.state_dict().items()})

    async def load(self, which: int) -> None:
        self.version += 1
        self._run.model.load_state_dict(self._states[which])
        model = AutoModelForCausalLM.from_config(DENSE)
        model.load_state_dict(self._states[which])
        self.models[self.version] = model.eval()
        self._run.publish(self.version)
        await self._run.engine.load_weights(self.version)


@pytest.fixture(scope="module")
def weights(run: Running) -> Weights:
    return Weights(run)


def tokenized(num: int) -> dict[str, TokenizedPrompt]:
    return {
        f"train:{i}": TokenizedPrompt(
            Prompt(f"train:{i}", ({"role": "user", "content": str(i)},), "", "sums"),
            np.asarray([1 + i, 5, 9 + i, 2], np.int32),
        )
        for i in range(num)
    }


async def score(group: Group) -> ScoredGroups:
    return ScoredGroups([Group(group.prompt, tuple(replace(t, reward=1.0) for t in group.trajectories))], 0)


def text_of(token_ids: np.ndarray) -> str:
    return "".join(VOCABULARY[token] for token in token_ids if 0 < token < len(VOCABULARY))


async def decode(token_ids: np.ndarray) -> str:
    return text_of(token_ids)


def trained(
    run: Running,
    weights: Weights,
    num_steps: int,
    *,
    greedy: bool,
    environment: FunctionEnvironment | None = None,
    **values: Any,
) -> list[ScoredGroups]:
    """Return `num_steps` batches, with a weight update after each; every call uses the same two sets of weights."""
    settings = RolloutConfig.model_validate({"n": 2, "max_response_length": 60} | values)

    async def main() -> list[ScoredGroups]:
        prompts, router = tokenized(40), Router()
        stream = PromptStream([p.prompt for p in prompts.values()], seed=0, shuffle=False)
        deps = SchedulerDeps(stream, prompts, router, score, decode, lambda reason: None, environment)
        scheduler = RolloutScheduler(settings, GROUPS_PER_BATCH, 7, deps)
        router.add("engine 0", GreedyEngine(run.engine) if greedy else run.engine, KV_TOKENS)
        batches = []

        async def update_weights(which: int) -> None:
            await scheduler.update_weights(weights.version + 1, lambda: weights.load(which))
            scheduler.resume()

        await update_weights(0)
        for step in range(num_steps):
            batches.append(await scheduler.take())
            await update_weights((step + 1) % 2)
        await scheduler.close()
        if environment is not None:
            environment.close()
        return batches

    return run.wait_for(main())


def map_trajectories(batches: list[ScoredGroups], function: Callable[[Any], Any]) -> list[Any]:
    return [function(t) for batch in batches for group in batch.groups for t in group.trajectories]


def test_async_with_max_staleness_0_and_any_token_budget_give_the_groups_of_sync_at_temperature_0(run, weights):
    sync = trained(run, weights, 3, greedy=True)
    for values in (
        {"mode": "async", "max_staleness": 0},
        {"partial_rollout": {"token_budget": 7}},
        {"mode": "async", "max_staleness": 0, "partial_rollout": {"token_budget": 23}},
    ):
        other = trained(run, weights, 3, greedy=True, **values)
        for content in (
            lambda t: t.response_token_ids.tolist(),
            lambda t: (t.finish_reason, t.text, len(t.version_spans)),
        ):
            assert map_trajectories(other, content) == map_trajectories(sync, content)
    assert {len(ids) for ids in map_trajectories(sync, lambda t: t.response_token_ids)} != {60}  # some responses stop


@pytest.mark.parametrize("on_weight_update", ["abort_and_resume", "keep", "drain"])
def test_each_tokens_log_prob_is_that_of_its_policy_version(run, weights, on_weight_update: str):
    batches = trained(
        run, weights, 4, mode="async", max_staleness=3, greedy=False, on_weight_update=on_weight_update,
        partial_rollout={"token_budget": 25},
    )  # fmt: skip
    num_mixed = 0
    for trajectory in map_trajectories(batches, lambda t: t):
        num_mixed += len(trajectory.version_spans) > 1
        sequence = np.concatenate([trajectory.prompt_token_ids, trajectory.response_token_ids])
        start = len(trajectory.prompt_token_ids)
        for span in trajectory.version_spans:
            end = start + span.num_tokens
            expected = log_probs(weights.models[span.policy_version], sequence[:end])[start - 1 :]
            recorded = trajectory.behaviour_log_probs[start - len(trajectory.prompt_token_ids) :][: span.num_tokens]
            np.testing.assert_allclose(recorded, expected, atol=ENGINE_LOG_PROB, rtol=0)
            start = end
        assert start == len(sequence)
    assert num_mixed > 0
    assert scalars(batches[-1].metrics)["rollout/staleness/max"] <= 3


GUESSES = """
async def reply(messages, data_source, ground_truth, extra_info=None):
    return f"No, not {len(messages[-1]['content'])}." if len(messages) < 5 else None
"""


def test_with_an_environment_the_loss_mask_is_exact_and_log_probs_include_the_replies_as_context(
    run, weights, tmp_path, monkeypatch
):
    (tmp_path / "rollouts_test_environment.py").write_text(GUESSES)
    monkeypatch.syspath_prepend(tmp_path)
    save_tokenizer(tmp_path)
    environment = FunctionEnvironment(
        EnvironmentConfig(type="function", function="rollouts_test_environment:reply"),
        DataConfig.model_validate({"train": {"path": "unused.jsonl"}, "chat_template": False}),
        load_tokenizer(tmp_path),
    )
    batches = trained(
        run, weights, 4, mode="async", max_staleness=3, greedy=False, on_weight_update="abort_and_resume",
        max_response_length=150, partial_rollout={"token_budget": 40}, environment=environment,
    )  # fmt: skip
    num_replies = num_mixed = 0
    for trajectory in map_trajectories(batches, lambda t: t):
        replies = [turn["content"] for turn in trajectory.turns if turn["role"] == "tool"]
        num_replies += len(replies)
        num_mixed += bool(replies) and len(trajectory.version_spans) > 1
        assert len(replies) <= 2
        mask = np.ones(len(trajectory.response_token_ids), bool)
        tokens = trajectory.response_token_ids.tolist()
        start = 0
        for reply in replies:
            start = tokens.index(END, start) + 1
            assert text_of(trajectory.response_token_ids[start : start + len(reply)]) == reply
            mask[start : start + len(reply)] = False
            start += len(reply)
        np.testing.assert_array_equal(trajectory.sampled_positions, np.flatnonzero(mask))
        assert mask[-1]
        sequence = np.concatenate([trajectory.prompt_token_ids, trajectory.response_token_ids])
        positions = len(trajectory.prompt_token_ids) + trajectory.sampled_positions - 1
        versions = [span.policy_version for span in trajectory.version_spans for _ in range(span.num_tokens)]
        scores = {version: log_probs(weights.models[version], sequence) for version in set(versions)}
        expected = [scores[version][position] for version, position in zip(versions, positions, strict=True)]
        np.testing.assert_allclose(trajectory.behaviour_log_probs, expected, atol=ENGINE_LOG_PROB, rtol=0)
    assert num_replies > 5
    assert num_mixed > 0


def log_probs(model: PreTrainedModel, token_ids: np.ndarray) -> np.ndarray:
    tokens = torch.from_numpy(token_ids).long()
    with torch.no_grad():
        logits = model(tokens[None]).logits[0, :-1]
    return logits.log_softmax(-1).gather(1, tokens[1:, None])[:, 0].numpy()
