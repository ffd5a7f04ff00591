"""What the pages do when rows, keys and the window's size change."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from megatron_bapo.run_directory import RunDirectory
from tests.unit.viewer.browsers import IN_A_BROWSER, opened, served
from tests.unit.viewer.made_live_runs import append, live_run, requests_of, train_row
from tests.unit.viewer.made_runs import damage, group, prompt, sampled, small_run, write_step

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page, Route

pytestmark = IN_A_BROWSER
View = Callable[..., str]


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    yield from served(small_run(tmp_path_factory.mktemp("changes") / "small"))


def last_step(page: Page) -> int:
    """Return the last step that the figure of the entropy has, which its keys reach."""
    entropy = page.get_by_role("group", name=re.compile("^Entropy of the policy"))
    entropy.focus()
    entropy.press("End")
    page.locator("#tooltip dl").wait_for()
    step = page.locator("#tooltip .token").inner_text()
    entropy.press("Escape")
    return int(step.removeprefix("step "))


def test_a_link_to_a_row_beyond_the_first_page_opens_it(page: Page, view: View, tmp_path: Path) -> None:
    made = [sampled(text, reward=1.0, advantage=0.0) for text in ("one", "two")]
    write_step(tmp_path, 1, [group(i, prompt(i, f"prompt {i}"), made) for i in range(1200)], num_groups=1200)
    url = view(tmp_path)
    for row, number in ((300, 151), (255, 128), (2399, 1200)):
        page.goto("about:blank")
        page.goto(f"{url}#row={row}")
        page.get_by_text(f"prompt {number} of 1200", exact=True).wait_for()
        assert page.locator("#prompt-text .content").first.inner_text() == f"prompt {number - 1}"
        assert page.locator(".item.chosen .excerpt").inner_text() == f"prompt {number - 1}"
        page.wait_for_url(re.compile(rf"row={row}$"))


def test_prompts_with_a_long_common_beginning_differ_where_they_are_seen(
    page: Page, view: View, tmp_path: Path
) -> None:
    made = sampled("ok", reward=1.0, advantage=0.0)
    rules = "Answer with a number, and think about it for as long as you need. " * 5
    texts = [f"{rules}What is {n} + {n}?" for n in range(3)] + [f"{rules}{rules}Divide {n} by 3" for n in range(3)]
    write_step(tmp_path, 1, [group(i, prompt(i, text), [made]) for i, text in enumerate(texts)])
    opened(page, view(tmp_path))
    seen = page.locator("#prompts .excerpt").evaluate_all(
        """all => all.map((excerpt) => {
            const range = document.createRange();
            range.setStart(excerpt.firstChild, 0);
            const { right } = excerpt.getBoundingClientRect();
            for (let end = excerpt.firstChild.length; end > 0; end--) {
                range.setEnd(excerpt.firstChild, end);
                if (range.getBoundingClientRect().right <= right) return excerpt.textContent.slice(0, end);
            }
        })"""
    )
    assert len(set(seen)) == 6
    assert all(re.search(rf"\b{n % 3}\b", text) for n, text in enumerate(seen))


def test_keys_do_nothing_behind_the_open_help(page: Page, url: str) -> None:
    opened(page, url, "step=1")
    page.keyboard.press("?")
    page.locator("#help").wait_for()
    before = page.url
    for key in ("j", "]", "c", "/", "?"):
        page.keyboard.press(key)
    assert (page.url, page.locator("#place").inner_text()) == (before, "prompt 1 of 3")
    assert page.evaluate("document.activeElement.id") != "text"
    page.keyboard.press("Escape")
    page.locator("#help").wait_for(state="hidden")
    page.keyboard.press("j")
    page.get_by_text("prompt 2 of 3").wait_for()


def test_controls_say_nothing_while_a_step_is_loaded(page: Page, url: str) -> None:
    held: list[Route] = []
    keys = {"**/history": "c", "**/steps/10?*": "]"}
    # Chromium may let pass what a page asks for while its routes are set: they are set before there is a page.
    for path in keys:
        page.route(path, lambda route: held.append(route) if len(held) < 2 else route.continue_())
    opened(page, url, "step=1")
    for path, key in keys.items():
        with page.expect_request(path):
            page.keyboard.press(key)
    page.evaluate(
        """window.said = [];
        new MutationObserver(() => said.push(document.getElementById("message").textContent))
            .observe(document.getElementById("message"), { childList: true })"""
    )
    for key in ("j", "k", "c", "c"):
        page.keyboard.press(key)
    page.locator("#reward-min").fill("0.5")
    page.wait_for_url(re.compile("rmin=0.5"))
    for route in held:
        with page.expect_response(route.request.url):
            route.continue_()
    page.get_by_text("3 prompts, 7 responses", exact=True).wait_for()
    page.locator(".step-title", has_text="Step 10").wait_for()
    assert not any(page.evaluate("said"))


def test_keys_that_belong_to_a_field_do_nothing_else(page: Page, url: str) -> None:
    opened(page, url, "step=1")
    page.keyboard.press("/")
    page.keyboard.type("j]c?")
    page.get_by_text("0 prompts, 0 responses", exact=True).wait_for()
    assert (page.locator("#text").input_value(), page.locator("#step").input_value()) == ("j]c?", "1")
    assert page.locator("#help").is_hidden()
    page.keyboard.press("Escape")
    page.keyboard.press("Control+j")
    page.keyboard.press("?")
    page.locator("#help").wait_for()


def test_every_control_of_the_rollouts_page_is_reached_by_tab(page: Page, url: str) -> None:
    opened(page, url, "step=1&row=4")
    page.locator("article.response .t").first.wait_for()
    reached = set()
    for _ in range(40):
        page.keyboard.press("Tab")
        reached.add(page.evaluate("document.activeElement.id || document.activeElement.className"))
    wanted = page.evaluate(
        """[...document.querySelectorAll("button:enabled, select, input, summary, [tabindex]")]
            .filter((e) => e.checkVisibility()).map((e) => e.id || e.className)"""
    )
    assert set(wanted) <= reached


def test_the_figure_of_a_token_is_computed_once_and_a_change_colours_once(
    page: Page, view: View, tmp_path: Path
) -> None:
    text = "".join(f"line {number}\n" for number in range(600))
    made = [sampled(text, reward=float(n), advantage=1.0, seed=n) for n in range(3)]
    write_step(tmp_path, 1, [group(0, prompt(0, "long"), made)])
    # The colour of a ratio is that of its logarithm; the legend is made anew with each colouring.
    page.add_init_script(
        "const log = Math.log; window.logs = 0; Math.log = (x) => { window.logs += 1; return log(x); };"
    )
    opened(page, view(tmp_path))
    total = len(text) + 1
    for number in range(3):
        scroller = page.locator(".scroller").nth(number)
        while page.locator("article.response").nth(number).locator(".t").count() < total:
            scroller.evaluate("box => { box.scrollTop = box.scrollHeight }")
            page.wait_for_timeout(50)
    page.wait_for_function("() => !document.querySelector('.end:not([hidden])')")
    assert 3 * total <= page.evaluate("logs") <= 3 * total + 1  # and that of the smallest scale
    page.evaluate(
        """window.colourings = 0;
        new MutationObserver((records) => {
            colourings += records.filter((record) => record.removedNodes.length).length;
        }).observe(document.getElementById("legend"), { childList: true })"""
    )
    for change, count in (
        (lambda: page.locator("#colour").select_option("entropy"), 1),
        (lambda: page.locator("#colour").select_option("ratio"), 2),
        (lambda: page.locator("#theme").click(), 2),
        (lambda: page.locator("#sort").select_option("length"), 2),
    ):
        change()
        assert page.evaluate("colourings") == count
    assert page.evaluate("logs") <= 6 * total + 2


def test_a_damaged_line_is_named_and_the_rest_of_the_page_follows_the_run(
    page: Page, view: View, tmp_path: Path
) -> None:
    root = live_run(tmp_path / "run", num_steps=3, with_faults=False)
    directory = RunDirectory(root)
    whole = directory.metrics.read_text()
    page.goto(f"{view(root)}run.html")
    page.get_by_text(re.compile(r"^step 3 of 60")).wait_for()
    for path in (directory.metrics, directory.requests):
        with path.open("a") as file:
            file.write("{broken\n")
    append(directory.metrics, [train_row(4)])
    append(directory.requests, requests_of(4))
    page.get_by_text(re.compile(r"^step 4 of 60")).wait_for()
    page.locator("#timeline text", has_text="32 requests").first.wait_for()
    assert last_step(page) == 4
    in_order = re.compile(r"metrics\.jsonl, line(.|\n)*requests\.jsonl, line")
    page.locator("#message", has_text=in_order).wait_for()
    lines = page.locator("#message").inner_text().split("\n")
    number = whole.count("\n") + 1
    assert [re.sub(r" \(.*\)", "", line) for line in lines] == [
        f"{directory.metrics}, line {number} is left out: it is not JSON; repair or delete that line",
        f"{directory.requests}, line 49 is left out: it is not JSON; repair or delete that line",
    ]
    directory.metrics.write_text(whole)
    page.get_by_text(re.compile(r"^step 3 of 60")).wait_for()
    page.wait_for_function("text => document.querySelector('#message').innerText === text", arg="\n".join(lines[1:]))
    assert last_step(page) == 3


def test_figures_come_back_after_the_viewer_did_not_answer(browser: Browser, view: View, tmp_path: Path) -> None:
    root = live_run(tmp_path / "run", num_steps=3, with_faults=False)
    context = browser.new_context()
    page = context.new_page()
    page.goto(f"{view(root)}run.html")
    page.get_by_text(re.compile(r"^step 3 of 60")).wait_for()
    context.set_offline(True)
    page.get_by_text("The viewer does not answer any more.").wait_for()
    append(RunDirectory(root).metrics, [train_row(4)])
    context.set_offline(False)
    page.get_by_text(re.compile(r"^step 4 of 60")).wait_for()
    page.locator("#message:empty").wait_for(state="attached")
    assert last_step(page) == 4
    context.close()


def test_figures_and_timeline_are_drawn_anew_in_a_window_of_another_size(
    page: Page, view: View, tmp_path: Path
) -> None:
    page.goto(f"{view(live_run(tmp_path / 'run', num_steps=10))}run.html")
    page.locator("#timeline > svg").wait_for()
    widths = []
    for width in (1440, 700, 1100):
        page.set_viewport_size({"width": width, "height": 900})
        page.wait_for_function(
            """() => [...document.querySelectorAll(".plot > svg"), document.querySelector("#timeline > svg")]
                .every((svg) => svg.getAttribute("width") === String(Math.max(240, svg.parentElement.clientWidth)))"""
        )
        widths.append(page.locator("#timeline > svg").get_attribute("width"))
        assert last_step(page) == 10
    assert len(set(widths)) == 3


def test_a_key_that_is_held_changes_the_url_as_often_as_webkit_takes(page: Page, url: str) -> None:
    page.add_init_script(
        """const times = [];
        const replace = history.replaceState;
        history.replaceState = function (...given) {
            times.push(performance.now());
            if (times.at(-1) - times.at(-11) < 1000) throw new DOMException("10 times in 1 s", "SecurityError");
            replace.apply(this, given);
        };"""
    )
    opened(page, url, "step=1&row=0")
    page.locator(".t").first.wait_for()
    page.locator(".tokens").first.evaluate(
        """tokens => {
            for (const key of [..."RL".repeat(100), ..."RRRRR"]) {
                const named = { R: "ArrowRight", L: "ArrowLeft" }[key];
                tokens.dispatchEvent(new KeyboardEvent("keydown", { key: named, bubbles: true }));
            }
        }"""
    )
    page.wait_for_url(re.compile(r"token=0\.5$"))


def test_the_scheme_that_was_chosen_is_that_of_both_pages(page: Page, view: View, tmp_path: Path) -> None:
    opened(page, view(small_run(tmp_path / "run")))
    page.locator("#theme").click()
    for name in ("Run", "Rollouts"):
        page.get_by_role("link", name=name, exact=True).click()
        page.locator(".pages a[aria-current]", has_text=name).wait_for()
        page.locator("html[data-theme=dark]").wait_for()


def test_responses_say_that_the_viewer_does_not_answer(browser: Browser, url: str) -> None:
    context = browser.new_context()
    page, faults = context.new_page(), list[str]()
    page.on("pageerror", lambda error: faults.append(str(error)))
    opened(page, url, "step=1&row=0")
    context.set_offline(True)
    page.keyboard.press("j")
    page.locator("#message", has_text="The viewer does not answer any more.").wait_for()
    page.locator("article.response .end", has_text="The viewer does not answer any more.").first.wait_for()
    assert faults == []
    context.set_offline(False)
    page.keyboard.press("k")
    page.locator(".t").first.wait_for()
    assert page.locator("#message").inner_text() == ""
    context.close()


@pytest.mark.parametrize("columns", [("prompt_id",), ("messages",)])
def test_a_damaged_step_leaves_the_others_in_a_comparison(
    browser: Browser, view: View, tmp_path: Path, columns: tuple[str, ...]
) -> None:
    root = small_run(tmp_path / "run")
    damage(root, 10, *columns)
    page = opened(browser.new_page(), view(root), "step=1&view=history")
    page.get_by_text(
        re.compile(r"the sampled rollouts of step 10 are damaged \(.*\); copy their file again")
    ).wait_for()
    assert page.locator(".step-title").all_inner_texts() == ["Step 1 mean reward 0.5 · 4 responses"]
    page.close()


@pytest.mark.parametrize("state", ["run=7", "run=length", "colour=constructor", "sort=constructor", "rmin=abc&cmin=-"])
def test_a_link_with_values_that_nothing_has_opens_the_page_without_them(page: Page, url: str, state: str) -> None:
    opened(page, url, f"step=1&{state}")
    page.get_by_text("3 prompts, 12 responses", exact=True).wait_for()
    page.locator("#legend .scale").wait_for()
    assert page.locator("#message").inner_text() == ""
    chosen = page.locator("#colour, #sort").evaluate_all("all => all.map(select => select.value)")
    assert chosen == ["ratio", "order"]


@pytest.mark.parametrize("state", ["steps=1e-7_5", "steps=abc&time=0_1e30", "steps=0_1e30", "timeline=9"])
def test_a_link_with_an_odd_range_shows_the_figures_and_a_way_out(
    page: Page, view: View, tmp_path: Path, state: str
) -> None:
    url = view(live_run(tmp_path / "run", num_steps=8, with_faults=False))
    page.goto(f"{url}run.html#{state}")
    page.locator("#timeline rect.request").first.wait_for()
    assert last_step(page) == (5 if state.endswith("_5") else 8)
    assert page.locator("#message").inner_text() == ""
    if "steps" in state:
        page.locator("#whole").click()
        page.locator("#whole").wait_for(state="hidden")
        page.wait_for_function("() => !location.hash.includes('steps')")
    page.evaluate("location.hash = 'timeline=9'")
    page.wait_for_url(re.compile("run.html#?$"))
