"""A real vLLM engine compared with Hugging Face, on tiny Qwen3 checkpoints with tied embeddings and with experts."""

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3MoeConfig,
)
from vllm import AsyncEngineArgs

from megatron_bapo.cluster.engine_actor import EngineActor, EnginePlacement
from megatron_bapo.cluster.ray_cluster import local_cluster
from megatron_bapo.config.rollout import RolloutConfig
from megatron_bapo.errors import RunError
from megatron_bapo.rollout import engine_args
from megatron_bapo.rollout.engine import Engine, Generated, GenerationRequest, engine_environment
from megatron_bapo.rollout.engine_spec import EngineSpec
from megatron_bapo.rollout.messages import EngineLost
from megatron_bapo.rollout.router import Router
from megatron_bapo.weight_sync.route import WeightRoute
from megatron_bapo.weight_sync.transport import WeightStore
from tests.processes import title
from tests.tolerances import ENGINE_LOG_PROB
from tests.unit.config.examples import config
from tests.unit.weight_sync.examples import publish

VOCABULARY = ["<eos>", *map(chr, range(ord(" "), ord("~") + 1))]
END = VOCABULARY.index("<eos>")
NUMBERS = count()
REQUEST_TIMEOUT_S = 60.0
NUM_TRIES = 20
"""Tries to see a request in flight: an engine may end it while the test's process waits for a core."""
LONG_PROMPT = np.arange(1, 81, dtype=np.int32)
"""A prompt that fills two blocks of the engine's prefix cache."""


SHAPE = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    # Qwen's YaRN recipe: a context of 256 tokens for a model that was trained with 64.
    "max_position_embeddings": 64,
    "rope_parameters": {
        "rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64,
    },
    "eos_token_id": END,
    "initializer_range": 0.1,
}  # fmt: skip
DENSE = Qwen3Config(**SHAPE, tie_word_embeddings=True)
EXPERTS = Qwen3MoeConfig(
    **SHAPE, tie_word_embeddings=False, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=64,
    norm_topk_prob=True,
)  # fmt: skip


def create_checkpoint(folder: Path, config: PreTrainedConfig) -> None:
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    save_tokenizer(folder)


def save_tokenizer(folder: Path) -> None:
    tokenizer = Tokenizer(models.WordLevel({token: index for index, token in enumerate(VOCABULARY)}, unk_token="<eos>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>").save_pretrained(folder)


@dataclass(frozen=True)
class Running:
    """An engine, the Hugging Face model whose weights it should have, and a function that runs its coroutines."""

    engine: Engine
    model: PreTrainedModel
    store: WeightStore
    wait_for: Callable[[Awaitable[Any]], Any]

    def generate(self, prompt: np.ndarray, *, n: int = 4, temperature: float = 1.0, seed: int = 7) -> Generated:
        return self.wait_for(self.engine.generate(request(prompt, n=n, temperature=temperature, seed=seed)))

    def publish(self, version: int) -> None:
        publish(self.store, version, exported(self.model))

    def perturb(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))

    def change_weights(self, version: int) -> None:
        self.perturb(seed=version)
        self.publish(version)
        self.wait_for(self.engine.load_weights(version))
        self.assert_engine_has_the_models_weights()

    def log_probs(self, token_ids: np.ndarray, *, temperature: float = 1.0) -> np.ndarray:
        """Return log-probs [S - 1] computed with Hugging Face."""
        tokens = torch.from_numpy(token_ids).long()
        with torch.no_grad():
            logits = self.model(tokens[None]).logits[0, :-1] / temperature
        return logits.log_softmax(-1).gather(1, tokens[1:, None])[:, 0].numpy()

    def assert_engine_has_the_models_weights(self) -> None:
        token_ids = np.concatenate([LONG_PROMPT, LONG_PROMPT[::-3]])
        score = self.wait_for(self.engine.score(token_ids))
        np.testing.assert_allclose(score.log_probs, self.log_probs(token_ids), atol=ENGINE_LOG_PROB, rtol=0)
        self.assert_sampled_log_probs_are_the_models(self.generate(LONG_PROMPT), LONG_PROMPT)

    def assert_sampled_log_probs_are_the_models(
        self, generated: Generated, prompt: np.ndarray, temperature: float = 1.0
    ) -> None:
        for completion in generated.completions:
            sequence = np.concatenate([prompt, completion.token_ids])
            expected = self.log_probs(sequence, temperature=temperature)[len(prompt) - 1 :]
            np.testing.assert_allclose(completion.log_probs, expected, atol=ENGINE_LOG_PROB, rtol=0)


