"""The viewer's server: static files and JSON queries on the loopback interface, behind a secret in the path."""

from __future__ import annotations

import secrets
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from megatron_bapo.errors import UserError
from megatron_bapo.viewer.samples import MAX_ROWS, MAX_TOKENS, NotFound, Samples, as_json

ASSETS = Path(__file__).parent / "assets"
HOST = "127.0.0.1"
_TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript"}
_HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "cache-control": "no-store",
    "cross-origin-resource-policy": "same-origin",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
}
_MAX_SEARCH = 1000


class _Guarded:
    """Answers 403 to every path that does not begin with the secret, and gives each answer the security headers."""

    def __init__(self, app: ASGIApp, secret: str) -> None:
        self._app, self._secret = app, secret

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def send_with_headers(message: Any) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [
                    *message["headers"],
                    *((name.encode(), value.encode()) for name, value in _HEADERS.items()),
                ]
            await send(message)

        given, slash, _ = scope["path"].removeprefix("/").partition("/")
        if not (slash and secrets.compare_digest(given.encode(errors="replace"), self._secret.encode())):
            await Response("the URL has no valid token\n", 403)(scope, receive, send_with_headers)
            return
        await self._app(scope, receive, send_with_headers)


def application(samples: Samples, secret: str) -> Starlette:
    """Return the application, whose paths begin with `/SECRET/`."""
    assets = {path.name: path.read_bytes() for path in ASSETS.iterdir() if path.suffix in _TYPES}

    async def asset(request: Request) -> Response:
        name = request.path_params.get("name", "index.html")
        if name not in assets:  # names are looked up, so no path leads out of the folder
            return Response("there is no such file\n", 404)
        return Response(assets[name], media_type=_TYPES[Path(name).suffix])

    def query(answer: Callable[[Request], dict[str, Any]]) -> Callable[[Request], Any]:
        async def endpoint(request: Request) -> Response:
            try:
                found = await run_in_threadpool(answer, request)
            except NotFound as error:
                return Response(f"{error}\n", 404)
            except ValueError as error:
                return Response(f"{error}\n", 400)
            return Response(as_json(found), media_type="application/json")

        return endpoint

    def page(request: Request, most: int) -> tuple[int, int]:
        return _number(request, "start", 0), max(1, _number(request, "count", most))

    def place(request: Request) -> tuple[int, int]:
        return request.path_params["step"], request.path_params["row"]

    queries = {
        "run": lambda _: samples.run(),
        "steps/{step:int}": lambda r: samples.step(r.path_params["step"], *page(r, MAX_ROWS)),
        "steps/{step:int}/search": lambda r: samples.search(r.path_params["step"], _text(r)),
        "steps/{step:int}/responses/{row:int}": lambda r: samples.response(*place(r)),
        "steps/{step:int}/responses/{row:int}/tokens": lambda r: samples.tokens(*place(r), *page(r, MAX_TOKENS)),
        "steps/{step:int}/responses/{row:int}/history": lambda r: samples.history(*place(r)),
    }
    routes = [Route(f"/{secret}/api/{path}", query(answer)) for path, answer in queries.items()]
    routes += [Route(f"/{secret}/", asset), Route(f"/{secret}/{{name}}", asset)]
    guards = [Middleware(TrustedHostMiddleware, allowed_hosts=[HOST, "localhost"]), Middleware(_Guarded, secret=secret)]
    return Starlette(routes=routes, middleware=guards)


def _number(request: Request, name: str, default: int) -> int:
    text = request.query_params.get(name, str(default))
    if not text.isascii() or not text.isdigit() or len(text) > 12:
        raise ValueError(f"{name} must be a whole number")
    return int(text)


def _text(request: Request) -> str:
    text = request.query_params.get("text", "")
    if not 0 < len(text) <= _MAX_SEARCH:
        raise ValueError(f"text must have 1 to {_MAX_SEARCH} characters")
    return text


def listen(port: int) -> socket.socket:
    """Return a socket that listens on the loopback interface; port 0 takes a free one.

    Raises UserError if the port cannot be used.
    """
    try:
        return socket.create_server((HOST, port))
    except OSError as error:
        raise UserError(
            f"port {port} cannot be used: {error.strerror}; give another --port, or 0 for a free one"
        ) from None


def serve(samples: Samples, port: int, announce: Callable[[str], None]) -> None:
    """Serve until interrupted; `announce` gets the URL as soon as connections are accepted."""
    secret = secrets.token_urlsafe(24)
    with listen(port) as listener:
        config = uvicorn.Config(application(samples, secret), log_level="warning", server_header=False, lifespan="off")
        announce(f"http://{HOST}:{listener.getsockname()[1]}/{secret}/")
        uvicorn.Server(config).run(sockets=[listener])
