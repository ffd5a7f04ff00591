import io
import re

import pytest

from megatron_bapo.controller.terminal import terminal
from megatron_bapo.planning.plan import Plan
from megatron_bapo.planning.rendering import print_plan, print_search
from megatron_bapo.planning.search import search
from tests.unit.planning.examples import recipe


def printed(width: int, show, *arguments: object) -> str:
    console = terminal(width=width)
    console.file = io.StringIO()
    show(console, *arguments)
    return console.file.getvalue()


def search_rows(text: str) -> list[str]:
    """The rows of the table of layouts that begin a layout."""
    return re.findall(r"^ {2,}[\d,]+ {2,}.*$", text, re.MULTILINE)


@pytest.fixture(scope="module")
def large() -> tuple[Plan, list[Plan]]:
    plan = recipe("qwen2.5-32b_64gpus")
    return plan, search(plan, 64)


@pytest.mark.slow
@pytest.mark.parametrize("width", [40, 60, 80, 200])
def test_numbers_of_a_search_are_whole_at_every_width(large: tuple[Plan, list[Plan]], width: int) -> None:
    plan, found = large
    text = printed(width, print_search, plan, found, 64, [])
    rows = search_rows(text)
    assert "…" not in text
    assert len(rows) == 8
    for row, layout in zip(rows, found, strict=False):
        numbers = row.split()
        rollout = layout.config.rollout
        assert numbers[:2] == [f"{layout.time.total:,.0f}", f"{layout.time.training:,.0f}"]
        assert numbers[4] == f"{layout.config.trainer.max_tokens_per_gpu:,}"
        assert row.rstrip().endswith(f"{rollout.num_engines} x {rollout.ranks_per_engine}")


@pytest.mark.parametrize("width", [60, 80, 200])
def test_a_table_of_layouts_fits_the_width_and_shows_whole_layouts(large: tuple[Plan, list[Plan]], width: int) -> None:
    plan, found = large
    text = printed(width, print_search, plan, found, 64, [])
    table = text[: text.index("overrides for")]
    assert max(map(len, table.splitlines())) <= width
    assert ("TP8 DP8 offload" in table) == (width > 60)


def test_a_search_explains_its_order(large: tuple[Plan, list[Plan]]) -> None:
    plan, found = large
    text = printed(200, print_search, plan, found, 64, [])
    assert "Layouts within 2% of the best step time come first, ordered by free memory" in text


@pytest.mark.parametrize("width", [30, 60, 80, 120])
def test_stages_that_do_not_fit_the_width_continue_in_further_tables(width: int) -> None:
    plan = recipe("qwen2.5-32b_64gpus", "parallel.pipeline_model_parallel_size=16")
    text = printed(width, print_plan, plan, "here", [])
    headings = re.findall(r"^ +stage  ([\d* ]+)$", text, re.MULTILINE)
    assert "…" not in text
    assert [int(stage.strip("*")) for stage in " ".join(headings).split()] == [*range(16)]
    assert text.count("output layer ") == len(headings) == {30: 16, 60: 6, 80: 3, 120: 2}[width]


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (("rollout.sleep_level=1",), "the adapters alone, 77.0 MiB at each weight update"),
        (
            (),
            "merged, 14,525.6 MiB at each weight update, because of rollout.sleep_level=2, which discards the weights",
        ),
        (("weight_sync.lora=merged",), "all weights with the adapters merged, 14,525.6 MiB at each weight update"),
    ],
)
def test_a_plan_with_adapters_says_what_a_weight_update_sends_and_why(overrides: tuple, expected: str) -> None:
    text = printed(200, print_plan, recipe("qwen2.5-7b_8gpus", "model.lora.rank=16", *overrides), "here", [])
    assert expected in text
    assert ("because of" in text, "set sleep_level=1" in text) == ((True, True) if not overrides else (False, False))
