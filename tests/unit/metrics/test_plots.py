import math
import re
from xml.etree import ElementTree

import numpy as np
import pytest

from megatron_bapo.metrics.plots import MAX_POINTS, PALETTE, Series, curve_figure, extremes

STEPS = [1.0, 2.0, 3.0, 4.0]
CURVE = Series("reward", STEPS, [0.1, 0.2, 0.4, 0.8])
SVG = "{http://www.w3.org/2000/svg}"


def draw(*series: Series, title: str = "Mean reward", **options) -> str:
    return curve_figure(series, title=title, y_label="score", **options)


def texts(svg: str) -> list[str]:
    return ["".join(element.itertext()).strip() for element in ElementTree.fromstring(svg).iter(f"{SVG}text")]


def curves(svg: str) -> list[str]:
    """The paths of the lines in the palette's first colour."""
    elements = ElementTree.fromstring(svg).iter(f"{SVG}path")
    return [
        element.get("d", "") for element in elements if "stroke: #0072b2; stroke-width: 1.8" in element.get("style", "")
    ]


def test_the_same_curves_give_the_same_text():
    assert draw(CURVE) == draw(CURVE)


def test_a_figure_is_one_svg_element_without_metadata():
    svg = draw(CURVE)
    assert ElementTree.fromstring(svg).tag == f"{SVG}svg"
    assert "metadata" not in svg
    assert {"score", "step"} <= set(texts(svg))


def test_a_figure_is_an_image_with_its_title_as_accessible_name():
    root = ElementTree.fromstring(draw(CURVE, title='Rewards "A" & <B>'))
    assert (root.get("role"), root.get("aria-label")) == ("img", 'Rewards "A" & <B>')


def test_figures_that_share_a_page_share_no_id():
    other = Series("entropy", STEPS, [4.0, 3.0, 2.0, 1.0])
    ids = [set(re.findall(r'id="([^"]+)"', draw(series))) for series in (CURVE, other)]
    assert ids[0]
    assert ids[0].isdisjoint(ids[1])


def test_only_several_series_get_a_legend():
    assert "reward" not in texts(draw(CURVE))
    assert {"reward", "entropy"} <= set(texts(draw(CURVE, Series("entropy", STEPS, STEPS))))


@pytest.mark.parametrize("name", [r"a$\foo{$", "_hidden", "日本", "<b>"])
def test_the_legend_has_every_name_as_it_is(name: str):
    assert {name, "reward"} <= set(texts(draw(Series(name, STEPS, STEPS), CURVE)))


def place(svg: str, text: str) -> tuple[float, float]:
    (found,) = (e for e in ElementTree.fromstring(svg).iter(f"{SVG}text") if "".join(e.itertext()).strip() == text)
    x, y = (float(found.get(key, "nan")) for key in "xy")
    return x, y


@pytest.mark.parametrize("stacked", [False, True])
def test_long_names_are_below_one_another_and_leave_the_axes_their_height(stacked: bool):
    short, long = "abcd", [f"an evaluation whose name is as long as a line, number {i}" for i in range(9)]
    one_row, column = (
        draw(*(Series(name, STEPS, STEPS) for name in names), stacked=stacked) for names in (short, long)
    )
    assert len({place(one_row, name)[1] for name in short}) == 1
    assert len({place(column, name)[0] for name in long}) == 1
    height = float(ElementTree.fromstring(column).get("viewBox", "").split()[3])
    assert all(place(column, "step")[1] < place(column, name)[1] < height for name in long)
    assert place(column, "step")[1] > 0.9 * place(one_row, "step")[1]


def test_nan_leaves_a_gap():
    whole, broken = (draw(Series("a", STEPS, y)) for y in ([1, 2, 3, 4], [1, math.nan, 3, 4]))
    assert [curve.count("M") for curve in curves(whole)] == [1]
    assert [curve.count("M") for curve in curves(broken)] == [2]


def markers(svg: str) -> int:
    """The number of points that are marked in the palette's first colour."""
    elements = ElementTree.fromstring(svg).iter(f"{SVG}use")
    return sum("fill: #0072b2" in element.get("style", "") for element in elements)


