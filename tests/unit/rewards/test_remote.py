"""Tests against a real HTTP server on loopback, which behaves as the scored response says."""

import asyncio
import json
import socket
import threading
from collections import Counter
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from pydantic import ValidationError

from megatron_bapo.config.reward import RewardConfig
from megatron_bapo.errors import FunctionFailed
from megatron_bapo.rewards.scorer import RewardRequest, Scorer

LEVEL = {"level": 1}
SECRET = "Bearer never-show-this"
NUM_TOGETHER = 20


class Server(ThreadingHTTPServer):
    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.requests: list[tuple[dict[str, Any], str | None]] = []
        self.tries: Counter[str] = Counter()
        self.echo = ""
        self.together = threading.Barrier(NUM_TOGETHER)
        self.ends = threading.Event()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/score"


class Handler(BaseHTTPRequestHandler):
    server: Server  # pyright: ignore[reportIncompatibleVariableOverride]

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.requests.append((body, self.headers["Authorization"]))
        said = body["response"]
        self.server.tries[said] += 1
        is_first = self.server.tries[said] == 1
        if said == "hangs" or (said == "slow at first" and is_first):
            self.server.ends.wait(60.0)
        if said == "waits for others":
            self.server.together.wait(60.0)
        if said == "drops" or (said == "drops at first" and is_first):
            self.connection.shutdown(socket.SHUT_RDWR)
            return
        status, answer = 200, json.dumps({"score": 0.75})
        if said == "fails" or (said == "fails at first" and self.server.tries[said] <= 2):
            status, answer = 500, f"out of memory, said {self.headers['Authorization']}"
        match said:
            case "echoes with an error":
                status, answer = 404, self.server.echo
            case "echoes instead of JSON":
                answer = self.server.echo
            case "echoes in JSON":
                answer = json.dumps({"error": self.server.echo})
            case "refuses":
                status, answer = 404, "no such model"
            case "broken":
                answer = '{"score": 0.'
            case "wrong shape":
                answer = '{"scores": [1.0]}'
            case "number":
                answer = "1"
            case "slime":
                answer = '{"reward": -1.5}'
        self.send_response(status)
        self.end_headers()
        self.wfile.write(answer.encode())

    def log_message(self, *args: Any) -> None:
        pass


@pytest.fixture
def server() -> Iterator[Server]:
    with Server() as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield server
        server.ends.set()
        server.shutdown()
        thread.join()


def scores(
    server: Server, *answers: str, timeout_s: float = 5.0, extra_info: dict[str, Any] = LEVEL, **remote: Any
) -> list[Any]:
    """Return the reward of each response, or the error's message."""
    settings = {"url": server.url, "max_retries": 2, "retry_wait_s": 0.05} | remote
    config = RewardConfig.model_validate({"type": "remote", "timeout_s": timeout_s, "remote": settings})
    prompt, turns = ({"role": "user", "content": "40 + 2 ="},), ({"role": "assistant", "content": "42"},)

    async def main() -> list[Any]:
        scorer = Scorer(config)
        requests = [RewardRequest("train:3", "sums", a, "42", extra_info, prompt, turns, "length") for a in answers]
        try:
            return await asyncio.gather(*map(scorer.score, requests), return_exceptions=True)
        finally:
            scorer.close()

    return [str(r) if isinstance(r, FunctionFailed) else r.reward for r in asyncio.run(main())]


def test_prompt_response_label_and_metadata_are_posted_and_a_number_is_returned(server, monkeypatch):
    monkeypatch.setenv("REWARD_TOKEN", SECRET)
    assert scores(server, "ok", "number", "slime", authorization_env="REWARD_TOKEN") == [0.75, 1.0, -1.5]
    body, authorization = server.requests[0]
    assert authorization == SECRET
    assert body == {
        "prompt": [{"role": "user", "content": "40 + 2 ="}],
        "response": body["response"],
        "turns": [{"role": "assistant", "content": "42"}],
        "finish_reason": "length",
        "label": "42",
        "data_source": "sums",
        "metadata": {"level": 1},
    }


