import asyncio
import os
import signal
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path

import numpy as np
import psutil
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from megatron_bapo.errors import RunError
from megatron_bapo.rollout import decoding
from megatron_bapo.rollout.decoding import Decoder
from megatron_bapo.rollout.tokenization import load_tokenizer, text_of
from tests.processes import command_line


def create_tokenizer(folder: Path) -> None:
    """Create a tokenizer of single bytes, so that a response may end within a character."""
    vocabulary = {token: i for i, token in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>")
    fast.add_tokens([AddedToken("<think>", special=False)])
    fast.save_pretrained(folder)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    create_tokenizer(folder)
    return folder


@pytest.fixture
def decoder(folder: Path) -> Iterator[Decoder]:
    with closing(Decoder(load_tokenizer(folder), folder)) as decoder:
        yield decoder


def responses(num: int) -> list[np.ndarray]:
    """Return random tokens, special ones and fragments of characters among them."""
    rng = np.random.default_rng(0)
    return [rng.integers(0, 258, rng.integers(0, 200)).astype(np.int32) for _ in range(num)]


async def decoded(decoder: Decoder, token_ids: Sequence[np.ndarray]) -> list[str]:
    return await asyncio.gather(*map(decoder.decode, token_ids))


def children() -> list[psutil.Process]:
    return [p for p in psutil.Process().children() if "megatron_bapo.rollout.decoder_process" in command_line(p)]


def test_texts_are_those_of_the_tokenizer_in_the_order_of_the_responses(decoder: Decoder, folder: Path):
    tokenizer, token_ids = load_tokenizer(folder), responses(200)
    assert any(256 in each for each in token_ids)

    assert asyncio.run(decoded(decoder, token_ids)) == [text_of(each, tokenizer) for each in token_ids]


def test_the_event_loop_runs_while_a_response_is_decoded(decoder: Decoder):
    async def num_turns() -> int:
        decoding, num = asyncio.ensure_future(decoder.decode(np.full(300_000, 70, np.int32))), 0
        while not decoding.done():
            await asyncio.sleep(0)
            num += 1
        assert len(await decoding) == 300_000
        return num

    assert asyncio.run(num_turns()) > 100


def test_a_process_that_was_killed_is_replaced(decoder: Decoder, folder: Path):
    expected, token_ids = text_of(np.arange(250), load_tokenizer(folder)), np.arange(250, dtype=np.int32)
    for _ in range(3):
        assert asyncio.run(decoder.decode(token_ids)) == expected
        (process,) = children()
        process.send_signal(signal.SIGKILL)


def test_a_process_that_hangs_is_replaced(decoder: Decoder, folder: Path, monkeypatch: pytest.MonkeyPatch):
    expected, token_ids = text_of(np.arange(250), load_tokenizer(folder)), np.arange(250, dtype=np.int32)
    assert asyncio.run(decoder.decode(token_ids)) == expected
    (stopped,) = children()
    stopped.send_signal(signal.SIGSTOP)
    monkeypatch.setattr(decoding, "REPLY_LIMIT_S", 0.5)
    assert asyncio.run(asyncio.wait_for(decoder.decode(token_ids), 60.0)) == expected
    assert stopped not in children()


def test_a_response_is_an_error_if_no_process_decodes_it_in_time(decoder: Decoder, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(decoding, "START_LIMIT_S", 0.001)
    with pytest.raises(RunError, match="a response of 1 tokens could not be decoded by 2 processes: timed out"):
        asyncio.run(decoder.decode(np.array([70], np.int32)))
    assert children() == []


def test_tokens_that_cannot_be_decoded_are_an_error_and_do_not_end_the_decoder(decoder: Decoder):
    with pytest.raises(RunError, match=r"(?s)a response of 1 tokens cannot be decoded:.*OverflowError"):
        asyncio.run(decoder.decode(np.array([-1], np.int32)))
    assert asyncio.run(decoder.decode(np.array([70], np.int32))) != ""


def test_processes_start_with_the_first_response_and_end_with_the_decoder(folder: Path):
    decoder = Decoder(load_tokenizer(folder), folder)
    assert children() == []
    asyncio.run(decoded(decoder, responses(3)))
    assert 1 <= len(children()) <= min(4, os.cpu_count() or 1)
    decoder.close()
    assert children() == []


class OwnTokenizer(PreTrainedTokenizerFast):
    def _decode(self, *args, **kwargs) -> str:
        return "own"


@pytest.mark.slow
def test_a_tokenizer_with_its_own_decoding_is_loaded_from_its_folder(folder: Path):
    own = OwnTokenizer.from_pretrained(folder)
    with closing(Decoder(own, folder)) as decoder:
        found = asyncio.run(decoder.decode(np.array([70, 256, 71], np.int32)))

    assert found == text_of([70, 71], load_tokenizer(folder))