def request(
    prompt: np.ndarray, *, n: int = 4, temperature: float = 1.0, seed: int = 7, top_p: float = 1.0, top_k: int = -1
) -> GenerationRequest:
    return GenerationRequest(
        f"request {next(NUMBERS)}", (prompt,), n, temperature, top_p, top_k, min_p=0.0, max_tokens=24, seed=seed
    )


def arguments_on_a_gpu(spec: EngineSpec, monkeypatch: pytest.MonkeyPatch) -> AsyncEngineArgs:
    """Return the arguments that an engine has where vLLM finds a GPU."""
    monkeypatch.setattr(type(engine_args.current_platform), "is_cpu", lambda _: False)
    return engine_args.engine_args(spec)


def exported(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """Return the model's tensors under their checkpoint names, which differ from its parameter names."""
    with TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        return load_file(Path(folder) / "model.safetensors")


@contextmanager
def running_engine(
    folder: Path, config: PreTrainedConfig, *, repeats_embedding: bool = False, **options: bool
) -> Iterator[Running]:
    """`repeats_embedding` saves a tied output layer, too; `options` are switches of `EngineSpec`."""
    create_checkpoint(folder, config)
    if repeats_embedding:
        tensors = load_file(folder / "model.safetensors")
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    store = WeightStore.create()
    settings = RolloutConfig(max_num_seqs=256, kv_cache_gib=0.02, request_timeout_s=REQUEST_TIMEOUT_S)
    with pytest.MonkeyPatch.context() as environment, asyncio.Runner() as runner:
        for name, value in engine_environment().items():
            environment.setenv(name, value)

        async def waited(work: Awaitable[Any]) -> Any:
            return await work

        engine = Engine()
        model = AutoModelForCausalLM.from_pretrained(folder)
        run = Running(engine, model, store, lambda work: runner.run(waited(work)))
        run.wait_for(
            engine.start(
                EngineSpec(folder, settings, "float32", max_model_len=200, **options),
                WeightRoute(store.folder),
            )
        )
        try:
            yield run
        finally:
            run.wait_for(engine.shutdown())
            store.close()


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with running_engine(tmp_path_factory.mktemp("checkpoint"), DENSE) as run:
        yield run


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_sampled_log_probs_equal_hugging_faces_at_the_sampling_temperature(run: Running, temperature: float):
    prompt = np.asarray([5, 9, 2], np.int32)
    generated = run.generate(prompt, n=8, temperature=temperature)
    assert len(generated.completions) == 8
    run.assert_sampled_log_probs_are_the_models(generated, prompt, temperature)


def test_truncated_samples_have_log_probs_of_the_truncated_distribution(run: Running):
    """Training refuses truncation for this reason: the trainer's log-probs are those of the whole distribution."""
    prompt = np.asarray([5, 9, 2], np.int32)
    outputs = run.wait_for(run.engine.generate_many([request(prompt, top_k=1), request(prompt, top_p=0.5, n=8)]))
    greedy, nucleus = (np.stack([completion.log_probs[0] for completion in output.completions]) for output in outputs)
    assert greedy.tolist() == [0.0] * 4
    firsts = np.asarray([completion.token_ids[0] for completion in outputs[1].completions])
    whole = np.asarray([run.log_probs(np.append(prompt, first))[-1] for first in firsts])
    assert (nucleus > whole + 0.3).all()  # less than 0.7 of the probability mass is kept


def test_scores_equal_hugging_faces(run: Running):
    score = run.wait_for(run.engine.score(LONG_PROMPT))
    assert score.log_probs.dtype == np.float32
    np.testing.assert_allclose(score.log_probs, run.log_probs(LONG_PROMPT), atol=ENGINE_LOG_PROB, rtol=0)


def test_tokens_decoded_after_a_scored_sequence_have_the_same_log_probs_by_prefill(run: Running):
    plain, score = run.wait_for(run.engine.score(LONG_PROMPT)), run.wait_for(run.engine.score(LONG_PROMPT, 8))
    np.testing.assert_allclose(score.log_probs, plain.log_probs, atol=ENGINE_LOG_PROB, rtol=0)
    assert len(score.decoded_log_probs) == len(score.rescored_log_probs) == 8
    assert len({*score.decoded_log_probs.tolist()}) > 1
    np.testing.assert_allclose(score.decoded_log_probs, score.rescored_log_probs, atol=ENGINE_LOG_PROB, rtol=0)


def test_a_completion_that_stops_ends_with_the_end_token_and_its_text_omits_it(run: Running):
    generated = run.generate(np.asarray([3, 4], np.int32), n=64)
    stopped = [completion for completion in generated.completions if completion.finish_reason == "stop"]
    full = [completion for completion in generated.completions if completion.finish_reason == "length"]
    assert stopped
    assert full
    for completion in stopped:
        assert completion.token_ids[-1] == END
        assert END not in completion.token_ids[:-1]
    for completion in full:
        assert len(completion.token_ids) == 24
        assert END not in completion.token_ids
    for completion in generated.completions:
        assert completion.token_ids.dtype == np.int32
        assert completion.log_probs.dtype == np.float32
        known = [VOCABULARY[token] for token in completion.token_ids if 0 < token < len(VOCABULARY)]
        assert completion.text == "".join(known)


def test_the_same_seed_gives_the_same_samples_whatever_else_is_in_the_batch(run: Running):
    alone = run.generate(LONG_PROMPT, seed=11)
    others = [request(np.asarray([token], np.int32), seed=token) for token in range(1, 30)]
    crowded = run.wait_for(run.engine.generate_many([*others, request(LONG_PROMPT, seed=11)]))[-1]
    for first, second in zip(alone.completions, crowded.completions, strict=True):
        np.testing.assert_array_equal(first.token_ids, second.token_ids)
        np.testing.assert_allclose(first.log_probs, second.log_probs, atol=ENGINE_LOG_PROB, rtol=0)


def test_another_seed_and_another_completion_give_other_samples(run: Running):
    completions = [*run.generate(LONG_PROMPT, seed=11).completions, *run.generate(LONG_PROMPT, seed=12345).completions]
    assert len({completion.token_ids.tobytes() for completion in completions}) == len(completions)


def test_more_prompt_tokens_than_fit_one_engine_step_are_processed(run: Running):
    requests = [request(np.roll(LONG_PROMPT, shift), seed=shift) for shift in range(60)]
    outputs = run.wait_for(run.engine.generate_many(requests))
    assert [len(output.completions) for output in outputs] == [4] * 60
    run.assert_sampled_log_probs_are_the_models(outputs[-1], requests[-1].prompt_token_ids)


def test_after_each_load_the_engine_has_the_new_weights_and_no_stale_prefix(run: Running):
    run.assert_engine_has_the_models_weights()
    for version in (1, 2):
        run.change_weights(version)
        assert run.generate(LONG_PROMPT).policy_version == version
        assert run.wait_for(run.engine.score(LONG_PROMPT)).policy_version == version


def test_stale_uncommitted_or_incomplete_weights_are_refused_and_the_engine_keeps_serving(run: Running):
    with pytest.raises(RunError, match="has policy version 2; it does not go back to version 1"):
        run.wait_for(run.engine.load_weights(1))
    with pytest.raises(RunError, match="version 99 is not committed"):
        run.wait_for(run.engine.load_weights(99))
    complete = exported(run.model)
    without_norm = {name: tensor for name, tensor in complete.items() if name != "model.norm.weight"}
    broken = {
        10: (without_norm, r"lacks tensor model\.norm\.weight"),
        11: (complete | {"model.extra": torch.ones(1)}, r"has unknown tensor model\.extra"),
        12: (
            complete | {"model.norm.weight": torch.ones(3)},
            r"has model\.norm\.weight as \(3,\), the model as \(64,\)",
        ),
    }
    for version, (tensors, message) in broken.items():
        publish(run.store, version, tensors)
        with pytest.raises(RunError, match=message):
            run.wait_for(run.engine.load_weights(version))
    run.assert_engine_has_the_models_weights()


def test_weights_are_not_updated_while_requests_are_in_flight(run: Running):
    async def load_while_generating() -> None:
        generating = asyncio.ensure_future(run.engine.generate(request(LONG_PROMPT)))
        await asyncio.sleep(0)
        try:
            with pytest.raises(RunError, match=r"calls in flight: 1; load policy version 50 after"):
                await run.engine.load_weights(50)
        finally:
            await generating

    run.wait_for(load_while_generating())


def was_aborted(generated: Generated) -> bool:
    return "abort" in {completion.finish_reason for completion in generated.completions}


def test_progress_returns_the_tokens_of_requests_in_flight(run: Running):
    async def watched() -> tuple[Generated, list[Generated]]:
        long_request = replace(request(LONG_PROMPT, n=3), max_tokens=120)
        generating, partial_outputs = asyncio.ensure_future(run.engine.generate(long_request)), []
        while not generating.done():
            partial_outputs += (await run.engine.progress()).values()
            await asyncio.sleep(0.005)
        assert await run.engine.progress() == {}
        return await generating, partial_outputs

    def was_seen_twice(partial_outputs: list[Generated]) -> bool:
        return all(len({len(output.completions[i].token_ids) for output in partial_outputs}) > 1 for i in range(3))

    seen = (run.wait_for(watched()) for _ in range(NUM_TRIES))
    generated, partial_outputs = next(each for each in seen if was_seen_twice(each[1]))
    for position, whole in enumerate(generated.completions):
        pieces = [output.completions[position] for output in partial_outputs]
        token_ids = np.concatenate([piece.token_ids for piece in pieces])
        log_probs = np.concatenate([piece.log_probs for piece in pieces])
        assert 0 < len(token_ids) <= len(whole.token_ids)
        np.testing.assert_array_equal(token_ids, whole.token_ids[: len(token_ids)])
        np.testing.assert_array_equal(log_probs, whole.log_probs[: len(log_probs)])
    run.assert_sampled_log_probs_are_the_models(generated, LONG_PROMPT)


def test_an_abort_also_ends_requests_that_arrive_with_it(run: Running):
    """vLLM queues requests that arrive while it is paused; served when it resumes, they would delay a weight update."""

    async def aborted() -> list[Generated]:
        first = asyncio.ensure_future(run.engine.generate(replace(request(LONG_PROMPT, n=8), max_tokens=100)))
        while not (first.done() or await run.engine.progress()):
            await asyncio.sleep(0.005)
        aborting = asyncio.ensure_future(run.engine.abort())
        await asyncio.sleep(0)  # vLLM has been told to pause
        late = [asyncio.ensure_future(run.engine.generate(request(LONG_PROMPT, n=n))) for n in (1, 2, 4)]
        await aborting
        return await asyncio.gather(first, *late)

    for _ in range(NUM_TRIES):
        first, *late = run.wait_for(aborted())
        assert {completion.finish_reason for output in late for completion in output.completions} == {"abort"}
        if was_aborted(first):
            break
    else:
        pytest.fail("no request in flight was aborted")
    assert len(run.generate(LONG_PROMPT).completions[0].token_ids) > 0


def test_a_damaged_version_is_refused_and_the_engine_keeps_serving_the_old_one(run: Running):
    run.perturb(seed=60)
    run.publish(60)
    damaged = run.store.folder / "00000060" / "weights.safetensors"
    content = bytearray(damaged.read_bytes())
    content[-1] ^= 1
    damaged.write_bytes(content)
    with pytest.raises(RunError, match=r"60 was not loaded, the engine keeps version 2: .* is damaged: bucket"):
        run.wait_for(run.engine.load_weights(60))
    assert run.generate(LONG_PROMPT).policy_version == 2
    run.publish(61)
    run.wait_for(run.engine.load_weights(61))
    run.assert_engine_has_the_models_weights()


def test_calls_that_are_sent_again_have_no_further_effect(run: Running):
    """Ray sends a call again when its connection was interrupted, and runs it after the first one."""

    async def twice(call: Callable[[], Awaitable[Any]]) -> Any:
        first = await call()
        assert first == await call()
        return first

    assert (
        run.wait_for(run.engine.start(EngineSpec(Path(), RolloutConfig(), "", 0), WeightRoute(Path()))).kv_cache_tokens
        > 0
    )
    assert run.wait_for(twice(lambda: run.engine.sleep(1))) is None
    with pytest.raises(RunError, match="the engine sleeps"):
        run.generate(LONG_PROMPT)
    assert run.wait_for(twice(run.engine.wake)) is None
    run.perturb(seed=62)
    run.publish(62)
    again = request(LONG_PROMPT)
    before = run.wait_for(run.engine.generate(again))
    assert run.wait_for(run.engine.generate(again)) is before
    assert run.wait_for(twice(lambda: run.engine.load_weights(62))) > 0
    run.assert_engine_has_the_models_weights()
    assert run.wait_for(run.engine.generate(again)).policy_version == 62


def test_an_aborted_request_that_is_sent_again_continues_to_its_end(run: Running):
    async def aborted_and_sent_again() -> tuple[Generated, Generated]:
        again = replace(request(LONG_PROMPT, n=64), max_tokens=100)
        call = asyncio.ensure_future(run.engine.generate(again))
        while not (call.done() or await run.engine.progress()):
            await asyncio.sleep(0.001)
        await run.engine.abort()
        return await call, await run.engine.generate(again)

    seen = (run.wait_for(aborted_and_sent_again()) for _ in range(NUM_TRIES))
    whole = next(whole for aborted, whole in seen if was_aborted(aborted))
    assert not was_aborted(whole)


def test_an_engine_serves_nothing_after_a_version_was_discarded_while_it_was_loaded(
    run: Running, monkeypatch: pytest.MonkeyPatch
):
    """The version's file is reused for a newer version, so a worker may have read a mixture of both."""
    run.publish(63)
    run.publish(64)
    load = run.engine._server.load

    async def discard_and_load(version: int) -> None:
        run.store.discard_before(64)
        await load(version)

    monkeypatch.setattr(run.engine._server, "load", discard_and_load)
    with pytest.raises(RunError, match=r"63 was not loaded, the engine stops serving: .*63 is not committed"):
        run.wait_for(run.engine.load_weights(63))
    with pytest.raises(RunError, match="no known weights"):
        run.generate(LONG_PROMPT)
    with pytest.raises(RunError, match="no known weights"):
        run.wait_for(run.engine.score(LONG_PROMPT))
    with pytest.raises(RunError, match="no known weights"):
        run.wait_for(run.engine.load_weights(64))


@pytest.fixture(scope="module")
def experts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with running_engine(tmp_path_factory.mktemp("experts"), EXPERTS) as run:
        yield run


def test_a_mixture_of_experts_loads_new_weights(experts: Running):
    experts.assert_engine_has_the_models_weights()
    for version in (1, 2):
        experts.change_weights(version)


def test_a_tied_output_layer_that_the_checkpoint_repeats_is_updated(tmp_path: Path):
    with running_engine(tmp_path, DENSE, repeats_embedding=True) as run:
        run.change_weights(version=1)


def test_a_core_that_is_killed_while_it_loads_weights_is_a_lost_engine_at_once(experts: Running):
    """vLLM lets the call wait forever; without a check of the core the engine would be lost only after the timeout."""
    experts.publish(3)

    async def load_and_kill() -> None:
        facts = await experts.engine.start(EngineSpec(Path(), RolloutConfig(), "", 0), WeightRoute(Path()))
        processes = [psutil.Process(process_id) for process_id in facts.processes]
        # The other engine of these tests belongs to this process, too.
        core = max((p for p in processes if "EngineCore" in title(p)), key=lambda process: process.create_time())
        core.suspend()  # so that the load is in progress
        loading = asyncio.ensure_future(experts.engine.load_weights(3))
        await asyncio.sleep(0.5)
        assert await experts.engine.progress() == {}
        core.kill()
        with pytest.raises(EngineLost, match=r"version 3 was not loaded, the engine stops serving: vLLM's core ended"):
            await asyncio.wait_for(loading, REQUEST_TIMEOUT_S / 2)
        with pytest.raises(EngineLost, match="no known weights"):
            await experts.engine.load_weights(3)

    experts.wait_for(load_and_kill())


def test_under_ray_a_cancelled_request_is_released_and_a_dead_core_is_a_lost_engine(tmp_path: Path):
    create_checkpoint(tmp_path / "model", DENSE)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    settings = config(run_dir=str(tmp_path), model__create=None, model__path=str(tmp_path / "model"))
    (tmp_path / "logs").mkdir()
    store, lost = WeightStore.create(), []

    async def use(engine: EngineActor) -> None:
        router = Router(lambda name, _: lost.append(name))
        router.add(engine.name, engine, await engine.started())
        facts = await engine.start_call
        for _ in range(NUM_TRIES):
            call = asyncio.ensure_future(router.generate(replace(request(LONG_PROMPT, n=64), max_tokens=100)))
            while not (call.done() or await engine.progress()):
                await asyncio.sleep(0.005)
            if call.cancel():
                break
        else:
            pytest.fail("no request was in flight when it was cancelled")
        await router.drain(30.0)
        assert call.cancelled()
        publish(store, 1, exported(model))
        await engine.load_weights(1)  # raises an error while requests are in flight
        _, generated = await router.generate(request(LONG_PROMPT))
        assert generated.policy_version == 1
        assert lost == []
        processes = [psutil.Process(process_id) for process_id in facts.processes]
        (core,) = (process for process in processes if "EngineCore" in title(process))
        core.kill()
        with pytest.raises(EngineLost, match="vLLM's core ended"):
            await router.generate(request(LONG_PROMPT))
        assert (lost, [*router.engines]) == (["engine 0"], [])

    with local_cluster(1, 80, "engine"):
        try:
            asyncio.run(use(EngineActor(settings, 0, [EnginePlacement(store.folder, ())])))
        finally:
            store.close()
