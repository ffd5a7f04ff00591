"""What the page of runs shows in a real browser."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from megatron_bapo.metrics.figures import SECTIONS
from megatron_bapo.metrics.plots import PALETTE
from megatron_bapo.run_directory import RunDirectory
from tests.unit.viewer.browsers import IN_A_BROWSER, served, shoot
from tests.unit.viewer.made_live_runs import (
    LOST_STEP,
    NUM_STEPS,
    START_S,
    STEP_S,
    append,
    live_run,
    requests_of,
    step_metrics,
    train_row,
)
from tests.unit.viewer.made_runs import HOSTILE, small_run

if TYPE_CHECKING:
    from playwright.sync_api import Locator, Page

pytestmark = IN_A_BROWSER
View = Callable[..., str]
SPECS = {spec.title: spec for section in SECTIONS for spec in section.figures}
ABSENT = {"Held-out score", "Multi-turn responses", "Warm-start loss"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def url(folder: Path) -> Iterator[str]:
    """One run."""
    yield from served(live_run(folder / "countdown"))


@pytest.fixture(scope="module")
def urls(folder: Path) -> Iterator[str]:
    """Three runs: the first and the last differ in nothing that the metrics show."""
    runs = [
        live_run(folder / "bapo", with_faults=False),
        live_run(folder / "low-lr", seed=1, lr=1e-4, with_faults=False),
        live_run(folder / "bapo-again", config="logging:\n  every: 1\n", with_faults=False),
    ]
    yield from served(*runs)


def shown(page: Page, url: str, state: str = "") -> Page:
    page.goto(f"{url}run.html#{state}")
    page.locator("figure .plot svg").first.wait_for()
    page.locator("#timeline svg").first.wait_for()
    return page


def figure(page: Page, title: str) -> Locator:
    return page.locator("figure").filter(has=page.get_by_role("heading", name=title, exact=True))


def plot(page: Page, title: str) -> Locator:
    return figure(page, title).locator(".plot > svg")


def hover(target: Locator, x: float, y: float = 0.5) -> dict[str, str]:
    """Move the pointer to a place, as shares of width and height, and return the numbers that appear."""
    target.scroll_into_view_if_needed()
    box = target.bounding_box()
    assert box is not None
    target.page.mouse.move(box["x"] + x * box["width"], box["y"] + y * box["height"])
    tip = target.page.locator("#tooltip")
    tip.wait_for()
    names, values = tip.locator("dt").all_text_contents(), tip.locator("dd").all_text_contents()
    return {"title": tip.locator(".token").inner_text(), **dict(zip(names, values, strict=True))}


def drag(target: Locator, start: float, stop: float) -> None:
    target.scroll_into_view_if_needed()
    box = target.bounding_box()
    assert box is not None
    mouse, y = target.page.mouse, box["y"] + box["height"] / 2
    mouse.move(box["x"] + start * box["width"], y)
    mouse.down()
    mouse.move(box["x"] + (start + stop) / 2 * box["width"], y)
    mouse.move(box["x"] + stop * box["width"], y)
    mouse.up()


def steps_of_axis(page: Page, title: str) -> list[int]:
    texts = plot(page, title).locator("text[text-anchor=middle]").all_text_contents()
    return [int(text) for text in texts]


def number(text: str) -> float:
    return float(text.replace("−", "-"))


def test_the_page_has_the_reports_figures_with_their_captions(page: Page, url: str) -> None:
    shown(page, url)
    assert page.title() == "countdown · run"
    assert page.locator("#runs .name").all_text_contents() == ["countdown"]
    assert page.locator("#runs .about").inner_text().startswith(f"step {NUM_STEPS} of {NUM_STEPS} · 10 min")
    assert page.locator("#figures h2").all_text_contents() == [section.title for section in SECTIONS]
    titles = page.locator("figure h3").all_text_contents()
    assert titles == [title for title in SPECS if title not in ABSENT]
    assert page.locator("figure .healthy").all_text_contents() == [SPECS[title].healthy for title in titles]
    assert all(plot(page, title).locator("path.curve, path.area").count() for title in titles)
    share = figure(page, "Positive share of the policy loss")
    assert share.locator("line.target").count() == 2
    assert share.locator(".key-item").all_text_contents() == [
        "at the initial bounds",
        "at the bounds used",
        "target 0.4",
    ]
    assert plot(page, "Time per step").locator("path.area").count() == 4
    colours = (
        plot(page, "Clip bounds").locator("path.curve").evaluate_all("all => all.map(p => p.getAttribute('stroke'))")
    )
    assert colours == list(PALETTE[:2])


def test_hovering_over_a_figure_shows_the_numbers_of_a_step(page: Page, url: str) -> None:
    shown(page, url)
    found = hover(plot(page, "Clip bounds"), 0.6)
    step = int(found["title"].removeprefix("step "))
    assert 30 <= step <= 40
    assert number(found["upper"]) == pytest.approx(step_metrics(step)["actor/bapo_clip_high"], rel=1e-3)
    assert number(found["lower"]) == pytest.approx(step_metrics(step)["actor/bapo_clip_low"], rel=1e-3)
    assert plot(page, "Clip bounds").locator(".dot").count() == 2
    parts = hover(plot(page, "Time per step"), 0.6)
    assert number(parts["update"]) == 5.0  # its own seconds, not where its area ends
    page.mouse.move(5, 300)
    page.locator("#tooltip").wait_for(state="hidden")


def test_dragging_zooms_into_all_figures(page: Page, url: str) -> None:
    shown(page, url)
    assert steps_of_axis(page, "Entropy of the policy")[-1] == NUM_STEPS
    drag(plot(page, "Clip bounds"), 0.4, 0.6)
    page.locator("#whole").wait_for()
    for title in ("Clip bounds", "Entropy of the policy", "Time per step"):
        steps = steps_of_axis(page, title)
        assert 18 <= steps[0] <= steps[-1] <= 38
    page.wait_for_url(re.compile("steps="))
    found = hover(plot(page, "Entropy of the policy"), 0.5)
    assert 20 <= int(found["title"].removeprefix("step ")) <= 36
    copied = page.url
    page.goto("about:blank")
    page.goto(copied)
    page.locator("figure .plot svg").first.wait_for()
    assert steps_of_axis(page, "Clip bounds")[-1] <= 38
    plot(page, "Clip bounds").dblclick()
    page.locator("#whole").wait_for(state="hidden")
    assert steps_of_axis(page, "Clip bounds")[-1] == NUM_STEPS


def test_figures_and_timeline_follow_a_run(page: Page, view: View, tmp_path: Path) -> None:
    root = live_run(tmp_path / "growing", num_steps=3, with_faults=False)
    url = view(root)
    shown(page, url)
    before = plot(page, "Entropy of the policy").locator("path.curve").get_attribute("d")
    engine = page.locator("#timeline text", has_text="24 requests")
    assert engine.count() == 2
    append(RunDirectory(root).metrics, [train_row(step) for step in range(4, 31)])
    for step in range(4, 31):
        append(RunDirectory(root).requests, requests_of(step))
    page.get_by_text(re.compile(r"^step 30 of 60")).wait_for()
    page.locator("#timeline text", has_text="216 requests").wait_for()  # engine 1 is lost for three steps
    page.locator("#timeline text", has_text="240 requests").wait_for()
    assert plot(page, "Entropy of the policy").locator("path.curve").get_attribute("d") != before
    found = hover(plot(page, "Entropy of the policy"), 0.97)
    assert found["title"] == "step 30"
    assert number(found["entropy"]) == pytest.approx(step_metrics(30)["actor/entropy"], rel=1e-3)


def test_new_rows_do_not_end_a_choice_with_the_mouse(page: Page, view: View, tmp_path: Path) -> None:
    root = live_run(tmp_path / "growing", num_steps=40, with_faults=False)
    shown(page, view(root))
    target = plot(page, "Clip bounds")
    target.scroll_into_view_if_needed()
    box = target.bounding_box()
    assert box is not None
    page.mouse.move(box["x"] + 0.5 * box["width"], box["y"] + 50)
    page.mouse.down()
    page.mouse.move(box["x"] + 0.7 * box["width"], box["y"] + 50)
    append(RunDirectory(root).metrics, [train_row(41)])
    page.get_by_text(re.compile(r"^step 41 of 60")).wait_for()
    page.mouse.up()
    page.locator("#whole").wait_for()
    assert steps_of_axis(page, "Clip bounds")[-1] < 35


def test_each_of_several_runs_has_a_colour(page: Page, urls: str) -> None:
    shown(page, urls)
    assert page.locator("#runs .name").all_text_contents() == ["bapo", "low-lr", "bapo-again"]
    reward = plot(page, "Mean reward of the sampled responses").locator("path.curve")
    strokes = reward.evaluate_all("all => all.map(p => p.getAttribute('stroke'))")
    assert set(strokes) == set(PALETTE[:3])
    found = hover(plot(page, "Clip bounds"), 0.5)
    shoot(page, "run-several")
    step = int(found["title"].removeprefix("step "))
    for name, seed in (("bapo", 0), ("low-lr", 1), ("bapo-again", 0)):
        wanted = step_metrics(step, seed=seed)["actor/bapo_clip_high"]
        assert number(found[f"{name} · upper"]) == pytest.approx(wanted, rel=1e-3)
    assert number(hover(plot(page, "Time per step"), 0.5)["bapo · total"]) > 9.0
    page.get_by_role("button", name="low-lr").click()
    assert page.get_by_role("button", name="low-lr").get_attribute("aria-pressed") == "false"
    strokes = reward.evaluate_all("all => all.map(p => p.getAttribute('stroke'))")
    assert set(strokes) == {PALETTE[0], PALETTE[2]}
    assert "low-lr · upper" not in hover(plot(page, "Clip bounds"), 0.5)
    page.get_by_role("button", name="low-lr").click()
    assert len(set(reward.evaluate_all("all => all.map(p => p.getAttribute('stroke'))"))) == 3


LOOK = "all => all.map(e => [e.getAttribute('stroke'), e.getAttribute('stroke-dasharray'), e.getAttribute('class')])"


def test_curves_of_many_data_sources_are_told_apart(page: Page, view: View, tmp_path: Path) -> None:
    names = [f"val/{source}/{kind}@4" for source in ("sums", "words", "code") for kind in ("mean", "best")]
    metrics = {name: 0.1 * place for place, name in enumerate(names)} | {"val/score/mean@4": 0.5}
    roots = [live_run(tmp_path / name, num_steps=2, with_faults=False) for name in ("one", "two")]
    for root in roots:
        append(RunDirectory(root).metrics, [{"step": 2, "phase": "validation", "time_s": 1.0, "metrics": metrics}])
    for runs in (roots[:1], roots):
        shown(page, view(*runs))
        accuracy = figure(page, "Held-out accuracy").locator(".legend .key-item")
        assert accuracy.all_text_contents() == ["mean@4", "best@4", *(name.removeprefix("val/") for name in names)]
        assert len(set(map(tuple, accuracy.locator("line").evaluate_all(LOOK)))) == 8
        assert plot(page, "Held-out score").locator(".point").count() == len(runs)


def test_curves_that_coincide_are_striped(page: Page, urls: str, url: str) -> None:
    shown(page, urls)
    paths = plot(page, "Entropy of the policy").locator("path.curve")
    dashes = paths.evaluate_all("all => all.map(p => [p.getAttribute('stroke'), p.getAttribute('stroke-dasharray')])")
    own = {colour: {dash for other, dash in dashes if other == colour} for colour in PALETTE[:3]}
    assert own[PALETTE[0]] == {None}
    assert own[PALETTE[2]] == {"9 9"}  # over the first run's curve everywhere
    shown(page, url)
    clipped = plot(page, "Clipped tokens").locator("path.curve")
    assert clipped.nth(1).get_attribute("stroke-dasharray") == "9 9"


def test_the_prompts_are_counted_by_where_they_are(page: Page, url: str) -> None:
    shown(page, url)
    row = page.locator(".bar-row")
    assert row.locator(".bar-title > *").all_text_contents() == ["countdown", "972 prompts taken so far"]
    assert row.locator(".key-item").all_text_contents() == [
        "in flight 8",
        "buffered 3",
        "trained on 940",
        "dropped, uniform 20",
        "quarantined 1",
    ]
    widths = row.locator(".counts i").evaluate_all("all => all.map(i => i.getBoundingClientRect().width)")
    assert widths.index(max(widths)) == 2
    row.locator("summary").click()
    assert row.locator("tbody td").all_text_contents() == ["train:17", "the reward is not a number"]


def test_the_timeline_shows_who_waited_with_faults_and_restarts(page: Page, url: str) -> None:
    shown(page, url)
    timeline = page.locator("#timeline > svg")
    assert timeline.locator("text.lane").all_text_contents() == ["trainer", "engine 0", "engine 1"]
    assert timeline.get_by_text(re.compile(r"^waits for rollouts 3\d(\.\d)?%$")).count() == 1
    assert timeline.get_by_text(re.compile(r"^idle \d+(\.\d)?% · 480 requests$")).count() == 1
    assert timeline.locator("rect.request").count() == 8 * (2 * NUM_STEPS - 3)
    assert timeline.locator("rect.down").count() == 1
    kinds = timeline.locator("line.event").evaluate_all("all => all.map(e => e.getAttribute('class'))")
    assert kinds == ["event start", "event lost", "event serves", "event restart", "event start"]
    rows = page.locator("#events tbody tr")
    assert [row.locator("td").nth(1).inner_text() for row in rows.all()] == [
        "the trainer started",
        "the run restarted after step 40",
        "engine 1: serves",
        "engine 1: lost",
        "the trainer started",
    ]
    x = timeline.locator("line.event.lost").get_attribute("x1")
    box = timeline.bounding_box()
    assert box is not None
    found = hover(timeline, float(x or 0) / box["width"], 0.75)
    assert found["engine"] == "engine 1"
    shoot(page, "run-timeline")
    assert page.locator("#tooltip .reason").inner_text() == "engine 1 did not answer within 5 s"


def test_the_legend_of_the_timeline_has_requests_only_if_the_run_has(page: Page, view: View, tmp_path: Path) -> None:
    root = live_run(tmp_path / "run", num_steps=2, with_faults=False)
    legend = page.locator("#timeline .key-item").get_by_text("request")
    shown(page, view(root))
    assert legend.all_text_contents() == ["request"]
    RunDirectory(root).requests.unlink()
    shown(page, view(root))
    assert page.locator("#timeline .key-item").count() >= 4
    assert legend.count() == 0


def test_zooming_into_the_timeline_shows_steps_and_requests(page: Page, url: str) -> None:
    span = START_S + STEP_S * (LOST_STEP + 9), START_S + STEP_S * (LOST_STEP + 13)
    shown(page, url, f"time={span[0]}_{span[1]}")
    timeline = page.locator("#timeline > svg")
    assert timeline.locator("rect.request").count() == 16 * 4
    page.locator("#timeline-section").scroll_into_view_if_needed()
    step = hover(timeline, 0.45, 0.15)
    assert int(step["step"]) in range(LOST_STEP + 9, LOST_STEP + 14)
    assert number(step["updates"].removesuffix(" s")) == 5.0
    assert step["last request of its batch"].startswith("engine 1, prompt ")
    bar = timeline.locator("rect.request").first
    box, whole = bar.bounding_box(), timeline.bounding_box()
    assert box is not None
    assert whole is not None
    x = (box["x"] + box["width"] / 2 - whole["x"]) / whole["width"]
    request = hover(timeline, x, (box["y"] + box["height"] / 2 - whole["y"]) / whole["height"])
    shoot(page, "run-requests")
    assert request["engine"] == "engine 0"
    assert int(request["requests in flight"]) >= 1
    wanted = {str(row["prompt_serial"]): row for step in range(29, 35) for row in requests_of(step)}[request["prompt"]]
    assert request["batch of step"] == str(wanted["step"])
    assert request["tokens"] == str(sum(wanted["num_tokens"]))
    page.locator("#whole-time").click()
    page.locator("#whole-time").wait_for(state="hidden")
    assert timeline.locator("rect.request").count() > 500
    drag(timeline, 0.5, 0.6)
    page.locator("#whole-time").wait_for()
    page.wait_for_function("() => document.querySelectorAll('#timeline rect.request').length < 200")
    page.wait_for_url(re.compile("time="))


def test_the_differences_of_configuration_are_a_table(page: Page, urls: str, url: str) -> None:
    shown(page, urls)
    table = page.locator("#configs table")
    table.wait_for()
    assert table.locator("th").all_text_contents() == ["key", "bapo", "low-lr", "bapo-again"]
    assert [row.locator("td").all_text_contents() for row in table.locator("tbody tr").all()] == [
        ["(started with).commit", "c0ffee0", "c0ffee1", "c0ffee0"],
        ["logging.every", "–", "–", "1"],
        ["optimizer.lr", "0.0002", "0.0001", "0.0002"],
        ["seed", "0", "1", "0"],
    ]
    shown(page, url)
    assert "compares several" in page.locator("#configs").inner_text()


def test_the_timeline_of_another_run_can_be_chosen(page: Page, urls: str) -> None:
    shown(page, urls, "time=1789999990.000_1790000100.000")
    page.locator("#timeline-run").select_option("low-lr")
    page.locator("#whole-time").wait_for(state="hidden")
    page.wait_for_url(re.compile("timeline=1"))
    assert page.locator("#timeline rect.request").count() > 900


def test_pages_of_a_run_lead_to_each_other(page: Page, view: View, tmp_path: Path) -> None:
    runs = small_run(tmp_path / "with-rollouts"), live_run(tmp_path / "without", num_steps=2, with_faults=False)
    url = view(*runs)
    page.goto(url)
    page.get_by_text("3 prompts, 12 responses", exact=True).wait_for()
    page.locator("#run-choice").select_option("without")
    page.get_by_text(re.compile(r"no sampled rollouts; logging\.rollouts\.every_steps turns them on")).wait_for()
    assert page.locator("aside, #prompt, .bar").evaluate_all("all => all.every(e => !e.checkVisibility())")
    page.wait_for_url(re.compile("run=1"))
    page.locator("#run-choice").select_option("with-rollouts")
    page.get_by_text("3 prompts, 12 responses", exact=True).wait_for()
    page.get_by_role("link", name="Run", exact=True).click()
    page.locator("figure .plot svg").first.wait_for()
    assert page.locator("#runs .name").all_text_contents() == ["with-rollouts", "without"]
    page.get_by_role("link", name="Rollouts").click()
    page.get_by_text("3 prompts, 12 responses", exact=True).wait_for()


def test_a_run_that_has_just_started_says_what_comes(page: Page, view: View, tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("seed: 1\n")
    url = view(tmp_path)
    page.goto(f"{url}run.html")
    page.get_by_text("No metrics yet").wait_for()
    page.get_by_text("Nothing with a time yet").wait_for()
    page.get_by_text("no step yet").wait_for()
    live_run(tmp_path, num_steps=2)
    page.locator("figure .plot svg").first.wait_for()


def test_hostile_text_is_shown_as_text(page: Page, view: View, tmp_path: Path) -> None:
    hostile = HOSTILE + "\ud800"
    roots = [live_run(tmp_path / name, num_steps=2, with_faults=False) for name in ("<b>one", "two")]
    directory = RunDirectory(roots[0])
    metrics = {f"val/{hostile}": 0.5, f"val/{hostile}2": 0.6}
    append(directory.metrics, [{"step": 2, "phase": "validation", "time_s": 1.0, "metrics": metrics}])
    append(directory.quarantined, [{"prompt_id": hostile, "failures": [hostile]}])
    append(directory.requests, [{**requests_of(2)[0], "engine": hostile}])
    event = {"time_s": START_S + 5, "engine": hostile, "event": hostile, "reason": hostile}
    append(directory.engine_events, [event])
    append(directory.restarts, [{"time_s": START_S + 9, "step": hostile, "reason": hostile}])
    with directory.config.open("a") as file:
        file.write(f"hostile: {json.dumps(HOSTILE)}\n")
    directory.phase.write_text(HOSTILE)
    url = view(*roots)
    shown(page, url)
    page.locator("summary").click()
    hover(plot(page, "Held-out accuracy"), 0.9)
    page.locator("#configs table").wait_for()
    text = page.locator("body").inner_text()
    assert page.locator("img, body script").count() == 0
    assert page.title() == "<b>one, two · run"
    hidden = re.compile("[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u200b-\u200f\u202a-\u202e\u2028\u2066-\u2069]")
    assert not hidden.search(text)
    for place in ("figure", "#prompt-bars", "#events", "#configs", "#tooltip", "#runs"):
        assert "<img src=x onerror=alert(1)>" in "".join(page.locator(place).all_text_contents())
    assert "<img src=x onerror=al…" in page.locator("#timeline text.lane").all_text_contents()
    assert "U+202E" in page.locator("#events").inner_text()
    hover(page.locator("#timeline > svg"), 0.9, 0.8)
    assert page.locator("img").count() == 0


def test_the_page_in_both_schemes(page: Page, url: str) -> None:
    shown(page, url)
    hover(plot(page, "Clip bounds"), 0.6)
    light = page.evaluate("getComputedStyle(document.body).backgroundColor")
    page.get_by_role("button", name="Light or dark").click()
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") != light
    page.wait_for_url(re.compile("theme=dark"))
