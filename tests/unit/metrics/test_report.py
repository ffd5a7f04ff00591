import math
from html.parser import HTMLParser
from pathlib import Path
from typing import Any, cast

import pytest

from megatron_bapo.metrics.figures import SECTIONS
from megatron_bapo.metrics.report import write_report
from megatron_bapo.metrics.sinks import JsonlSink, MetricsRow, SampleRow, read_rows

TITLES = {figure.title for section in SECTIONS for figure in section.figures}
LOADING_ATTRIBUTES = {"src", "srcset", "href", "xlink:href", "data", "poster", "action"}


class Page(HTMLParser):
    """Elements, their attributes and their text."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self.headings: list[str] = []
        self.feed(html)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.texts.append(data.strip())
        if self.elements and self.elements[-1][0] == "h3" and data.strip():
            self.headings.append(data.strip())


def every_metric(step: int) -> dict[str, float]:
    names = [name for section in SECTIONS for figure in section.figures for name in figure.metrics]
    return {name.replace("*", "x"): 0.1 * step for name in names}


def row(step: int, metrics: dict[str, float], phase: Any = "train") -> MetricsRow:
    return {"step": step, "phase": phase, "time_s": float(step), "metrics": metrics}


def sample(step: int, **changes: Any) -> SampleRow:
    row: SampleRow = {
        "step": step,
        "prompt": "2 + 2 =",
        "response": "4",
        "ground_truth": "4",
        "reward": 1.0,
        "finish_reason": "stop",
    }
    return cast(SampleRow, row | changes)


def page(run_dir: Path, **changes: Any) -> Page:
    content: dict[str, Any] = {
        "title": "Addition",
        "summary": {},
        "rows": [],
        "samples": [],
        "config_yaml": "seed: 0\n",
    }
    return Page(write_report(run_dir, **{**content, **changes}).read_text(encoding="utf-8"))


def test_the_page_loads_nothing(tmp_path: Path):
    rows = [row(step, every_metric(step), phase) for step in (1, 2) for phase in ("warm_start", "train", "validation")]
    report = page(tmp_path, rows=rows, samples=[sample(1)])
    loaded = [
        value
        for _, attributes in report.elements
        for name, value in attributes.items()
        if name in LOADING_ATTRIBUTES and not (value or "").startswith("#")
    ]
    assert loaded == []
    assert {"script", "link", "img", "iframe", "base"}.isdisjoint(tag for tag, _ in report.elements)
    html = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert html.count("url(") == html.count("url(#")
    assert "@import" not in html
    assert "default-src 'none'" in html


def test_every_figure_with_metrics_is_plotted(tmp_path: Path):
    rows = [row(step, every_metric(step), phase) for step in (1, 2) for phase in ("warm_start", "train", "validation")]
    report = page(tmp_path, rows=rows)
    assert set(report.headings) == TITLES
    figures = [attributes for tag, attributes in report.elements if tag == "svg"]
    assert [(each["role"], each["aria-label"]) for each in figures] == [("img", title) for title in report.headings]


def test_a_figure_without_metrics_is_omitted(tmp_path: Path):
    report = page(tmp_path, rows=[row(1, {"critic/score/mean": 0.5, "actor/lr": 1e-4})])
    assert report.headings == ["Mean reward of the sampled responses", "Learning rate"]


def test_a_run_that_diverges_to_nan_shows_it(tmp_path: Path):
    rows = [row(step, {"actor/entropy": 1.1 if step <= 40 else math.nan, "actor/lr": 0.1}) for step in range(1, 101)]
    report = page(tmp_path, rows=rows)
    assert "1.1 → NaN" in report.texts
    assert [text for text in report.texts if text.endswith("No finite value in 60 of 100 steps, the first is 41.")]
    assert not [text for text in report.texts if "schedule" in text and "No finite value" in text]


def test_a_metric_without_any_number_has_a_figure_that_says_so(tmp_path: Path):
    metrics = {"actor/grad_norm": math.nan, "response_length/mean": 4.0, "response_length/positive": math.nan}
    rows = [row(step, metrics) for step in (1, 2)]
    report = page(tmp_path, rows=rows)
    assert report.headings == ["Response length", "Gradient norm before clipping"]
    assert "NaN → NaN" in report.texts
    assert [text for text in report.texts if text.endswith("No finite value in 2 of 2 steps, the first is 1.")]
    assert "mean, A > 0" not in report.texts


def test_markup_in_a_runs_texts_is_escaped(tmp_path: Path):
    evil = "<script>alert('x')</script>"
    report = page(
        tmp_path,
        title=evil,
        summary={"model": evil},
        samples=[sample(1, response=evil, prompt=evil, ground_truth=evil)],
        rows=[row(1, {f"val/{evil}": 0.5}, "validation"), row(2, {f"val/{evil}": 0.5, "val/other": 0.5}, "validation")],
        config_yaml=f"model: {evil}\n",
    )
    assert "script" not in {tag for tag, _ in report.elements}
    # Page title, heading, fact, prompt, response and legend.
    assert report.texts.count(evil) == 6
    assert f"expected {evil}" in report.texts
    assert f"model: {evil}" in report.texts


def test_the_headline_compares_accuracy_before_and_after(tmp_path: Path):
    report = page(tmp_path, summary={"accuracy_before": 0.125, "accuracy_after": 0.75, "num_steps": 60})
    assert {"12.5%", "75.0%", "+62.5 percentage points", "num steps", "60"} <= set(report.texts)


def test_an_accuracy_that_was_not_measured_is_a_dash(tmp_path: Path):
    report = page(tmp_path, summary={"accuracy_before": 0.125, "accuracy_after": None})
    assert {"12.5%", "–"} <= set(report.texts)


def test_samples_of_the_first_and_the_last_step_are_shown(tmp_path: Path):
    samples = [sample(step, response=f"answer {step}") for step in (1, 2, 3)]
    report = page(tmp_path, samples=samples)
    assert report.headings == ["Step 1", "Step 3"]
    assert {"answer 1", "answer 3"} <= set(report.texts)
    assert "answer 2" not in report.texts


def test_a_sample_that_an_earlier_version_wrote_is_shown(tmp_path: Path):
    row: dict[str, Any] = {**sample(1)}
    row["answer"] = row.pop("response") + " o'clock"
    assert "4 o'clock" in page(tmp_path, samples=[row]).texts


def test_a_truncated_or_unscored_sample_is_marked(tmp_path: Path):
    report = page(tmp_path, samples=[sample(1, reward=None, finish_reason="length")])
    assert {"reward –", "cut at the length limit"} <= set(report.texts)


def test_a_response_with_an_unpaired_surrogate_does_not_stop_the_report(tmp_path: Path):
    assert "4 ?" in page(tmp_path, samples=[sample(1, response="4 \ud800")]).texts


def test_the_size_of_the_page_does_not_grow_with_the_number_of_steps(tmp_path: Path):
    names = ("actor/entropy", "timing_s/update", "timing_s/generate")
    sizes = []
    for num_steps in (600, 6000):
        rows = [row(step, dict.fromkeys(names, float(step % 7))) for step in range(1, num_steps + 1)]
        page(tmp_path, rows=rows)
        sizes.append((tmp_path / "report.html").stat().st_size)
    assert sizes[1] < 1.5 * sizes[0]


def test_scores_are_not_on_the_axis_of_accuracies(tmp_path: Path):
    report = page(tmp_path, rows=[row(1, {"val/mean@4": 0.25, "val/score/mean@4": 3.5}, "validation")])
    assert report.headings == ["Held-out accuracy", "Held-out score"]
    assert {"0.25 → 0.25", "3.5 → 3.5"} <= set(report.texts)


@pytest.mark.parametrize("measure", ["share", "ratio"])
def test_the_target_line_is_a_share_for_either_target_measure(tmp_path: Path, measure: str):
    bounds = f"{{positive_contribution_target: 0.4, target_measure: {measure}}}"
    report = page(
        tmp_path,
        rows=[row(1, {"actor/bapo_positive_share": 0.3})],
        config_yaml=f"algorithm:\n  clip_bounds: {bounds}\n",
    )
    assert "target 0.4" in report.texts


def test_the_total_of_a_step_is_not_stacked_on_its_parts(tmp_path: Path):
    report = page(tmp_path, rows=[row(1, {"timing_s/step": 9.0, "timing_s/generate": 5.0, "timing_s/update": 4.0})])
    assert {"generate", "update"} <= set(report.texts)
    assert report.texts.count("step") == 1


def test_many_small_phases_are_summed_up(tmp_path: Path):
    phases = {f"timing_s/phase_{index}": 10.0 - index for index in range(9)}
    report = page(tmp_path, rows=[row(1, phases)])
    assert {"phase_0", "phase_5", "other"} <= set(report.texts)
    assert "phase_6" not in report.texts


@pytest.mark.slow
def test_rows_from_disk_make_the_same_page_twice(tmp_path: Path):
    with JsonlSink(tmp_path / "metrics.jsonl") as sink:
        for step in (1, 2):
            sink.write(row(step, {**every_metric(step), "actor/ppo_kl": math.nan}))
    rows = read_rows(tmp_path / "metrics.jsonl")
    page(tmp_path, rows=rows)
    first = (tmp_path / "report.html").read_bytes()
    page(tmp_path, rows=rows)
    assert (tmp_path / "report.html").read_bytes() == first
    assert sorted(path.name for path in tmp_path.iterdir()) == ["metrics.jsonl", "report.html"]


@pytest.mark.parametrize(
    ("outcomes", "shares", "seen"),
    [
        (
            [(1.0, 0.0, 0.0, 0.0), (0.25, 0.5, 0.25, 0.0), (0.25, 0.75, 0.0, 0.0)],
            [0.45, 0.38, 0.37],
            "Here they moved in 50% of the updates.",
        ),
        (
            [(1.0, 0.0, 0.0, 0.0), (0.7, 0.0, 0.0, 0.3)],  # 1 - 0.7 - 0.3 is 5.6e-17
            [0.5, 0.4],
            "Here they did not move: the positive share, 0.45 on average, was above",
        ),
    ],
)
def test_the_page_says_whether_the_clip_bounds_moved(
    tmp_path: Path, outcomes: list[tuple[float, ...]], shares: list[float], seen: str
):
    names = [f"actor/bapo_outcome/{name}" for name in ("start", "interior", "end", "no_signal")]
    bounds = {"actor/bapo_clip_high": 1.2, "actor/bapo_clip_low": 0.6}
    rows = [
        row(step, bounds | dict(zip(names, each, strict=True)) | {"actor/bapo_initial_positive_share": share})
        for step, (each, share) in enumerate(zip(outcomes, shares, strict=True), 1)
    ]
    assert sum(seen in text for text in page(tmp_path, rows=rows).texts) == 1
    fixed = [row(1, {"actor/bapo_clip_high": 1.2, "actor/bapo_clip_low": 0.6})]
    assert not any("Here they" in text for text in page(tmp_path, rows=fixed).texts)
