from megatron_bapo.studies.map_figures import Panel, differences_figure, map_figure
from megatron_bapo.studies.statistics import Comparison
from megatron_bapo.studies.table import Cell, StudyTable, write_csv


def test_a_map_says_what_was_not_run_how_many_seeds_there_are_and_what_collapsed(tmp_path):
    cells = [Cell("a", 8, 1, "fast"), Cell("a", 8, 2, "fast"), Cell("a", 1, 1, "slow")]
    rows = [{**cell.columns(), "update": 8, "accuracy": cell.seed / 10} for cell in cells]
    write_csv(tmp_path / "updates.csv", rows)

    figure = map_figure(
        StudyTable(tmp_path / "updates.csv"),
        [Panel("Arm A", "a")],
        ["slow", "fast"],
        [1, 8],
        "accuracy",
        "Map",
        lambda cell: cell.seed == 2,
    )

    (axis,) = figure.axes
    found = {text.get_text(): (round(text.get_position()[0]), round(text.get_position()[1])) for text in axis.texts}
    assert found["0.10"] == (0, 0)  # column of 1 update, row of the variant `slow`
    assert found["1 seed"] == (0, 0)
    assert found["0.15"] == (1, 1)
    assert found["2 seeds\n1 collapsed"] == (1, 1)
    assert [text.get_text() for text in axis.texts].count("not run") == 2


def test_differences_are_drawn_with_their_intervals_and_few_pairs_with_hollow_markers():
    comparisons = [
        Comparison("a", "b", None, None, 6, 0.05, 0.01, 0.09, 0.1),
        Comparison("a", "b", "fast", 8, 2, -0.02, -0.04, 0.0, 0.5),
    ]

    (axis,) = differences_figure(comparisons, {"a": "BAPO", "b": "GRPO"}, "Differences").axes

    assert [text.get_text() for text in axis.get_yticklabels()] == [
        "BAPO − GRPO, all cells (6)",
        "BAPO − GRPO, fast 8 updates (2)",
    ]
    intervals, means = axis.lines[0:4:2], axis.lines[1:4:2]
    assert [list(line.get_xdata()) for line in intervals] == [[0.01, 0.09], [-0.04, 0.0]]
    assert [list(line.get_xdata()) for line in means] == [[0.05], [-0.02]]
    assert means[0].get_markerfacecolor() != means[1].get_markerfacecolor()