@pytest.mark.parametrize("log_y", [False, True])
def test_a_point_without_neighbours_is_marked(log_y: bool):
    steps = [float(step) for step in range(60)]
    gap = 0.0 if log_y else math.nan
    sparse = [1.0 + step if step % 2 == 0 or step > 50 else gap for step in steps]
    assert markers(draw(Series("a", steps, sparse), log_y=log_y)) == 25
    assert markers(draw(Series("a", steps, [1.0 + step for step in steps]), log_y=log_y)) == 0
    assert markers(draw(CURVE, log_y=log_y)) == len(STEPS)


def test_the_axis_ends_with_the_last_step_whether_or_not_it_has_a_value():
    steps = [float(step) for step in range(1, 41)]
    diverged = draw(Series("a", steps, [step if step <= 10 else math.nan for step in steps]))
    assert [text for text in texts(diverged) if text.isdigit() and int(text) > 10] == ["12", "18", "24", "30", "36"]
    assert {"6", "36"} <= set(texts(draw(Series("a", steps, [math.nan] * 40))))


def test_a_target_is_named_in_the_legend():
    assert "target 0.4" in texts(draw(CURVE, target=0.4))


def test_a_log_axis_is_labelled_with_plain_numbers():
    labels = texts(draw(Series("gap", STEPS, [1e-4, 1e-3, 1e-2, 1e-1]), log_y=True))
    assert {"0.001", "0.01"} <= set(labels)


def test_a_log_axis_without_positive_values_falls_back_to_a_linear_one():
    assert "0.00" in texts(draw(Series("gap", STEPS, [0.0, 0.0, 0.0, 0.0]), log_y=True))


@pytest.mark.parametrize("name", ["<script>", "a & b"])
def test_names_are_escaped(name: str):
    svg = draw(CURVE, Series(name, STEPS, STEPS))
    assert name not in svg
    assert name in texts(svg)


def test_stacked_series_need_not_have_the_same_steps():
    svg = draw(Series("update", [1, 2], [1, 1]), Series("checkpoint", [2], [math.nan]), stacked=True)
    assert {"update", "checkpoint"} <= set(texts(svg))


def styles(svg: str, colour: str) -> list[str]:
    """The styles of the lines in a colour of the palette."""
    elements = [each for each in ElementTree.fromstring(svg).iter(f"{SVG}path") if "L" in each.get("d", "")]
    return [each.get("style", "") for each in elements if f"stroke: {colour.lower()}; stroke-" in each.get("style", "")]


@pytest.mark.parametrize("log_y", [False, True])
def test_a_curve_over_another_is_striped_where_they_coincide(log_y: bool):
    steps = [float(step) for step in range(1, 41)]
    first = [0.1 + step for step in steps]
    same, half = first, [value if step <= 20 else 2 * value for step, value in zip(steps, first, strict=True)]
    covered, partly = (draw(Series("a", steps, first), Series("b", steps, y), log_y=log_y) for y in (same, half))
    assert ["dasharray" in style for style in styles(covered, PALETTE[0])] == [False, False]  # and in the legend
    assert ["dasharray" in style for style in styles(covered, PALETTE[1])] == [True, False]
    assert ["dasharray" in style for style in styles(partly, PALETTE[1])] == [False, True, False]
    apart = draw(Series("a", steps, first), Series("b", steps, [-1.0 + value / 2 for value in first]))
    assert "dasharray" not in "".join(styles(apart, PALETTE[1]))


def test_of_a_long_curve_the_extremes_of_each_part_are_kept():
    values = np.sin(np.arange(100_000) / 5000)
    values[54_321], values[77_777], values[10_000:10_400] = 9.0, -9.0, np.nan
    places = extremes(values, MAX_POINTS)
    assert len(places) <= MAX_POINTS
    assert {54_321, 77_777} <= set(places.tolist())
    assert (np.diff(places) > 0).all()
    assert np.isnan(values[places]).any()
    assert extremes(values[:MAX_POINTS], MAX_POINTS).tolist() == [*range(MAX_POINTS)]


def test_curves_of_one_colour_have_different_lines():
    names = [f"source {index}" for index in range(2 * len(PALETTE))]
    svg = draw(*(Series(name, STEPS, [step + index for step in STEPS]) for index, name in enumerate(names)))
    for colour in PALETTE:
        solid, dashed, *legend = ("dasharray" in style for style in styles(svg, colour))
        assert (solid, dashed, legend) == (False, True, [False, True])
