"""Ports for servers that tests start."""

import random
import socket
from contextlib import suppress


def free_port() -> int:
    """Return a port that nothing listens on, and that Linux by default gives to no other socket.

    A port that was bound as 0 and closed again can go to any connection of a test beside this one before the server
    has it. This one is below the default range of such ports, and above Ray's ports of workers (10002 to 19999).
    """
    while True:
        port = random.SystemRandom().randrange(20_000, 32_768)  # hypothesis seeds the shared generator
        with suppress(OSError):
            socket.create_server(("127.0.0.1", port)).close()
            return port
