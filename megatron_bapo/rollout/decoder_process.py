"""Process that decodes token ids, started by `decoding.py` as `python -m megatron_bapo.rollout.decoder_process FD`.

Its first message is the tokenizer, each further one an int32 array, and each reply the text in UTF-8. It ends when the
other side closes the connection.
"""

from __future__ import annotations

import socket
import struct
import sys
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np

from megatron_bapo.text import without_lone_surrogates

SERIALIZED, FOLDER = b"S", b"F"
"""First byte of the first message: a tokenizer of the library tokenizers follows, or the folder of another one."""
TEXT, ERROR = b"T", b"E"
"""First byte of a reply."""
_SIZE = struct.Struct("<Q")


def send(connection: socket.socket, kind: bytes, content: bytes | memoryview) -> None:
    connection.sendall(kind + _SIZE.pack(len(content)))
    connection.sendall(content)


def receive(connection: socket.socket) -> tuple[bytes, bytearray]:
    """Return a message's kind and content. Raises ConnectionError when the other side has ended."""
    head = _receive(connection, 1 + _SIZE.size)
    return bytes(head[:1]), _receive(connection, _SIZE.unpack(head[1:])[0])


def _receive(connection: socket.socket, num: int) -> bytearray:
    content, position = bytearray(num), 0
    while position < num:
        received = connection.recv_into(memoryview(content)[position:])
        if not received:
            raise ConnectionError("the connection is closed")
        position += received
    return content


def _decode_function(kind: bytes, content: bytearray) -> Callable[[Sequence[int]], str]:
    if kind == SERIALIZED:
        from tokenizers import Tokenizer

        serialized = Tokenizer.from_str(content.decode())
        return lambda token_ids: serialized.decode(token_ids, skip_special_tokens=True)
    from megatron_bapo.rollout.tokenization import load_tokenizer, text_of, transformers_without_torch

    with transformers_without_torch():
        tokenizer = load_tokenizer(Path(content.decode()))
    return lambda token_ids: text_of(token_ids, tokenizer)


def serve(connection: socket.socket) -> None:
    """Decode until the other side closes the connection."""
    decode = _decode_function(*receive(connection))
    while True:
        _, content = receive(connection)
        try:
            text = without_lone_surrogates(decode(np.frombuffer(content, np.int32).tolist()))
            kind, reply = TEXT, text.encode()
        except Exception:  # process boundary: the caller raises it
            kind, reply = ERROR, traceback.format_exc().encode()
        send(connection, kind, reply)


if __name__ == "__main__":
    with suppress(ConnectionError), socket.socket(fileno=int(sys.argv[1])) as own:
        serve(own)
