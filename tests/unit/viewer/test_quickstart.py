"""The page of rollouts on a run of the quickstart, of which `quickstart/` has four groups of step 10.

It was recorded with `trainer.total_steps=21`. The model is in float32 on CPU cores, so trainer and engine agree.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow.parquet as pq
import pytest

from tests.unit.viewer.browsers import IN_A_BROWSER, served, shoot

if TYPE_CHECKING:
    from playwright.sync_api import Locator, Page

RUN = Path(__file__).with_name("quickstart")
pytestmark = IN_A_BROWSER


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    yield from served(RUN)


@pytest.fixture(scope="module")
def rows() -> list[dict]:
    return pq.read_table(RUN / "sampled_rollouts" / "step-00000010.parquet").to_pylist()


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
