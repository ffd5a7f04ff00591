"""Decode responses in other processes: a long response takes milliseconds, which would stop the event loop.

A thread waits for each process, because threads can pass a megabyte on without the interpreter's lock.
"""

from __future__ import annotations

import asyncio
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from megatron_bapo.errors import RunError
from megatron_bapo.functions.worker import START_LIMIT_S
from megatron_bapo.functions.worker_pool import start_process
from megatron_bapo.rollout.decoder_process import ERROR, FOLDER, SERIALIZED, receive, send

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MAX_PROCESSES = 4
REPLY_LIMIT_S = 60.0
"""Timeout of a response, which takes milliseconds."""
_END_LIMIT_S = 10.0


class Decoder:
    """Decodes token ids as `tokenization.text_of` does, in up to `MAX_PROCESSES` processes that start when needed."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, model_path: Path) -> None:
        """`model_path` is the folder that the tokenizer was loaded from."""
        self._source = _source(tokenizer, model_path)
        self._threads = ThreadPoolExecutor(min(MAX_PROCESSES, os.cpu_count() or 1), "decoder")
        self._idle: list[_Process] = []

    async def decode(self, token_ids: np.ndarray) -> str:
        """Return the text without special tokens. Raises RunError if it cannot be decoded."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, self._decode, token_ids)

    def close(self) -> None:
        """End the processes."""
        self._threads.shutdown()
        for process in self._idle:
            process.close()

    def _decode(self, token_ids: np.ndarray) -> str:
        """Decode in an idle process, of which there is one or a new one can start: threads are as many as processes.

        The process may have been killed or stopped since its last call, so the call is repeated once in a new process.
        """
        content = np.ascontiguousarray(token_ids, np.int32).view(np.uint8).data
        process = self._idle.pop() if self._idle else _Process(self._source)
        try:
            text = process.decode(content)
        except OSError:
            process = _Process(self._source)
            try:
                text = process.decode(content)
            except OSError as error:
                message = f"a response of {len(token_ids)} tokens could not be decoded by 2 processes: {error}"
                raise RunError(message) from error
        self._idle.append(process)
        return text


class _Process:
    def __init__(self, source: tuple[bytes, bytes]) -> None:
        self._process, self._connection = start_process("megatron_bapo.rollout.decoder_process")
        self._source: tuple[bytes, bytes] | None = source

    def decode(self, content: memoryview) -> str:
        """Return the decoded text. Raises RunError if the process cannot decode, and OSError if it has ended or hangs.

        Then the process is killed.
        """
        try:
            self._connection.settimeout(REPLY_LIMIT_S if self._source is None else START_LIMIT_S)
            if self._source is not None:
                send(self._connection, *self._source)
                self._source = None
            send(self._connection, b"I", content)
            kind, reply = receive(self._connection)
            if kind == ERROR:
                raise RunError(f"a response of {len(content) // 4} tokens cannot be decoded:\n{reply.decode()}")
        except (OSError, RunError):
            self.close()
            raise
        return reply.decode()

    def close(self) -> None:
        self._connection.close()
        self._process.kill()
        self._process.wait(_END_LIMIT_S)


def _source(tokenizer: PreTrainedTokenizerBase, model_path: Path) -> tuple[bytes, bytes]:
    """Return the first message to a decoder process.

    A tokenizer of the library tokenizers is sent itself, because importing transformers takes seconds.
    """
    from transformers import PreTrainedTokenizerFast

    if isinstance(tokenizer, PreTrainedTokenizerFast) and type(tokenizer)._decode is PreTrainedTokenizerFast._decode:
        return SERIALIZED, tokenizer.backend_tokenizer.to_str().encode()
    return FOLDER, str(model_path.absolute()).encode()
