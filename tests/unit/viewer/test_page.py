"""What the page of rollouts shows in a real browser."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow.parquet as pq
import pytest

from megatron_bapo.run_directory import RunDirectory
from tests.unit.viewer.browsers import IN_A_BROWSER, opened, served, shoot
from tests.unit.viewer.made_runs import HOSTILE, group, prompt, sampled, small_run, write_step

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Locator, Page

pytestmark = IN_A_BROWSER
View = Callable[..., str]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_run(tmp_path_factory.mktemp("page") / "small")


@pytest.fixture(scope="module")
def url(run: Path) -> Iterator[str]:
    yield from served(run)


def rows_of(run: Path, step: int) -> list[dict]:
    return pq.read_table(RunDirectory(run).sampled_rollouts / f"step-{step:08d}.parquet").to_pylist()


def responses(page: Page) -> Locator:
    return page.locator("article.response")


def excerpts(page: Page) -> list[str]:
    return page.locator("#prompts .excerpt").all_text_contents()


def tokens(page: Page, response: int) -> Locator:
    """Return the tokens of a response, once the page has them."""
    found = responses(page).nth(response).locator(".t")
    found.first.wait_for()
    return found


def expect_count(page: Page, text: str) -> None:
    page.get_by_text(text, exact=True).wait_for()


def test_the_responses_to_a_prompt_are_side_by_side_with_their_facts(page: Page, url: str, run: Path) -> None:
    opened(page, url, "step=1")
    expect_count(page, "3 prompts, 12 responses")
    boxes = [responses(page).nth(i).bounding_box() for i in range(4)]
    assert [box["y"] for box in boxes if box] == [boxes[0]["y"]] * 4  # pyright: ignore[reportOptionalSubscript]
    for row, shown in zip(rows_of(run, 1)[:4], responses(page).all(), strict=True):
        facts = dict(zip(shown.locator("dt").all_text_contents(), shown.locator("dd").all_text_contents(), strict=True))
        assert float(facts["reward"]) == row["reward"]
        assert float(facts["advantage"].replace("−", "-")) == row["mean_advantage"]
        assert int(facts["tokens"]) == row["num_tokens"]
        assert facts["finish"] == "stop"
        assert facts["up / low / dual"] == f"{row['num_upper']} / {row['num_lower']} / {row['num_dual']}"
        assert facts["staleness"].endswith(f"(max {row['max_staleness']})")
        assert int(facts["versions"]) == row["num_versions"]
        assert facts["bounds"] == "0.8 – 1.2"
    assert (
        "".join(tokens(page, 0).all_text_contents())
        .replace("⏎", "")
        .startswith("Let me add the numbers.\n17 + 25 = 42")
    )
    lines = page.locator("#prompt-text").inner_text().split()
    assert " ".join(lines) == "user What is 17 + 25? ground truth 42 task:7 · task"


@pytest.mark.parametrize("measure", ["ratio", "difference", "entropy", "advantage", "staleness"])
def test_tokens_are_coloured_by_each_figure(page: Page, url: str, run: Path, measure: str) -> None:
    import math

    opened(page, url, "step=1")
    page.locator("#colour").select_option(measure)
    page.locator("#legend .scale").wait_for()
    seen = set()
    for number, row in enumerate(rows_of(run, 1)[:4]):
        spans = [span["policy_version"] for span in row["version_spans"] for _ in range(span["num_tokens"])]
        values = {
            "ratio": [math.log(ratio) for ratio in row["ratio"]],
            "difference": [
                own - engine for own, engine in zip(row["log_probs"], row["rollout_log_probs"], strict=True)
            ],
            "entropy": row["entropy"],
            "advantage": row["advantages"],
            "staleness": [7 - version for version in spans],
        }[measure]
        classes = tokens(page, number).evaluate_all("all => all.map(t => (t.className.match(/\\b[pn]\\d/) || [''])[0])")
        seen.update(classes)
        levels = [int(f"{'-' if name[0] == 'n' else ''}{name[1]}") if name else 0 for name in classes]
        order = sorted(range(len(values)), key=values.__getitem__)
        assert [levels[i] for i in order] == sorted(levels)
        assert all(level * value >= 0 for level, value in zip(levels, values, strict=True))
    assert "p6" in seen
    assert ("n6" in seen) == (measure in ("ratio", "difference", "advantage"))


def test_clipped_and_rejected_tokens_are_marked(page: Page, url: str, run: Path) -> None:
    opened(page, url, "step=1")
    marks = {"upper": 1, "lower": 2, "dual": 4, "rejected": 8}
    seen = set()
    for number, row in enumerate(rows_of(run, 1)[:4]):
        classes = tokens(page, number).evaluate_all("all => all.map(t => [...t.classList])")
        for own, bits in zip(classes, row["marks"], strict=True):
            assert {name for name in marks if name in own} == {name for name, bit in marks.items() if bits & bit}
            seen.update(own)
    assert marks.keys() <= seen


def test_the_legend_has_the_marks_that_the_responses_have(page: Page, view: View, tmp_path: Path) -> None:
    made = sampled("some words to mark", reward=1.0, advantage=1.0)
    marks = [16, 32, 8 | 32, 16 | 32]
    assert made.figures is not None
    made.figures["marks"][: len(marks)] = marks
    plain = sampled("no marks", reward=1.0, advantage=1.0)
    write_step(tmp_path, 1, [group(0, prompt(0, "marked"), [made]), group(1, prompt(1, "plain"), [plain])])
    opened(page, view(tmp_path))
    decorations = tokens(page, 0).evaluate_all(
        "all => all.map(getComputedStyle).map(s => `${s.textDecorationLine} ${s.textDecorationStyle}`)"
    )
    assert decorations[: len(marks)] == [
        "underline wavy",
        "underline dotted",
        "underline line-through dotted",
        "underline wavy",
    ]
    legend = page.locator("#legend .key")
    assert legend.all_text_contents() == ["upper", "lower", "dual", "rejected", "dropped", "masked"]
    page.get_by_text("plain").first.click()
    page.locator("#legend .key", has_text="masked").wait_for(state="detached")
    assert legend.all_text_contents() == ["upper", "lower", "dual", "rejected"]


def test_hovering_over_a_token_shows_its_numbers(page: Page, url: str, run: Path) -> None:
    opened(page, url, "step=1")
    row = rows_of(run, 1)[1]
    index = next(i for i, mark in enumerate(row["marks"]) if mark == 2)
    tokens(page, 1).nth(index).hover()
    tip = page.locator("#tooltip")
    tip.locator("dl").wait_for()
    numbers = dict(zip(tip.locator("dt").all_text_contents(), tip.locator("dd").all_text_contents(), strict=True))
    for name, value in (
        ("ratio", row["ratio"][index]),
        ("engine log-prob", row["rollout_log_probs"][index]),
        ("trainer log-prob", row["log_probs"][index]),
        ("trainer − engine", row["log_probs"][index] - row["rollout_log_probs"][index]),
        ("entropy", row["entropy"][index]),
        ("advantage", row["advantages"][index]),
    ):
        assert float(numbers[name].replace("−", "-")) == pytest.approx(value, rel=1e-3, abs=1e-5)
    assert (numbers["policy version"], numbers["staleness"]) == ("5", "2")
    assert tip.locator(".mark").all_text_contents() == ["clipped by the lower bound"]
    assert f"token {index + 1} of {row['num_tokens']}" in tip.inner_text()


@pytest.mark.parametrize(
    ("field", "value", "count"),
    [
        ("reward-min", "1", "2 prompts, 4 responses"),
        ("reward-max", "0.2", "3 prompts, 6 responses"),
        ("stale-min", "5", "1 prompts, 2 responses"),
        ("clipped-min", "35", "2 prompts, 4 responses"),
        ("text", "NEEDLE", "1 prompts, 2 responses"),
        ("text", "what is", "2 prompts, 8 responses"),
    ],
)
def test_filters_leave_the_responses_that_pass(page: Page, url: str, field: str, value: str, count: str) -> None:
    opened(page, url, "step=1")
    page.locator(f"#{field}").fill(value)
    expect_count(page, count)
    page.locator("#reset").click()
    expect_count(page, "3 prompts, 12 responses")


def test_truncated_responses_can_be_chosen(page: Page, url: str) -> None:
    opened(page, url, "step=1")
    page.locator("#finish").select_option("length")
    expect_count(page, "1 prompts, 2 responses")
    page.get_by_text("I guess 20").first.wait_for()
    assert responses(page).locator("h2").all_text_contents() == ["Response 2", "Response 4"]
    assert responses(page).first.get_by_text("truncated").is_visible()


def test_a_filter_that_nothing_passes_says_so(page: Page, url: str) -> None:
    opened(page, url, "step=1")
    page.locator("#text").fill("absent everywhere")
    page.get_by_text("No response passes the filters.").wait_for()
    assert responses(page).count() == 0


def test_prompts_are_sorted(page: Page, url: str) -> None:
    opened(page, url, "step=1")
    first = "What is 17 + 25?", "What is 3 * 7? (asked in step 1)"
    assert tuple(excerpts(page)[:2]) == first
    for sort, expected in {
        "reward": ["<img", "What is 17", "What is 3"],  # 0.25, then twice 0.5 in the order of the batch
        "reward-down": ["What is 17", "What is 3", "<img"],
        "length": ["What is 17", "<img", "What is 3"],
        "staleness": ["What is 3", "<img", "What is 17"],
        "order": ["What is 17", "What is 3", "<img"],
    }.items():
        page.locator("#sort").select_option(sort)
        assert [text[: len(e)] for text, e in zip(excerpts(page), expected, strict=True)] == expected, sort


def test_a_copied_url_shows_the_same(page: Page, url: str) -> None:
    opened(page, url)
    page.locator("#step").select_option("1")
    page.locator("#colour").select_option("entropy")
    page.locator("#reward-min").fill("0.5")
    expect_count(page, "3 prompts, 6 responses")
    page.get_by_text("(asked in step 1)").first.click()
    page.get_by_text("21, né").first.wait_for()
    tokens(page, 0).nth(3).click()
    shown = page.locator("#tooltip").inner_text()
    page.wait_for_url(re.compile(r"token="))
    copied = page.url
    page.goto("about:blank")
    page.goto(copied)
    page.locator("#tooltip dl").wait_for()
    assert page.locator("#tooltip").inner_text() == shown
    assert page.locator("#step").input_value() == "1"
    assert page.locator("#colour").input_value() == "entropy"
    assert page.locator("#reward-min").input_value() == "0.5"
    assert page.locator(".item.chosen .excerpt").inner_text() == "What is 3 * 7? (asked in step 1)"


def test_the_keyboard_moves_between_prompts_steps_and_tokens(page: Page, url: str) -> None:
    opened(page, url, "step=1")
    for key, place in (("j", 2), ("j", 3), ("j", 3), ("k", 2)):
        page.keyboard.press(key)
        page.get_by_text(f"prompt {place} of 3").wait_for()
    assert page.locator("#prompts").get_attribute("aria-activedescendant") == "prompt-1"
    page.keyboard.press("]")
    page.get_by_text("(asked in step 10)").first.wait_for()
    assert page.locator("#step").input_value() == "10"
    page.keyboard.press("[")
    page.get_by_text("(asked in step 1)").first.wait_for()
    page.locator("#prompts").focus()
    page.keyboard.press("ArrowUp")
    page.get_by_text("prompt 1 of 3").wait_for()
    tokens(page, 0).first.wait_for()
    responses(page).first.locator(".tokens").focus()
    for number in (1, 2, 3):
        page.keyboard.press("ArrowRight")
        page.get_by_text(f"token {number} of ").wait_for()
    page.keyboard.press("ArrowLeft")
    page.get_by_text("token 2 of ").wait_for()
    page.keyboard.press("Escape")
    assert page.locator("#tooltip").is_hidden()
    page.keyboard.press("/")
    page.keyboard.type("needle")
    expect_count(page, "1 prompts, 2 responses")
    page.keyboard.press("Escape")
    page.keyboard.press("?")
    assert page.locator("#help").get_by_text("the same prompt over steps").is_visible()


def test_buttons_move_between_prompts_and_steps(page: Page, url: str) -> None:
    opened(page, url, "step=1")
    page.get_by_role("button", name="Next ›", exact=True).click()
    page.get_by_text("prompt 2 of 3").wait_for()
    assert page.get_by_role("button", name="Previous step").is_disabled()
    page.get_by_role("button", name="Next step").click()
    page.get_by_text("policy version 16").wait_for()
    assert page.get_by_role("button", name="Next step").is_disabled()


def test_replies_of_a_tool_are_set_apart(page: Page, url: str) -> None:
    opened(page, url, "step=1&row=4&colour=entropy")
    first = responses(page).first
    first.locator(".reply").wait_for()
    assert first.locator(".reply").inner_text().replace("⏎", "").strip() == "tool: 21"
    assert first.locator(".turn").all_text_contents() == ["environment", "policy"]
    assert first.locator(".reply .t").evaluate_all("all => all.every(t => t.className === 't')")
    first.locator(".reply .t").first.hover()
    page.get_by_text("environment's token").wait_for()


def test_a_character_of_several_tokens_is_shown_once(page: Page, url: str) -> None:
    opened(page, url, "step=1&row=4")
    texts = tokens(page, 0).all_text_contents()
    place = texts.index("😀")
    assert texts[place : place + 4] == ["😀", "◂", "◂", "◂"]
    assert "<|end|>" in texts


def test_a_response_that_no_update_used_says_so(page: Page, url: str) -> None:
    opened(page, url, "step=1&row=8")
    page.get_by_text("not trained on").first.wait_for()
    assert "not trained on" in responses(page).nth(1).inner_text()


def test_a_prompt_is_compared_over_steps(page: Page, url: str) -> None:
    opened(page, url, "step=10")
    page.keyboard.press("c")
    page.locator(".step-title").nth(1).wait_for()
    assert page.locator(".step-title").all_inner_texts() == [
        "Step 1 mean reward 0.5 · 4 responses",
        "Step 10 mean reward 0.75 · 4 responses",
    ]
    for lane, num_right in zip(page.locator(".lane").all(), (2, 3), strict=True):
        for response in lane.locator("article").all():
            response.scroll_into_view_if_needed()
            response.get_by_text("<|end|>").wait_for()
        assert "".join(lane.locator(".t").all_text_contents()).count("answer is 42") == num_right
    page.locator(".lane").evaluate_all("lanes => lanes.forEach(lane => { lane.scrollLeft = 0 })")
    page.locator("#content").evaluate("content => { content.scrollTop = 0 }")
    shoot(page, "viewer-steps")
    page.get_by_role("button", name="This step").click()
    page.locator(".step-title").first.wait_for(state="detached")
    assert responses(page).count() == 4


def test_hostile_text_is_shown_as_text(page: Page, url: str) -> None:
    opened(page, url, "step=1&row=8")
    tokens(page, 0).first.wait_for()
    for box in ("#prompt-text .message:first-child .content", "#prompt-text .truth .content"):
        text = page.locator(box).inner_text()
        assert text.startswith("<img src=x onerror=alert(1)><script>document.title='owned'</script>U+202Edne")
        assert {"U+202C", "U+0000", "U+001B", "U+2028"} <= set(re.findall(r"U\+[0-9A-F]{4}", text))
    assert "U+D800" in page.locator("#prompt-text").inner_text()  # a lone surrogate in the prompt
    tokens(page, 0).nth(0).hover()
    page.locator("#tooltip dl").wait_for()
    assert page.title() == "small · rollouts"
    assert page.locator("img, article script, aside script, #prompt script").count() == 0
    hidden = re.compile("[\x00-\x08\x0e-\x1f\u202a-\u202e\u2028\ud800-\udfff]")
    assert not hidden.search(page.locator("body").inner_text())
    assert "".join(tokens(page, 0).all_text_contents()).startswith(HOSTILE.partition("\u202e")[0])


def test_markup_in_a_search_does_nothing(page: Page, url: str) -> None:
    opened(page, url, "step=1&text=" + "%3Cimg%20src%3Dx")
    expect_count(page, "1 prompts, 4 responses")
    assert page.locator("img").count() == 0


def test_the_policy_refuses_scripts_of_others(browser: Browser, url: str) -> None:
    page = opened(browser.new_page(), url)
    refused = page.evaluate(
        """() => new Promise(resolve => {
            document.addEventListener('securitypolicyviolation', event => resolve(event.effectiveDirective));
            const script = document.createElement('script');
            script.src = 'data:text/javascript,document.title="owned"';
            document.body.append(script);
        })"""
    )
    assert (refused, page.title()) == ("script-src-elem", "small · rollouts")
    page.close()


def test_light_and_dark(page: Page, url: str) -> None:
    opened(page, url, "step=1")

    def background() -> str:
        return page.evaluate("getComputedStyle(document.body).backgroundColor")

    light = background()
    page.emulate_media(color_scheme="dark")
    dark = background()
    assert light != dark
    shoot(page, "viewer-dark")
    page.get_by_role("button", name="Light or dark").click()
    assert background() == light


def test_only_prompts_in_sight_are_elements(page: Page, view: View, tmp_path: Path) -> None:
    made = sampled("ok", reward=1.0, advantage=0.0)
    groups = [group(index, prompt(index, f"prompt {index}"), [made] * 2) for index in range(1500)]
    write_step(tmp_path, 1, groups, num_groups=1500)
    opened(page, view(tmp_path))
    expect_count(page, "1,500 prompts, 3,000 responses")
    assert page.locator("#prompts .item").count() < 40
    page.locator("#prompts").evaluate("list => { list.scrollTop = list.scrollHeight }")
    page.get_by_text("prompt 1499", exact=True).click()
    page.get_by_text("prompt 1500 of 1500").wait_for()
    page.wait_for_url(re.compile(r"row=2998$"))


def test_the_list_leaves_out_what_all_prompts_begin_with(page: Page, view: View, tmp_path: Path) -> None:
    made = sampled("ok", reward=1.0, advantage=0.0)
    words = ["lightly", "lemon", "tree"]
    write_step(
        tmp_path, 1, [group(i, prompt(i, f"Spell this word backward: {w}"), [made]) for i, w in enumerate(words)]
    )
    opened(page, view(tmp_path))
    assert excerpts(page) == [f"…{word}" for word in words]


def test_a_long_response_is_loaded_as_it_is_read(page: Page, view: View, tmp_path: Path) -> None:
    text = "".join(f"line {number}\n" for number in range(900))
    write_step(tmp_path, 1, [group(0, prompt(0, "long"), [sampled(text, reward=1.0, advantage=1.0)])])
    url = view(tmp_path)
    opened(page, url)
    tokens(page, 0).nth(511).wait_for(state="attached")
    total = len(text) + 1
    page.get_by_text(re.compile("more tokens")).wait_for()
    for last in (2559, 4607, 6655, total - 1):
        page.locator(".scroller").evaluate("box => { box.scrollTop = box.scrollHeight }")
        tokens(page, 0).nth(last).wait_for(state="attached")
    page.locator(".scroller").evaluate("box => { box.scrollTop = box.scrollHeight }")
    page.get_by_text("<|end|>").wait_for()
    assert page.get_by_text(re.compile("more tokens")).is_hidden()
    opened(page, url, f"token=0.{total - 1}")
    page.get_by_text(f"token {total} of {total}").wait_for()


def test_an_exported_page_needs_no_server(page: Page, run: Path, tmp_path: Path) -> None:
    file = tmp_path / "page.html"
    command = [sys.executable, "-m", "megatron_bapo", "view", str(run), "--export", str(file), "--step", "1"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout == f"{file} shows step 1\n"
    opened(page, file.as_uri())
    expect_count(page, "3 prompts, 12 responses")
    assert (
        "".join(tokens(page, 0).all_text_contents())
        .replace("⏎", "")
        .startswith("Let me add the numbers.\n17 + 25 = 42")
    )
    tokens(page, 1).nth(0).hover()
    page.get_by_text("engine log-prob", exact=True).wait_for()
    page.locator("#text").fill("needle")
    expect_count(page, "1 prompts, 2 responses")
    page.get_by_text("needle in a haystack").first.wait_for()
    page.locator("#prompt-text", has_text="U+D800").wait_for()
    assert page.locator("img").count() == 0
    page.keyboard.press("Escape")
    page.keyboard.press("c")
    page.locator(".step-title").wait_for()
    assert page.locator(".step-title").inner_text() == "Step 1 mean reward 0.25 · 4 responses"
