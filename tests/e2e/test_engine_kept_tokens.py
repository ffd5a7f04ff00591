"""The tokens that a real vLLM engine samples from, compared with those of transformers under the same weights."""

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from msgspec.structs import replace as replace_in
from vllm import RequestOutput, SamplingParams
from vllm.logprobs import FlatLogprobs
from vllm.outputs import CompletionOutput, SamplingMask
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest, FinishReason
from vllm.v1.engine.output_processor import OutputProcessor, RequestOutputCollector
from vllm.v1.engine.parallel_sampling import ParentRequest
from vllm.v1.outputs import LogprobsLists, SamplingMaskLists

from megatron_bapo.config.rollout import RolloutConfig
from megatron_bapo.errors import RunError
from megatron_bapo.rollout.engine_kept_tokens import KeptTokenReader
from megatron_bapo.rollout.engine_spec import EngineSpec
from megatron_bapo.rollout.messages import Completion, Generated
from megatron_bapo.rollout.vllm_adapter import _SampledCompletion
from tests.e2e.test_engine import (
    DENSE,
    LONG_PROMPT,
    Running,
    arguments_on_a_gpu,
    create_checkpoint,
    request,
    running_engine,
)
from tests.kept_sets import only_kept, sets_in
from tests.tolerances import ENGINE_LOG_PROB


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with running_engine(tmp_path_factory.mktemp("checkpoint"), DENSE, return_kept_tokens=True) as run:
        yield run


def assert_kept_tokens_are_the_models(
    run: Running, completion: Completion, context: np.ndarray, *, top_k: int, top_p: float, min_p: float = 0.0
) -> None:
    """Compare with the definitions of min-p, top-k and top-p, which vLLM applies in this order."""
    sequence = torch.from_numpy(np.concatenate([context, completion.token_ids])).long()
    with torch.no_grad():
        logits = run.model(sequence[None]).logits[0, len(context) - 1 : -1]
    sets = sets_in(completion.kept_tokens, len(completion.token_ids))
    for row, kept in zip(logits, sets, strict=True):
        probs = row.softmax(-1)
        likely = [i for i in row.argsort(descending=True).tolist() if probs[i] >= min_p * probs.max()][:top_k]
        shares = probs[likely] / probs[likely].sum()
        before = shares.cumsum(0) - shares
        assert sorted(kept) == sorted(i for i, share in zip(likely, before.tolist(), strict=True) if share < top_p)
    log_probs = only_kept(logits, sets).log_softmax(-1).gather(1, sequence[len(context) :, None])[:, 0]
    np.testing.assert_allclose(completion.log_probs, log_probs.numpy(), atol=ENGINE_LOG_PROB, rtol=0)


@pytest.mark.parametrize(
    "sampling",
    [
        {"top_k": 7, "top_p": 0.8},
        {"top_k": 3, "top_p": 1.0},
        {"top_k": 1000, "top_p": 0.9},
        {"top_k": 9, "top_p": 1.0, "min_p": 0.3},
    ],
    ids=str,
)
def test_completions_have_the_tokens_that_they_were_sampled_from(run: Running, sampling: dict) -> None:
    given = replace(request(LONG_PROMPT, n=4), **sampling)
    for completion in run.wait_for(run.engine.generate(given)).completions:
        assert_kept_tokens_are_the_models(run, completion, LONG_PROMPT, **sampling)


def test_parts_of_a_response_have_those_of_their_own_tokens(run: Running) -> None:
    """The last report of a request in flight and the aborted request have the same ones; another request goes on."""
    sampling = {"top_k": 5, "top_p": 0.9}

    async def abort() -> tuple[list[Completion], Generated]:
        given, reports = replace(request(LONG_PROMPT, n=2, **sampling), max_tokens=110), list[Completion]()
        call = asyncio.ensure_future(run.engine.generate(given))
        while not call.done() and sum(len(each.token_ids) for each in reports) < 40:
            await asyncio.sleep(0.005)
            reports += [found.completions[0] for found in (await run.engine.progress()).values()]
        await run.engine.abort()
        return reports, await call

    reports, generated = run.wait_for(abort())
    first, context = generated.completions[0], LONG_PROMPT
    for completion in generated.completions:
        assert_kept_tokens_are_the_models(run, completion, LONG_PROMPT, **sampling)
    reported = [each.kept_tokens for each in reports if each.kept_tokens is not None]
    assert first.kept_tokens is not None
    assert np.concatenate(reported).tolist() == first.kept_tokens[: sum(map(len, reported))].tolist()
    context = np.concatenate([LONG_PROMPT, first.token_ids[:20]])
    (rest,) = run.wait_for(run.engine.generate(request(context, n=1, **sampling))).completions
    assert_kept_tokens_are_the_models(run, rest, context, **sampling)


def test_scores_are_those_of_the_whole_vocabulary(run: Running) -> None:
    score = run.wait_for(run.engine.score(LONG_PROMPT, 8))
    np.testing.assert_allclose(score.log_probs, run.log_probs(LONG_PROMPT), atol=ENGINE_LOG_PROB, rtol=0)
    np.testing.assert_allclose(score.decoded_log_probs, score.rescored_log_probs, atol=ENGINE_LOG_PROB, rtol=0)