def test_requests_to_a_failing_server_are_retried(server):
    assert scores(server, "fails at first", "drops at first") == [0.75] * 2
    assert scores(server, "slow at first", timeout_s=2.0) == [0.75]
    assert server.tries == {"fails at first": 3, "drops at first": 2, "slow at first": 2}


def test_values_that_json_lacks_are_named_before_a_request_is_sent(server):
    (message,) = scores(server, "ok", extra_info={"difficulty": float("nan")})
    assert f"cannot send extra_info={{'difficulty': nan}} to the reward server {server.url} as JSON: Out of" in message
    assert server.requests == []
    assert scores(server, "ok \udc80") == [0.75]  # an unpaired surrogate, with which a response may end


def test_requests_are_concurrent(server):
    answers = ["waits for others"] * NUM_TOGETHER
    assert scores(server, *answers, timeout_s=60.0) == [0.75] * NUM_TOGETHER


@pytest.mark.parametrize(
    ("answer", "num_tries", "said"),
    [
        ("fails", 3, "status 500: 'out of memory, said ***'"),
        ("drops", 3, "RemoteProtocolError: Server disconnected without sending a response."),
        ("hangs", 3, "timeout after reward.timeout_s=1 s"),
        ("broken", 3, "invalid JSON: '{\"score\": 0.'"),
        ("refuses", 1, "status 404: 'no such model'"),
        ("wrong shape", 1, "{'scores': [1.0]}, which is neither a number nor an object with one under 'score'"),
    ],
)
def test_a_server_that_gives_no_reward_is_named_with_the_tries_and_its_last_reply(
    server, monkeypatch, capfd, answer, num_tries, said
):
    monkeypatch.setenv("REWARD_TOKEN", SECRET)
    limit_s = 1.0 if answer == "hangs" else 30.0
    (message,) = scores(server, answer, timeout_s=limit_s, authorization_env="REWARD_TOKEN")
    tries = f"{num_tries} {'try' if num_tries == 1 else 'tries'}"
    assert f"the reward server {server.url} gave no reward after {tries}; its last reply: {said}" in message
    assert "a response to prompt train:3" in message
    assert server.tries[answer] == num_tries
    assert SECRET not in message + "".join(capfd.readouterr())


@pytest.mark.parametrize("answer", ["echoes with an error", "echoes instead of JSON", "echoes in JSON"])
@pytest.mark.parametrize(
    ("header", "echo", "shown"),
    [
        (SECRET, "token never-show-this is invalid", "token *** is invalid"),
        (SECRET, "no bearer never-show-this", "no bearer ***"),
        ("never-show-this", "token never-show-this is invalid", "token *** is invalid"),
        ('Token key="never-show-this", id=7', "never-show-this is invalid", "*** is invalid"),
        ("Bearer never\\show'this", "never\\show'this is invalid", "*** is invalid"),
        ("Basic dXNlcjpuZXZlci1zaG93LXRoaXM=", "wrong password never-show-this", "wrong password ***"),
        ("Bearer " + "never-show-this" * 9, "x" * 150 + "never-show-this" * 9, "x" * 150 + "***"),
    ],
    ids=["token", "other case", "no scheme", "parameters", "escapes", "base64", "cut"],
)
def test_no_part_of_the_authorization_header_is_shown(server, monkeypatch, answer, header, echo, shown):
    monkeypatch.setenv("REWARD_TOKEN", header)
    server.echo = echo
    (message,) = scores(server, answer, authorization_env="REWARD_TOKEN")
    assert shown in message
    assert "never" not in message


@pytest.mark.parametrize(
    ("url", "rule"),
    [
        ("ftp://host/score", "must start with http:// or https://"),
        ("http:///score", "and name a host"),
        ("https://user:word@host/score", "pass secrets with reward.remote.authorization_env"),
        ("https://host/score?key=word", "pass secrets with reward.remote.authorization_env"),
    ],
)
def test_other_addresses_are_refused(url, rule):
    with pytest.raises(ValidationError, match=rule):
        RewardConfig.model_validate({"type": "remote", "remote": {"url": url}})
