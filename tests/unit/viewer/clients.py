"""A client of the viewer's server, without a browser."""

from pathlib import Path

from starlette.testclient import TestClient

from megatron_bapo.viewer.server import application, opened

SECRET = "a-secret-token"


def client_of(*roots: Path) -> TestClient:
    return TestClient(application(opened(roots), SECRET), base_url="http://127.0.0.1", raise_server_exceptions=False)
