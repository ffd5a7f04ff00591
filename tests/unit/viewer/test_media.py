"""The pages on paper, in forced colours, in a low window and for a screen reader."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from megatron_bapo.metrics.report import write_report
from tests.unit.viewer.browsers import IN_A_BROWSER, served
from tests.unit.viewer.made_live_runs import live_run, train_row
from tests.unit.viewer.made_runs import small_run

if TYPE_CHECKING:
    from playwright.sync_api import Page

pytestmark = IN_A_BROWSER
NAMED = ("button", "combobox", "dialog", "link", "listbox", "navigation", "option", "searchbox", "spinbutton", "image")
"""Roles that mean nothing without a name."""
PLACES = {"": "article.response .t", "run.html": "figure .plot svg"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def url(folder: Path) -> Iterator[str]:
    yield from served(small_run(live_run(folder / "small")))


@pytest.fixture(scope="module")
def urls(folder: Path) -> Iterator[str]:
    """As many runs as a page can show."""
    yield from served(*(live_run(folder / f"a-run-with-a-long-name-{i}", num_steps=96, seed=i) for i in range(7)))


def shown(page: Page, url: str, name: str = "", state: str = "") -> Page:
    page.goto(f"{url}{name}#{state}")
    page.locator(PLACES[name]).first.wait_for()
    return page


def style(page: Page, place: str, name: str) -> str:
    return page.locator(place).first.evaluate("(element, name) => getComputedStyle(element)[name]", name)


def nodes(page: Page) -> list[dict[str, Any]]:
    tree = page.context.new_cdp_session(page).send("Accessibility.getFullAXTree")["nodes"]
    return [node for node in tree if not node["ignored"]]


def test_printed_responses_are_whole_and_dark_on_white(page: Page, url: str) -> None:
    shown(page, url, state="step=1&theme=dark")
    page.set_viewport_size({"width": 720, "height": 500})
    page.emulate_media(media="print")
    for box in page.locator("article.response, #prompt").all():
        assert box.evaluate("e => e.getBoundingClientRect().right <= innerWidth && e.scrollHeight <= e.clientHeight")
    assert page.locator("#content").evaluate("e => e.scrollHeight <= e.clientHeight")
    assert page.locator("aside, .bar, #theme").evaluate_all("all => all.some(e => e.checkVisibility())") is False
    assert style(page, "body", "color") == "rgb(27, 36, 48)"
    assert style(page, ".t.p3, .t.n3", "printColorAdjust") == "exact"


def test_a_printed_figure_is_on_one_page(page: Page, url: str) -> None:
    shown(page, url, "run.html")
    page.emulate_media(media="print")
    assert {style(page, place, "breakInside") for place in ("figure", "#timeline", "tr")} == {"avoid"}
    assert style(page, "h2", "breakAfter") == "avoid"


def test_a_printed_report_has_whole_samples_dark_on_white(page: Page, tmp_path: Path) -> None:
    sample = {"step": 1, "prompt": "2 + 2 =", "response": "four\n" * 100, "ground_truth": "4", "reward": 1.0}
    sample["finish_reason"] = "stop"
    rows = [train_row(1), train_row(2)]
    report = write_report(tmp_path, title="Sums", summary={}, rows=rows, samples=[sample], config_yaml="seed: 1\n")
    page.emulate_media(color_scheme="dark")
    page.goto(report.as_uri())
    assert style(page, "body", "color") == "rgb(230, 232, 234)"
    page.emulate_media(media="print", color_scheme="dark")
    assert (style(page, "body", "color"), style(page, ".card", "backgroundColor")) == (
        "rgb(28, 33, 38)",
        "rgb(255, 255, 255)",
    )
    assert page.locator(".sample pre").last.evaluate("e => e.scrollHeight <= e.clientHeight")
    assert style(page, "h2", "breakAfter") == "avoid"


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_forced_colours_keep_what_colours_mean(page: Page, url: str, scheme: Any) -> None:
    page.emulate_media(forced_colors="active", color_scheme=scheme)
    shown(page, url, state="step=1&row=0")
    colours = [
        style(page, place, "backgroundColor") for place in ("body", ".cell.right", ".cell.wrong", ".t.p3", ".t.n3")
    ]
    assert len(set(colours)) == 5
    assert "inset" in style(page, ".t.upper", "boxShadow")
    for chosen, other in (("#by-response", "#by-step"), (".pages a[aria-current]", ".pages a:not([aria-current])")):
        assert style(page, chosen, "backgroundColor") != style(page, other, "backgroundColor")
    assert style(page, ".item.chosen", "outlineStyle") == "solid"


def test_forced_colours_keep_the_colours_of_runs(page: Page, urls: str) -> None:
    page.emulate_media(forced_colors="active")
    shown(page, urls, "run.html")
    chips = page.locator("#runs .chip").evaluate_all("all => all.map(e => getComputedStyle(e).backgroundColor)")
    assert len(set(chips)) == 7


@pytest.mark.parametrize(("width", "height"), [(390, 844), (844, 390), (700, 450)])
def test_a_small_window_has_room_for_the_figures_of_many_runs(page: Page, urls: str, width: int, height: int) -> None:
    page.set_viewport_size({"width": width, "height": height})
    shown(page, urls, "run.html")
    figure = page.locator("figure").nth(1)
    figure.scroll_into_view_if_needed()
    page.locator("body").evaluate("() => scrollBy(0, 300)")
    assert page.locator("header").evaluate("e => e.getBoundingClientRect().bottom") < 0
    labels = figure.locator(".plot text[text-anchor=middle]").all_text_contents()
    assert len(labels) >= 3


def test_a_low_window_has_room_for_the_prompts(page: Page, url: str) -> None:
    page.set_viewport_size({"width": 844, "height": 390})
    shown(page, url)
    assert page.locator("#prompts").evaluate("e => e.clientHeight") >= 2 * 66
    page.locator("article.response").first.scroll_into_view_if_needed()
    assert page.locator("article.response").first.evaluate("e => e.getBoundingClientRect().top") < 390


@pytest.mark.parametrize("name", PLACES)
def test_every_control_has_a_name(page: Page, url: str, name: str) -> None:
    shown(page, url, name)
    found = nodes(page)
    if not name:
        page.keyboard.press("?")
        page.locator("#help").wait_for()
        found += nodes(page)
    roles = {node["role"]["value"] for node in found}
    assert roles >= ({"dialog", "option", "combobox", "searchbox"} if not name else {"button", "link", "image"})
    assert [
        node["role"]["value"] for node in found if node["role"]["value"] in NAMED and not node["name"]["value"]
    ] == []


def test_the_name_of_a_single_run_is_no_button(page: Page, url: str, urls: str) -> None:
    shown(page, url, "run.html")
    assert page.locator("#runs .run").count() == 1
    assert page.locator("#runs button, #runs [aria-pressed]").count() == 0
    shown(page, urls, "run.html")
    assert page.locator("#runs button[aria-pressed=true]").count() == 7
