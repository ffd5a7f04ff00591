"""The viewer's server: static files and JSON queries on the loopback interface, behind a secret in the path."""

from __future__ import annotations

import re
import secrets
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import uvicorn
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from megatron_bapo.errors import RunError, UserError
from megatron_bapo.metrics.plots import PALETTE
from megatron_bapo.run_directory import RunDirectory
from megatron_bapo.viewer.answers import NotFound, as_json, fitting
from megatron_bapo.viewer.live import LiveRun, Zoom, config_differences, last_start, read_config
from megatron_bapo.viewer.samples import MAX_ROWS, MAX_TOKENS, Samples, damaged
from megatron_bapo.viewer.timeline import Timeline

ASSETS = Path(__file__).parent / "assets"
HOST = "127.0.0.1"
_TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript"}
_HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "cache-control": "no-store",
    "cross-origin-resource-policy": "same-origin",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
}
_MAX_SEARCH = 1000
_REAL = re.compile(r"-?[0-9]{1,12}(\.[0-9]{1,12})?", re.ASCII)
_Answer = Callable[[Request], dict[str, Any]]


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


@dataclass(frozen=True)
class Run:
    """A run that is served."""

    name: str
    directory: RunDirectory
    samples: Samples
    live: LiveRun
    timeline: Timeline


def opened(directories: Sequence[Path]) -> list[Run]:
    """Return the runs in the directories, named by their folders, or by their whole paths if folders share a name.

    Raises UserError for a folder without a run, and for more runs than there are colours.
    """
    if len(directories) > len(PALETTE):
        raise UserError(
            f"{len(directories)} runs cannot be told apart on one page, which has {len(PALETTE)} colours; give fewer"
        )
    names = [directory.resolve().name for directory in directories]
    runs = []
    for path, name in zip(directories, names, strict=True):
        directory = RunDirectory(path)
        if not any(part.exists() for part in (directory.config, directory.metrics, directory.sampled_rollouts)):
            raise UserError(f"{path} holds no run: it has no config.yaml; give the folder of a run, its run_dir")
        shown = name if names.count(name) == 1 else str(path)
        runs.append(Run(shown, directory, Samples(directory), LiveRun(directory), Timeline(directory)))
    return runs


def application(runs: Sequence[Run], secret: str) -> Starlette:
    """Return the application, whose paths begin with `/SECRET/`."""
    assets = {path.name: path.read_bytes() for path in ASSETS.iterdir() if path.suffix in _TYPES}

    async def asset(request: Request) -> Response:
        name = request.path_params.get("name", "index.html")
        if name not in assets:  # names are looked up, so no path leads out of the folder
            return Response("there is no such file\n", 404)
        return Response(assets[name], media_type=_TYPES[Path(name).suffix])

    routes = [Route(f"/{secret}/api/{path}", _endpoint(answer)) for path, answer in _queries(runs).items()]
    routes += [Route(f"/{secret}/", asset), Route(f"/{secret}/{{name}}", asset)]
    guards = [Middleware(TrustedHostMiddleware, allowed_hosts=[HOST, "localhost"]), Middleware(_Guarded, secret=secret)]
    return Starlette(routes=routes, middleware=guards)


def _endpoint(answer: _Answer) -> Callable[[Request], Any]:
    async def endpoint(request: Request) -> Response:
        try:
            found = await run_in_threadpool(answer, request)
        except NotFound as error:
            return Response(f"{error}\n", 404)
        except (OSError, pa.ArrowException) as error:
            step = request.path_params.get("step")
            return Response(f"{error if step is None else damaged(step, error)}\n", 400)
        except (ValueError, RunError) as error:
            return Response(f"{error}\n", 400)
        return Response(as_json(found), media_type="application/json")

    return endpoint


def _queries(runs: Sequence[Run]) -> dict[str, _Answer]:
    """Return the function that answers each path."""

    def run(request: Request) -> Run:
        number = request.path_params["run"]
        if number >= len(runs):
            raise NotFound(f"there is no run {number}")
        root = runs[number].directory.root
        if not root.is_dir():
            raise NotFound(f"{root} does not exist any more: it was deleted or moved")
        return runs[number]

    def page(request: Request, most: int) -> tuple[int, int]:
        return _whole(request, "start", 0), max(1, _whole(request, "count", most))

    def place(request: Request) -> tuple[int, int]:
        return request.path_params["step"], request.path_params["row"]

    def zoom(request: Request, prefix: str = "") -> Zoom:
        return Zoom(_real(request, f"{prefix}start"), _real(request, f"{prefix}stop"))

    def timeline(request: Request) -> dict[str, Any]:
        return run(request).timeline.answer(_version(request), _real(request, "start"), _real(request, "stop"))

    def all_runs(_: Request) -> dict[str, Any]:
        return {"runs": [{"name": each.name} for each in runs], "palette": PALETTE}

    def configs(_: Request) -> dict[str, Any]:
        rows = config_differences([read_config(each.directory) | last_start(each.directory) for each in runs])
        return fitting(len(rows), lambda count: {"total": len(rows), "rows": rows[:count]})

    rollouts = {
        "": lambda r: run(r).samples.run(),
        "/steps/{step:int}": lambda r: run(r).samples.step(r.path_params["step"], *page(r, MAX_ROWS)),
        "/steps/{step:int}/search": lambda r: run(r).samples.search(r.path_params["step"], _text(r)),
        "/steps/{step:int}/responses/{row:int}": lambda r: run(r).samples.response(*place(r)),
        "/steps/{step:int}/responses/{row:int}/tokens": lambda r: run(r).samples.tokens(
            *place(r), *page(r, MAX_TOKENS)
        ),
        "/steps/{step:int}/responses/{row:int}/history": lambda r: run(r).samples.history(*place(r)),
        "/figures": lambda r: run(r).live.figures(_version(r), zoom(r), zoom(r, "warm_")),
        "/timeline": timeline,
    }
    of_runs = {f"runs/{{run:int}}{path}": answer for path, answer in rollouts.items()}
    return {"runs": all_runs, "configs": configs} | of_runs


def _whole(request: Request, name: str, default: int) -> int:
    text = request.query_params.get(name, str(default))
    if not text.isascii() or not text.isdigit() or len(text) > 12:
        raise ValueError(f"{name} must be a whole number")
    return int(text)


def _real(request: Request, name: str) -> float | None:
    text = request.query_params.get(name)
    if text is None:
        return None
    if not _REAL.fullmatch(text):
        raise ValueError(f"{name} must be a number")
    return float(text)


def _version(request: Request) -> str:
    return request.query_params.get("version", "")[:_MAX_SEARCH]


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


def serve(runs: Sequence[Run], port: int, announce: Callable[[str], None]) -> None:
    """Serve until interrupted; `announce` gets the URL as soon as connections are accepted."""
    secret = secrets.token_urlsafe(24)
    with listen(port) as listener:
        config = uvicorn.Config(application(runs, secret), log_level="warning", server_header=False, lifespan="off")
        announce(f"http://{HOST}:{listener.getsockname()[1]}/{secret}/")
        uvicorn.Server(config).run(sockets=[listener])
