"""The server's answers about a run that may still be running."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from starlette.testclient import TestClient
from typer.testing import CliRunner

from megatron_bapo.cli.main import app
from megatron_bapo.errors import UserError
from megatron_bapo.metrics.figures import SECTIONS
from megatron_bapo.metrics.plots import MAX_POINTS
from megatron_bapo.run_directory import RunDirectory
from megatron_bapo.viewer.answers import MAX_BYTES
from megatron_bapo.viewer.live import config_differences
from megatron_bapo.viewer.server import opened
from megatron_bapo.viewer.timeline import MAX_BARS, NUM_BUCKETS, loads, union_s
from tests.unit.viewer.clients import SECRET, client_of
from tests.unit.viewer.made_live_runs import (
    LOST_STEP,
    NUM_STEPS,
    RESTART_STEP,
    START_S,
    STEP_S,
    append,
    live_run,
    requests_of,
    step_metrics,
    train_row,
)


def ask(client: TestClient, path: str, **parameters: Any) -> dict[str, Any]:
    answer = client.get(f"/{SECRET}/api/{path}", params=parameters)
    assert answer.status_code == 200, answer.text
    assert len(answer.content) <= MAX_BYTES
    return answer.json()


def figure(answer: dict[str, Any], title: str) -> dict[str, Any]:
    return next(each for section in answer["sections"] for each in section["figures"] if each["title"] == title)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return live_run(tmp_path_factory.mktemp("live") / "run")


@pytest.fixture(scope="module")
def client(run: Path) -> Iterator[TestClient]:
    with client_of(run) as client:
        yield client


@pytest.mark.parametrize("path", ["run.html", "api/runs", "api/configs", "api/runs/0/figures", "api/runs/0/timeline"])
def test_the_run_page_needs_the_token(client: TestClient, path: str) -> None:
    assert client.get(f"/{SECRET}/{path}").status_code == 200
    assert client.get(f"/wrong/{path}").status_code == 403
    assert client.get(f"/{path}").status_code == 403


@pytest.mark.parametrize(
    ("path", "code"),
    [
        ("runs/1/figures", 404),
        ("runs/-1/figures", 404),
        ("runs/..%2f0/figures", 404),
        ("runs/0/figures?start=x", 400),
        ("runs/0/figures?stop=1e9", 400),
        ("runs/0/timeline?start=nan", 400),
    ],
)
def test_questions_without_an_answer_are_refused(client: TestClient, path: str, code: int) -> None:
    assert client.get(f"/{SECRET}/api/{path}").status_code == code


def test_the_figures_are_those_of_the_report(client: TestClient) -> None:
    answer = ask(client, "runs/0/figures")
    specs = {spec.title: spec for section in SECTIONS for spec in section.figures}
    found = [each for section in answer["sections"] for each in section["figures"]]
    assert [each["title"] for each in found] == [
        t for t in specs if t not in ("Held-out score", "Multi-turn responses", "Warm-start loss")
    ]
    for each in found:
        assert each["healthy"] == specs[each["title"]].healthy
        assert each["y_label"] == specs[each["title"]].y_label
    reward = figure(answer, "Mean reward of the sampled responses")["curves"][0]
    assert reward["x"] == [*range(1, NUM_STEPS + 1)]
    assert reward["y"] == pytest.approx([step_metrics(step)["critic/score/mean"] for step in reward["x"]], rel=1e-5)
    assert figure(answer, "Positive share of the policy loss")["target"] == 0.4
    assert figure(answer, "Held-out accuracy")["curves"][0]["x"] == [0, 10, 20, 30, 40, 50, 60]


def test_the_state_and_the_prompts_of_a_run_are_told(client: TestClient, run: Path) -> None:
    answer = ask(client, "runs/0/figures")
    assert answer["state"]["row"] == {"step": NUM_STEPS, "phase": "validation", "time_s": STEP_S * NUM_STEPS}
    assert (answer["state"]["total_steps"], answer["state"]["is_finished"]) == (NUM_STEPS, False)
    assert dict(answer["prompts"]["counts"]) == {
        "in flight": 8,
        "buffered": 3,
        "to be generated again": 0,
        "trained on": 940,
        "dropped, uniform": 20,
        "dropped, stale": 0,
        "quarantined": 1,
    }
    assert answer["prompts"]["quarantined"] == [{"prompt_id": "train:17", "failures": ["the reward is not a number"]}]


def test_a_growing_run_is_read_on(tmp_path: Path) -> None:
    root = live_run(tmp_path / "run", num_steps=5)
    with client_of(root) as client:
        first = ask(client, "runs/0/figures")
        unchanged = ask(client, "runs/0/figures", version=first["version"])
        assert unchanged.keys() == {"version", "is_all", "problems", "state"}
        append(RunDirectory(root).metrics, [train_row(6)])
        second = ask(client, "runs/0/figures", version=first["version"])
        assert figure(second, "Entropy of the policy")["curves"][0]["x"] == [1, 2, 3, 4, 5, 6]
        timeline = ask(client, "runs/0/timeline")
        append(RunDirectory(root).requests, requests_of(6))
        later = ask(client, "runs/0/timeline", version=timeline["version"])
        assert [each["num"] for each in later["engines"]] == [48, 48]


def test_rows_of_a_resumed_run_replace_the_earlier_ones(tmp_path: Path) -> None:
    root = live_run(tmp_path / "run", num_steps=8)
    path = RunDirectory(root).metrics
    with client_of(root) as client:
        ask(client, "runs/0/figures")
        kept = [row for row in path.read_text().splitlines(keepends=True) if json.loads(row)["step"] <= 3]
        path.write_text("".join(kept))
        row = train_row(4)
        append(path, [{**row, "metrics": {"actor/entropy": 7.0}}])
        curve = figure(ask(client, "runs/0/figures"), "Entropy of the policy")["curves"][0]
        assert (curve["x"], curve["y"][-1]) == ([1, 2, 3, 4], 7.0)


def test_damaged_lines_leave_the_rest_of_the_figures_and_the_timeline(tmp_path: Path) -> None:
    root = live_run(tmp_path / "run", num_steps=3)
    directory = RunDirectory(root)
    files = ("metrics", "requests", "quarantined", "engine_events", "restarts", "starts")
    whole = {name: getattr(directory, name).read_text() for name in files}
    bad = [{"step": 4, "time_s": math.nan}, {"step": 1 << 80, "time_s": 1.0, "phase": "train", "metrics": {}}]
    with client_of(root) as client:
        good = {kind: ask(client, f"runs/0/{kind}") for kind in ("figures", "timeline")}
        for name in files:
            append(getattr(directory, name), bad)
        append(directory.metrics, [train_row(4)])
        append(directory.requests, requests_of(4))
        for _ in range(2):
            figures, timeline = (ask(client, f"runs/0/{kind}", version=good[kind]["version"]) for kind in good)
            assert figure(figures, "Entropy of the policy")["curves"][0]["x"] == [1, 2, 3, 4]
            assert [each["num"] for each in timeline["engines"]] == [32, 32]
            assert timeline["events"] == good["timeline"]["events"]
            problems = {*figures["problems"], *timeline["problems"]}
            assert len(problems) == 2 * len(files)
            for name, text in whole.items():
                for line in (text.count("\n") + 1, text.count("\n") + 2):
                    start = f"{getattr(directory, name)}, line {line} is left out: "
                    assert [each for each in problems if each.startswith(start)]
        for name, text in whole.items():
            getattr(directory, name).write_text(text)
        for kind in good:
            answer = ask(client, f"runs/0/{kind}")
            for each in (answer, good[kind]):
                each.pop("version")
                each.pop("state", None)  # has the time at which the file was written
            assert answer == good[kind]


def test_a_broken_configuration_is_named_beside_the_figures(tmp_path: Path) -> None:
    root = live_run(tmp_path / "run", num_steps=3)
    RunDirectory(root).config.write_text("a: [")
    with client_of(root) as client:
        answer = ask(client, "runs/0/figures")
        assert "config.yaml is not YAML" in answer["problems"][0]
        assert figure(answer, "Entropy of the policy")["curves"][0]["x"] == [1, 2, 3]


def test_a_line_that_is_too_long_is_refused_until_it_is_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megatron_bapo.viewer.follower._MAX_READ", 1 << 10)
    monkeypatch.setattr("megatron_bapo.viewer.follower._MAX_LINE", 1 << 12)
    root = live_run(tmp_path / "run", num_steps=3)
    whole = RunDirectory(root).requests.read_text()
    with client_of(root) as client:
        append(RunDirectory(root).requests, [{"reason": "x" * 5000}])
        for _ in range(2):
            answer = client.get(f"/{SECRET}/api/runs/0/timeline")
            while answer.status_code == 200:
                answer = client.get(f"/{SECRET}/api/runs/0/timeline")
            assert (answer.status_code, "has a line of more than 4096 bytes" in answer.text) == (400, True)
        RunDirectory(root).requests.write_text(whole)
        while not (answer := ask(client, "runs/0/timeline"))["is_all"]:
            pass
        assert [each["num"] for each in answer["engines"]] == [24, 24]


def test_a_long_run_is_thinned_and_zooming_shows_every_step(tmp_path: Path) -> None:
    root = live_run(tmp_path / "run", num_steps=3)
    rows = (
        {**train_row(1), "step": s, "metrics": {"actor/entropy": float(s), "timing_s/a": 1.0}} for s in range(4, 5000)
    )
    append(RunDirectory(root).metrics, rows)
    with client_of(root) as client:
        whole = ask(client, "runs/0/figures")
        curve = figure(whole, "Entropy of the policy")["curves"][0]
        assert 400 < len(curve["x"]) <= MAX_POINTS
        assert (curve["x"][0], curve["x"][-1]) == (1, 4999)
        part = ask(client, "runs/0/figures", start="100.5", stop="200.5")
        curve = figure(part, "Entropy of the policy")["curves"][0]
        assert curve["x"] == [*range(100, 202)]
        assert curve["y"] == curve["x"]


def test_an_answer_with_many_curves_is_not_larger_than_a_megabyte(tmp_path: Path) -> None:
    root = live_run(tmp_path / "run", num_steps=1)
    names = [f"val/{number}{'long' * 100}/mean@4" for number in range(300)]
    metrics = dict.fromkeys(names, 0.123456789)
    row = {"phase": "validation", "time_s": 1.0, "metrics": metrics}
    append(RunDirectory(root).metrics, ({"step": step, **row} for step in range(400)))
    with client_of(root) as client:
        assert len(figure(ask(client, "runs/0/figures"), "Held-out accuracy")["curves"]) == 100


def test_the_load_and_the_busy_time_of_intervals() -> None:
    starts, stops = np.array([0.0, 1.0, 6.0]), np.array([4.0, 3.0, 20.0])
    edges = np.array([0.0, 2.0, 4.0, 6.0, 10.0])
    assert loads(starts, stops, edges).tolist() == pytest.approx([1.5, 1.5, 0.0, 1.0])
    assert union_s(starts, stops, edges) == pytest.approx(8.0)
    assert union_s(starts, stops, np.array([2.0, 3.5])) == pytest.approx(1.5)
    assert union_s(np.empty(0), np.empty(0), edges) == 0.0


def test_the_timeline_has_requests_waiting_faults_and_restarts_on_one_axis(client: TestClient) -> None:
    found = ask(client, "runs/0/timeline")
    assert found["origin"] == pytest.approx(START_S, abs=10)
    engine_0, engine_1 = found["engines"]
    assert (engine_0["name"], engine_1["name"]) == ("engine 0", "engine 1")
    assert (engine_0["num"], engine_1["num"]) == (8 * NUM_STEPS, 8 * (NUM_STEPS - 3))
    assert len(engine_0["load"]) == NUM_BUCKETS
    assert engine_1["busy"] > engine_0["busy"]
    lost_s = START_S + STEP_S * (LOST_STEP - 1) + 2 - found["origin"]
    assert engine_0["down"] == []
    assert engine_1["down"] == [pytest.approx([lost_s, lost_s + 25])]
    assert [(each["kind"], each["text"]) for each in found["events"]] == [
        ("start", "the trainer started"),
        ("engine", "lost"),
        ("engine", "serves"),
        ("restart", f"the run restarted after step {RESTART_STEP}"),
        ("start", "the trainer started"),
    ]
    shares = {each["name"]: each["share"] for each in found["trainer"]["phases"]}
    assert list(shares) == ["generate", "transfer", "update", "weight_sync"]
    assert shares["generate"] == pytest.approx(0.33, abs=0.03)
    steps = {each["step"]: each for each in found["trainer"]["steps"]}
    assert steps[5]["last"]["engine"] == "engine 1"
    assert steps[5]["last"]["serial"] == 16 * 4 + 15
    assert steps[LOST_STEP]["last"]["engine"] == "engine 0"


def test_the_warm_start_is_one_part_of_the_timeline_before_the_first_step(tmp_path: Path) -> None:
    root = live_run(tmp_path / "run", num_steps=3, with_faults=False)
    directory = RunDirectory(root)
    steps = directory.metrics.read_text()
    directory.metrics.unlink()
    metrics = {"actor/loss": 1.0, "timing_s/step": 2.0}
    rows = [
        {"step": n, "phase": "warm_start", "time_s": 3.0 * n, "unix_s": START_S - 20 + 3 * n, "metrics": metrics}
        for n in range(1, 4)
    ]
    append(directory.metrics, rows)
    with directory.metrics.open("a") as file:
        file.write(steps)
    with client_of(root) as client:
        found = ask(client, "runs/0/timeline")
    assert found["origin"] == START_S - 20 + 3 - 2
    first, *others = found["trainer"]["steps"]
    assert (first["start"], first["stop"], first["seconds"]) == (0, 8, {"warm_start": 8})
    assert [each["step"] for each in others] == [1, 2, 3]
    assert [each["name"] for each in found["trainer"]["phases"]][:2] == ["warm_start", "generate"]


def test_a_part_of_the_timeline_has_its_requests_one_by_one(tmp_path: Path) -> None:
    root = live_run(tmp_path / "run", num_steps=10, with_faults=False)
    many = [
        {**row, "sent_s": row["sent_s"] + k / 1000} for k in range(40) for s in range(1, 11) for row in requests_of(s)
    ]
    append(RunDirectory(root).requests, many)
    with client_of(root) as client:
        whole = ask(client, "runs/0/timeline")
        assert sum(each["num"] for each in whole["engines"]) > MAX_BARS
        assert [each["bars"] for each in whole["engines"]] == [None, None]
        part = ask(client, "runs/0/timeline", start=str(START_S + 10), stop=str(START_S + 20))
        sent, answered, step, serial, tokens, responses = part["engines"][0]["bars"]
        assert len(sent) == 41 * 8
        assert (set(step), set(responses)) == ({2}, {4})
        assert sent == sorted(sent)
        assert all(a < b for a, b in zip(sent, answered, strict=True))
        assert min(serial) == 16
        assert tokens[serial.index(18)] == 115


def test_requests_without_a_date_are_counted(tmp_path: Path) -> None:
    root = live_run(tmp_path / "run", num_steps=0, with_faults=False)
    RunDirectory(root).starts.unlink()
    append(RunDirectory(root).requests, [{**row, "sent_s": 5.0, "answered_s": 6.0} for row in requests_of(1)])
    with client_of(root) as client:
        found = ask(client, "runs/0/timeline")
    assert found["num_undated"] == 16
    assert "origin" not in found


def test_differences_of_configurations_are_listed_by_key(tmp_path: Path) -> None:
    one = {"run_dir": "a", "seed": 1, "optimizer": {"lr": 1e-4, "betas": [0.9, 0.99]}, "fp8": None}
    other = {"run_dir": "b", "seed": 1, "optimizer": {"lr": 2e-4, "betas": [0.9, 0.99]}, "fp8": {"recipe": "x"}}
    assert config_differences([one, other]) == [
        ("fp8", ["null", "–"]),
        ("fp8.recipe", ["–", "x"]),
        ("optimizer.lr", ["0.0001", "0.0002"]),
    ]
    assert config_differences([one, one]) == []
    roots = [live_run(tmp_path / name, num_steps=1, seed=seed) for seed, name in enumerate(["a", "b"])]
    with client_of(*roots) as client:
        commits = ["(started with).commit", ["c0ffee0", "c0ffee1"]]
        assert ask(client, "configs") == {"total": 2, "rows": [commits, ["seed", ["0", "1"]]]}


def test_runs_of_one_name_are_told_apart(tmp_path: Path) -> None:
    roots = [live_run(tmp_path / group / "run", num_steps=1) for group in ("a", "b")]
    roots.append(live_run(tmp_path / "c", num_steps=1))
    with client_of(*roots) as client:
        assert [each["name"] for each in ask(client, "runs")["runs"]] == [str(roots[0]), str(roots[1]), "c"]


def test_a_page_of_several_runs_is_not_exported(run: Path, tmp_path: Path) -> None:
    arguments = ["view", str(run), str(run), "--export", str(tmp_path / "page.html")]
    result = CliRunner().invoke(app, arguments, env={"COLUMNS": "200"})
    assert result.exit_code == 2
    assert "--export writes a step of one run, but 2 were given; give one RUN_DIR" in result.output


def test_more_runs_than_colours_are_refused(run: Path) -> None:
    with pytest.raises(UserError, match="8 runs cannot be told apart on one page, which has 7 colours; give fewer"):
        opened([run] * 8)
