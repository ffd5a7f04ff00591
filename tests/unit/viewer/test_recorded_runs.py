"""The page of rollouts on recorded runs: the quickstart, and a run of several turns (configs/calculator_tool.yaml).

`quickstart/` has four groups of step 10 of a run with `trainer.total_steps=21`, and `calculator/` all groups of step 1,
with those tokens of the tokenizer that they use. The models are in float32 on CPU cores, so trainer and engine agree.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow.parquet as pq
import pytest

from tests.unit.viewer.browsers import IN_A_BROWSER, served, shoot

if TYPE_CHECKING:
    from playwright.sync_api import Locator, Page

QUICKSTART, CALCULATOR = (Path(__file__).with_name(name) for name in ("quickstart", "calculator"))
pytestmark = IN_A_BROWSER


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    yield from served(QUICKSTART)


@pytest.fixture(scope="module")
def rows() -> list[dict]:
    return pq.read_table(QUICKSTART / "sampled_rollouts" / "step-00000010.parquet").to_pylist()


def tokens(page: Page, response: int) -> Locator:
    """Return the tokens of a response to the chosen prompt, once the page has them."""
    found = page.locator("article.response").nth(response).locator(".t")
    found.first.wait_for()
    return found


def test_rounding_errors_of_ratios_in_the_first_update_have_no_colour(page: Page, url: str, rows: list[dict]) -> None:
    first = next(i for i, row in enumerate(rows) if row["update"] == 1)
    assert 0 < max(abs(ratio - 1) for row in rows[first : first + 8] for ratio in row["ratio"]) < 1e-3
    page.goto(f"{url}#row={first}")
    page.locator("#legend .scale").wait_for()
    assert page.locator("#legend").inner_text().split()[:2] == ["0.9901", "1.01"]
    classes = tokens(page, 0).evaluate_all("all => all.map(t => t.className)")
    assert not [name for name in classes if "p" in name or "n" in name]


def test_tokens_that_later_updates_clipped_are_marked(page: Page, url: str, rows: list[dict]) -> None:
    clipped = max(range(0, len(rows), 8), key=lambda at: sum(row["num_lower"] for row in rows[at : at + 8]))
    page.goto(f"{url}#row={clipped}")
    page.locator("#legend .scale").wait_for()
    responses = page.locator("article.response")
    for number in range(8):
        responses.nth(number).scroll_into_view_if_needed()
        marked = tokens(page, number).evaluate_all("all => all.filter(t => t.classList.contains('lower')).length")
        assert marked == rows[clipped + number]["num_lower"]
    page.locator(".lane").evaluate("lane => { lane.scrollLeft = 0 }")
    number, index = next(
        (number, index)
        for number, row in enumerate(rows[clipped : clipped + 3])
        for index, bits in enumerate(row["marks"] or ())
        if bits & 2
    )
    tokens(page, number).nth(index).hover()
    page.locator("#tooltip").get_by_text("clipped by the lower bound").wait_for()
    shoot(page, "viewer-quickstart")


def test_the_head_of_the_page_is_one_line(page: Page, url: str) -> None:
    page.goto(url)
    page.locator("#legend .scale").wait_for()
    parts = page.locator("header > :not(.space):visible").evaluate_all("all => all.map(e => e.offsetTop)")
    assert max(parts) - min(parts) < 20
    assert page.locator("#pages a").all_inner_texts() == ["Rollouts", "Run"]


def test_the_calculators_replies_are_set_apart_and_have_no_colour(page: Page, view: Callable[..., str]) -> None:
    rows = pq.read_table(CALCULATOR / "sampled_rollouts" / "step-00000001.parquet").to_pylist()
    page.goto(f"{view(CALCULATOR)}#row=24&colour=entropy")
    for number, row in enumerate(rows[24:]):
        turns = json.loads(row["turns"] or "[]")
        replies = [f"<|im_start|>tool{each['content']}<|im_end|><|im_start|>assistant" for each in turns[1::2]]
        response = page.locator("article.response").nth(number)
        response.scroll_into_view_if_needed()
        assert tokens(page, number).count() == row["num_tokens"]
        shown = response.locator(".reply")
        assert ["".join(text.replace("⏎", "").split("\n")) for text in shown.all_text_contents()] == replies
        assert shown.locator(".t").count() == row["num_tokens"] - row["num_sampled"]
        assert shown.locator(".t").evaluate_all("all => all.every(t => t.className === 't')")
    page.locator(".lane").evaluate("lane => { lane.scrollLeft = 0 }")
    shoot(page, "viewer-tool")
