"""The pages of the viewer in a narrow window, and the contrast of their texts."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.unit.viewer.browsers import IN_A_BROWSER, served
from tests.unit.viewer.made_live_runs import live_run
from tests.unit.viewer.made_runs import small_run

if TYPE_CHECKING:
    from playwright.sync_api import Page

pytestmark = IN_A_BROWSER
LONG_NAME = "a-run-whose-folder-has-a-name-that-is-longer-than-the-window"
LONG_KEY = "algorithm.a_section_with_a_long_name.a_key_with_a_long_name"
PAGES = {
    "rollouts": "#step=1&row=4",
    "over steps": "#view=history",
    "no rollouts": "#run=1",
    "run": "run.html#timeline=1",
}
CONTRASTS = r"""() => {
    const context = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
    const over = (colour, below) => {
        context.clearRect(0, 0, 1, 1);
        for (const each of [below, colour]) {
            context.fillStyle = each;
            context.fillRect(0, 0, 1, 1);
        }
        return `rgb(${[...context.getImageData(0, 0, 1, 1).data].slice(0, 3)})`;
    };
    const luminance = (colour) => {
        const parts = colour.match(/\d+/g).map((part) => part / 255);
        const [r, g, b] = parts.map((x) => (x <= 0.04045 ? x / 12.92 : ((x + 0.055) / 1.055) ** 2.4));
        return 0.2126 * r + 0.7152 * g + 0.0722 * b;
    };
    const behind = (element) =>
        element ? over(getComputedStyle(element).backgroundColor, behind(element.parentElement)) : "rgb(255, 255, 255)";
    const isText = (node) => node.nodeType === Node.TEXT_NODE && node.data.trim();
    const hasText = (element) => element.matches("input, select") || [...element.childNodes].some(isText);
    return [...document.querySelectorAll("body *:not(:disabled, option)")]
        .filter((element) => hasText(element) && element.checkVisibility())
        .map((element) => {
            const { color, fill } = getComputedStyle(element);
            const back = behind(element);
            const text = over(element instanceof SVGElement ? fill : color, back);
            const [low, high] = [luminance(text), luminance(back)].sort((a, b) => a - b);
            const where = `${element.tagName}.${element.getAttribute("class")} ${text} on ${back}`;
            return [(high + 0.05) / (low + 0.05), where];
        });
}"""
"""Contrast of each text that is seen, and where it is (WCAG 2.2, success criterion 1.4.3); disabled ones are exempt."""


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("runs")
    section, key = LONG_KEY.removeprefix("algorithm.").split(".")
    config = f"algorithm:\n  {section}:\n    {key}: a-value-that-is-long-as-well-and-has-no-space_in_it\n"
    return [small_run(folder / LONG_NAME), live_run(folder / "bapo"), live_run(folder / "low-lr", config=config)]


@pytest.fixture(scope="module")
def url(runs: list[Path]) -> Iterator[str]:
    yield from served(*runs)


def shown(page: Page, url: str, name: str, state: str = "") -> Page:
    page.goto("about:blank")
    page.goto(url + PAGES[name] + state)
    for place in {
        "run": ("figure .plot svg", "#configs table", "#timeline > svg"),
        "no rollouts": ("#message:not(:empty)",),
    }.get(name, ("#prompt-text .id", "article.response .figures")):
        page.locator(place).first.wait_for()
    return page


def width(page: Page) -> int:
    return page.evaluate("document.documentElement.scrollWidth")


@pytest.mark.parametrize("name", PAGES)
def test_a_narrow_window_shows_a_page_without_scrolling_sideways(page: Page, url: str, name: str) -> None:
    page.set_viewport_size({"width": 360, "height": 740})
    shown(page, url, name)
    assert width(page) <= 360
    if name == "run":
        for summary in page.locator("#prompt-bars summary").all():
            summary.click()
        assert width(page) <= 360


def test_names_of_runs_and_keys_are_whole_in_a_narrow_window(page: Page, url: str) -> None:
    page.set_viewport_size({"width": 360, "height": 740})
    shown(page, url, "run")
    name, key = page.locator("#runs .name").first, page.locator("td.key", has_text=LONG_KEY)
    for each, text in ((name, LONG_NAME), (key, LONG_KEY)):
        assert each.inner_text().replace("\n", "") == text
        assert each.evaluate("e => e.scrollWidth <= e.clientWidth && e.getBoundingClientRect().right <= innerWidth")
    assert key.evaluate("e => getComputedStyle(e).paddingLeft") == "8px"
    heights = page.locator("td", has_text="0.0002").evaluate_all(
        "all => all.map(e => e.firstChild.getClientRects().length)"
    )
    assert heights == [1, 1]  # a number is not broken


def test_an_exported_page_fits_a_narrow_window(page: Page, runs: list[Path], tmp_path: Path) -> None:
    file = tmp_path / "page.html"
    subprocess.run([sys.executable, "-m", "megatron_bapo", "view", str(runs[0]), "--export", str(file)], check=True)
    page.set_viewport_size({"width": 360, "height": 740})
    shown(page, file.as_uri(), "over steps")
    assert width(page) <= 360


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("name", PAGES)
def test_texts_have_enough_contrast(page: Page, url: str, name: str, theme: str) -> None:
    shown(page, url, name, f"&theme={theme}")
    if name == "run":
        page.get_by_role("button", name="low-lr").click()
    if name == "rollouts":
        page.locator("#help-button").click()
    found = page.evaluate(CONTRASTS)
    assert found
    assert [f"{contrast:.2f}: {where}" for contrast, where in found if contrast < 4.5] == []


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("measure", ["ratio", "difference", "entropy", "advantage", "staleness"])
def test_tokens_have_enough_contrast_on_every_colour(page: Page, url: str, measure: str, theme: str) -> None:
    shown(page, url, "rollouts", f"&row=0&colour={measure}&theme={theme}")
    page.locator("article.response .t").first.hover()
    page.locator("#tooltip dl").wait_for()
    found = page.evaluate(CONTRASTS)
    assert [f"{contrast:.2f}: {where}" for contrast, where in found if contrast < 4.5] == []
