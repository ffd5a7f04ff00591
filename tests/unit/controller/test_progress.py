import io
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from megatron_bapo.controller.progress import ProgressDisplay, sparkline

METRICS = {
    "critic/score/mean": 0.5,
    "actor/entropy": 1.25,
    "actor/bapo_positive_share": 0.4,
    "actor/grad_norm": 0.75,
    "actor/bapo_clip_low": 0.6,
    "actor/bapo_clip_high": 1.2,
    "perf/throughput": 1234.5,
}


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def row(step: int, phase: str = "train", metrics: Mapping[str, float | None] = METRICS) -> dict[str, Any]:
    return {"step": step, "phase": phase, "time_s": 60.0 * step, "metrics": metrics}


def plain_display(total_steps: int = 10) -> tuple[ProgressDisplay, io.StringIO]:
    file = io.StringIO()
    return ProgressDisplay(total_steps, num_warm_start_steps=5, console=Console(file=file, width=40)), file


def test_a_warning_is_printed_once_for_each_subject():
    display, file = plain_display()
    for message in ("a is 2, too much", "a is 3, too much", "b is 4, too much"):
        display.warn(message)
    assert file.getvalue().splitlines() == ["warning: a is 2, too much", "warning: b is 4, too much"]


def test_without_a_terminal_every_step_is_one_plain_line():
    display, file = plain_display()
    with display:
        display.update(row(1))
        display.update(row(2))
    fields = "reward 0.500  entropy 1.250  positive share 0.40  grad norm 0.75  clip [0.60, 1.20]  tokens/s 1,234"
    assert file.getvalue().splitlines() == [f"step 1/10  {fields}", f"step 2/10  {fields}  8 min 00 s left"]


def test_forced_colours_do_not_make_a_log_file_a_terminal(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    display, file = plain_display()
    with display:
        display.phase("starting engines")
        display.update(row(1))
    assert "\x1b" not in file.getvalue()


def test_without_a_terminal_an_activity_is_printed_once():
    display, file = plain_display()
    with display:
        for step in (1, 2):
            display.phase("generating responses")
            display.update(row(step))
    assert file.getvalue().splitlines().count("generating responses") == 1


def test_the_warm_start_shows_its_loss():
    display, file = plain_display()
    with display:
        display.update(row(1, "warm_start", {"actor/loss": 2.5}))
    assert file.getvalue() == "warm start 1/5  loss 2.500\n"


def test_the_pace_of_the_warm_start_does_not_predict_training():
    display, file = plain_display()
    with display:
        for step in (1, 2):
            display.update(row(step, "warm_start", {"actor/loss": 2.5}))
        display.update(row(3))
    assert "left" not in file.getvalue().splitlines()[-1]


def test_the_pace_before_a_restart_does_not_predict_the_steps_after_it():
    display, file = plain_display()
    with display:
        for step in (8, 9, 3, 4):
            display.update({**row(step), "time_s": 1000.0 * (step > 4) + step})
    assert [line.rpartition("  ")[2] for line in file.getvalue().splitlines() if "left" in line] == [
        "1 s left",
        "6 s left",
    ]


def test_missing_metrics_are_left_out():
    display, file = plain_display()
    with display:
        display.update(row(1, metrics={"critic/score/mean": None, "actor/entropy": 1.0}))
    assert file.getvalue() == "step 1/10  entropy 1.000\n"


def test_validation_names_its_step():
    display, file = plain_display()
    with display:
        display.update(row(0, "validation", {"val/chain_sum/mean@4": 0.125}))
    assert file.getvalue() == "validation at step 0  chain_sum/mean@4 0.125\n"


def test_a_terminal_shows_activity_bar_metrics_and_reward_history():
    file = Terminal()
    with ProgressDisplay(10, console=Console(file=file, width=100, force_terminal=True)) as display:
        display.phase("generating [bold]responses")
        for step in (1, 2):
            display.update(row(step, metrics={**METRICS, "critic/score/mean": 0.1 * step}))
        display.update(row(2, "validation", {"val/chain_sum/mean@4": 0.125}))
    last_frame = file.getvalue()
    for text in (
        "generating [bold]responses",
        "step 2/10",
        "━",
        "8 min 00 s left",
        "[0.60, 1.20]",
        "▁█",
        "mean@4 0.125",
    ):
        assert text in last_frame


@pytest.mark.parametrize("terminal", [False, True])
def test_the_summary_names_accuracy_time_and_files(terminal: bool):
    file = Terminal() if terminal else io.StringIO()
    with ProgressDisplay(10, console=Console(file=file, width=60, color_system=None)) as display:
        display.final_summary(
            accuracy_before=0.125, accuracy_after=None, seconds=3725, paths={"report": Path("runs/a/report.html")}
        )
    for text in ("12.5% → not measured", "1 h 02 min", "runs/a/report.html"):
        assert text in file.getvalue()


def test_a_terminal_without_unicode_gets_ascii():
    raw = io.BytesIO()

    class AsciiTerminal(io.TextIOWrapper):
        def isatty(self) -> bool:
            return True

    file = AsciiTerminal(raw, encoding="ascii")
    with ProgressDisplay(10, console=Console(file=file, width=60, color_system=None)) as display:
        display.update(row(1))
        display.update(row(2))
        display.final_summary(accuracy_before=0.1, accuracy_after=0.2, seconds=1, paths={})
    file.flush()
    assert b"10.0% -> 20.0%" in raw.getvalue()


def test_a_sparkline_runs_from_the_lowest_to_the_highest_value():
    assert sparkline([0.0, 1.0, 2.0, 7.0], 8) == "▁▂▃█"
    assert sparkline([float(value // 2) for value in range(16)], 8) == "▁▂▃▄▅▆▇█"
    assert sparkline([3.0, 3.0], 8) == "▁▁"


def test_importing_the_display_starts_neither_ray_nor_torch():
    code = "import sys, megatron_bapo.controller.progress; print(sorted({'ray', 'torch'} & set(sys.modules)))"
    with os.popen(f'{sys.executable} -c "{code}"') as output:
        assert output.read() == "[]\n"
