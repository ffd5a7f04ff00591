import os
import pty
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import typer
from rich.table import Table

from megatron_bapo.cli.app import messages
from megatron_bapo.commands.convert import byte_progress
from megatron_bapo.controller.progress import ProgressDisplay
from megatron_bapo.controller.terminal import activities, terminal
from megatron_bapo.errors import RunError, UserError, exit_code

FOREIGN = "[bold]x [/INST] y"


def test_brackets_are_not_markup_in_lines_tables_and_progress_bars(capsys: pytest.CaptureFixture[str]) -> None:
    console, table = terminal(width=200), Table(FOREIGN, title=FOREIGN)
    table.add_row(FOREIGN)
    console.print(FOREIGN)
    console.print(table)
    with byte_progress(console, FOREIGN, 1):
        pass
    assert capsys.readouterr().out.count(FOREIGN) == 5


def test_an_error_message_is_printed_unchanged(capsys: pytest.CaptureFixture[str]) -> None:
    def fail() -> int:
        raise UserError(FOREIGN)

    assert exit_code(fail) == 2
    assert capsys.readouterr() == ("", f"error: {FOREIGN}\n")


def test_without_a_terminal_each_activity_is_a_line_on_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    with activities() as show:
        show("reading prompts")
        show("reading [runs/1]")
    captured = capsys.readouterr()
    assert captured.err == "reading prompts ...\nreading [runs/1] ...\n"
    assert captured.out == ""


def test_on_a_terminal_a_spinner_shows_the_activity_and_leaves_no_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    with activities() as show:
        show("reading [runs/1]")
    shown = capsys.readouterr().err
    assert "reading [runs/1] ..." in shown
    assert shown.endswith("\x1b[2K")  # the line is erased


@pytest.mark.parametrize("connect", [os.pipe, pty.openpty])
def test_a_display_goes_on_when_its_terminal_or_the_reader_of_its_pipe_is_gone(
    connect: Callable[[], tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERM", "xterm")
    reader, writer = connect()
    with open(writer, "w") as stream:
        monkeypatch.setattr(sys, "stdout", stream)
        with ProgressDisplay(10) as display:
            display.phase("generating")
            os.close(reader)
            display.phase("stopping")
            display.warn("entropy is low")
        terminal().print("Stopped; the state is saved.")
        print("as are plain lines", flush=True)


def test_a_display_whose_log_had_a_full_disk_is_written_again_once_there_is_space(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with open("/dev/full", "w") as stream, (tmp_path / "log").open("w") as log:
        monkeypatch.setattr(sys, "stdout", stream)
        console = terminal()
        for _ in range(3):
            console.print("nobody reads this, " * 1000)
        os.dup2(log.fileno(), stream.fileno())
        console.print("the disk has space again")
    assert (tmp_path / "log").read_text().endswith("the disk has space again\n")


@pytest.mark.parametrize("connect", [os.pipe, pty.openpty])
def test_the_exit_code_is_that_of_the_run_though_nobody_reads_its_message(
    connect: Callable[[], tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    reader, writer = connect()
    os.close(reader)
    with open(writer, "w") as stream:
        monkeypatch.setattr(sys, "stderr", stream)
        with pytest.raises(typer.Exit) as ended, messages():
            raise RunError("an engine died")
    assert ended.value.exit_code == 1