def test_more_equally_likely_tokens_than_vllm_returns_are_refused() -> None:
    """Top-k keeps all tokens that are as likely as the last one, but vLLM returns a number of log-probs."""
    num = KeptTokenReader(1000, by_log_probs=True).num_log_probs(3)
    whole = FlatLogprobs([0], [num + 1], [2, *range(num)], [-1.0] * (num + 1))
    assert KeptTokenReader(num, by_log_probs=True).with_log_probs(whole) == [{*range(num)}]
    with pytest.raises(RunError, match=rf"more than the {num} most likely tokens whose log-probs it returns"):
        KeptTokenReader(num + 1, by_log_probs=True).with_log_probs(whole)


@pytest.mark.parametrize("top_k", [20, 64, 512, 2048])
def test_logits_in_bfloat16_have_fewer_equally_likely_tokens_than_vllm_returns(top_k: int) -> None:
    logits = torch.randn(50, 150_000, generator=torch.Generator().manual_seed(0)).bfloat16()
    kept = (logits >= logits.topk(top_k).values[:, -1:]).sum(-1)
    assert top_k < kept.max() < KeptTokenReader(150_000, by_log_probs=True).num_log_probs(top_k)


def output(token_ids: list[int], **fields: Any) -> CompletionOutput:
    return CompletionOutput(0, "", token_ids, None, **{"logprobs": None, **fields})


def test_kept_tokens_that_vllm_returns_by_its_own_switch_are_read() -> None:
    reader = KeptTokenReader(100, by_log_probs=False)
    found = reader.of(output([5, 7], sampling_mask=SamplingMask([[2, 5, 9], [7]])))
    assert (reader.num_log_probs(64), found is not None and found.tolist()) == (0, [~5, 2, 9, ~7])
    assert reader.of(output([])) is None


def test_kept_tokens_are_read_from_outputs_that_vllm_has_merged() -> None:
    """It merges the outputs of a request that wait; the sampled token is then no longer twice among the log-probs."""
    merged = FlatLogprobs([0], [4], [5, 2, 5, 9], [-1.0, -0.5, -1.0, -np.inf], [2, 1, 2, 3], [None] * 4)
    merged.extend(FlatLogprobs([0], [4], [7, 7, 2, 9], [0.0, 0.0, -np.inf, -np.inf], [1, 1, 2, 3], [None] * 4))
    found = KeptTokenReader(100, by_log_probs=True).of(output([5, 7], logprobs=merged))
    assert found is not None
    assert found.tolist() == [~5, 2, ~7]


@pytest.mark.parametrize("wanted", [False, True])
def test_engines_on_gpus_return_kept_tokens_through_vllms_own_switch(
    wanted: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    create_checkpoint(tmp_path, DENSE)
    spec = EngineSpec(tmp_path, RolloutConfig(), "bfloat16", 64, return_kept_tokens=wanted)
    assert arguments_on_a_gpu(spec, monkeypatch).return_sampling_mask is wanted


def test_vllms_masks_stay_with_their_tokens_in_late_and_aborted_outputs() -> None:
    """Of an engine on GPUs only its core is missing: it returns a token, its log-prob and its mask for each step."""
    params = SamplingParams(n=2, top_k=20, logprobs=0, flat_logprobs=True, detokenize=False, stream_interval=4)
    params.output_kind = RequestOutputKind.DELTA
    processor, queue = OutputProcessor(None, log_stats=False), RequestOutputCollector(params.output_kind, "request")
    whole = EngineCoreRequest("request", [1, 2], None, params, None, 0.0, None, None, None, external_req_id="request")
    parent = ParentRequest(whole)
    names = [parent.get_child_info(index)[0] for index in range(2)]
    for index, name in enumerate(names):
        child = replace_in(whole, request_id=name, sampling_params=parent.get_child_info(index)[1])
        processor.add_request(child, None, parent, index, queue)
    reader, partials = KeptTokenReader(1000, by_log_probs=False), [_SampledCompletion() for _ in names]

    def read() -> None:
        output = queue.get_nowait()
        for completion in output.outputs if isinstance(output, RequestOutput) else ():
            partials[completion.index].append(completion, reader.of(completion))

    for step in range(23):
        outputs = list[EngineCoreOutput]()
        for index, name in enumerate(names):
            mask = SamplingMaskLists(np.array([step, 100 + step, 200 + index], np.int32))
            log_prob = LogprobsLists(np.array([[step]]), np.array([[-step]], np.float32), np.array([1]), None)
            outputs.append(EngineCoreOutput(name, [step], log_prob, new_sampling_mask=mask))
        processor.process_outputs(outputs)
        if step % 5 == 0:
            read()
    processor.process_outputs([EngineCoreOutput(name, [], finish_reason=FinishReason.ABORT) for name in names])
    read()
    for index, partial in enumerate(partials):
        completion = partial.completion()
        assert completion.token_ids.tolist() == (-completion.log_probs).tolist() == list(range(23))
        assert sets_in(completion.kept_tokens, 23) == [[step, 100 + step, 200 + index] for step in range(23)]
        assert completion.finish_reason == "abort"
