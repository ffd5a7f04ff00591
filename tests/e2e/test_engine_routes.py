"""The routes that a real vLLM engine returns, compared with those of transformers under the same weights."""

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import Qwen3MoeConfig

from megatron_bapo.config.rollout import RolloutConfig
from megatron_bapo.rollout.engine import engine_environment
from megatron_bapo.rollout.engine_spec import EngineSpec
from megatron_bapo.rollout.messages import Generated
from tests.e2e.test_engine import (
    LONG_PROMPT,
    SHAPE,
    Running,
    arguments_on_a_gpu,
    create_checkpoint,
    request,
    running_engine,
)
from tests.parallel.routing import routes_of

MODEL = Qwen3MoeConfig(
    **SHAPE | {"num_hidden_layers": 3}, tie_word_embeddings=False, num_experts=8, num_experts_per_tok=3,
    moe_intermediate_size=64, norm_topk_prob=True, mlp_only_layers=[1],
)  # fmt: skip


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with running_engine(tmp_path_factory.mktemp("checkpoint"), MODEL, return_routes=True) as run:
        yield run


def assert_routes_are_the_models(run: Running, generated: Generated, context: np.ndarray, num_routed: int = 0) -> None:
    """Compare the sets of experts: only their order within a token depends on the implementation."""
    for completion in generated.completions:
        sequence = np.concatenate([context, completion.token_ids])
        expected = routes_of(run.model, torch.from_numpy(sequence[:-1]).long())[num_routed:]
        assert completion.routes is not None
        assert (completion.routes.dtype, completion.routes.shape) == (np.int8, expected.shape)
        np.testing.assert_array_equal(np.sort(completion.routes, -1), np.sort(expected, -1))


def test_every_completion_has_the_routes_of_prompt_and_response(run: Running) -> None:
    for _ in range(2):  # the second time, the prompt's KV cache is reused
        assert_routes_are_the_models(run, run.generate(LONG_PROMPT, n=4), LONG_PROMPT)
    short = np.asarray([5, 9, 2], np.int32)
    several = [request(short, n=1), request(LONG_PROMPT[::-1].copy(), n=2)]
    first, second = run.wait_for(run.engine.generate_many(several))
    assert_routes_are_the_models(run, first, short)
    assert_routes_are_the_models(run, second, LONG_PROMPT[::-1])


def test_a_continued_response_gets_the_routes_that_it_lacks(run: Running) -> None:
    first = replace(request(LONG_PROMPT, n=1), max_tokens=10)
    (start,) = run.wait_for(run.engine.generate(first)).completions
    assert start.routes is not None
    num_routed = len(start.routes)
    assert num_routed == len(LONG_PROMPT) + len(start.token_ids) - 1
    context = LONG_PROMPT, start.token_ids
    rest = run.wait_for(run.engine.generate(replace(request(LONG_PROMPT, n=1), context=context, num_routed=num_routed)))
    assert_routes_are_the_models(run, rest, np.concatenate(context), num_routed)


def test_an_aborted_request_has_the_routes_of_its_tokens(run: Running) -> None:
    async def abort() -> Generated:
        call = asyncio.ensure_future(run.engine.generate(replace(request(LONG_PROMPT, n=3), max_tokens=110)))
        while not (call.done() or await run.engine.progress()):
            await asyncio.sleep(0.005)
        await asyncio.sleep(0.05)
        await run.engine.abort()
        return await call

    generated = run.wait_for(abort())
    assert_routes_are_the_models(
        run, replace(generated, completions=tuple(c for c in generated.completions if len(c.token_ids))), LONG_PROMPT
    )


def test_new_weights_have_new_routes(run: Running) -> None:
    old = run.generate(LONG_PROMPT).completions[0].routes
    run.change_weights(1)
    generated = run.generate(LONG_PROMPT)
    assert_routes_are_the_models(run, generated, LONG_PROMPT)
    new = generated.completions[0].routes
    assert old is not None
    assert new is not None
    assert (np.sort(old[:80], -1) != np.sort(new[:80], -1)).any()


@pytest.mark.parametrize("wanted", [False, True])
def test_engines_on_gpus_return_routes_through_vllms_own_switch(
    wanted: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    create_checkpoint(tmp_path, MODEL)
    spec = EngineSpec(tmp_path, RolloutConfig(), "bfloat16", 64, return_routes=wanted)
    arguments = arguments_on_a_gpu(spec, monkeypatch)
    assert arguments.enable_return_routed_experts is wanted
    assert arguments.enable_prefix_caching  # vLLM requires it for routes
    environment = engine_environment(["0"], second_model_runner=wanted)
    assert environment.get("VLLM_USE_V2_MODEL_RUNNER") == ("1" if wanted else None)
