import json
import shlex
from pathlib import Path

import pytest

from megatron_bapo.config.loading import dump_config
from megatron_bapo.config.schema import Config
from megatron_bapo.controller.launcher import report_end
from megatron_bapo.controller.progress import ProgressDisplay
from megatron_bapo.controller.run_report import accuracies, write_run_report
from megatron_bapo.errors import INTERRUPTED, UserError
from megatron_bapo.metrics.sinks import JsonlSink
from megatron_bapo.run_directory import RunDirectory


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """The directory of a run of two steps and two evaluations, with one sampled response that looks like HTML."""
    run_dir = tmp_path / "reversal"
    directory = RunDirectory(run_dir)
    directory.create()
    config = Config.model_validate(
        {
            "run_dir": run_dir,
            "model": {"create": {}},
            "parallel": {"world_size": 4, "tensor_model_parallel_size": 2},
            "data": {"train": {"path": "train.jsonl"}},
            "trainer": {"total_steps": 5, "train_batch_size": 32, "ppo_mini_batch_size": 8},
        }
    )
    directory.config.write_text(dump_config(config))
    with JsonlSink(directory.metrics) as sink:
        for step, accuracy in ((0, 0.125), (2, 0.875)):
            metrics = {"val/mean@4": accuracy, "val/best@4": 1.0, "val/words/mean@4": 0.5}
            sink.write({"step": step, "phase": "validation", "time_s": 60.0 * step, "metrics": metrics})
        for step in (1, 2):
            metrics = {"critic/score/mean": 0.1 * step, "actor/entropy": 1.0}
            sink.write({"step": step, "phase": "train", "time_s": 90.0 * step, "metrics": metrics})
    with JsonlSink(directory.samples) as sink:
        sink.write(
            {
                "step": 1,
                "prompt": "spell tree",
                "response": "<script>eert</script>",
                "ground_truth": "eert",
                "reward": 1.0,
                "finish_reason": "stop",
            }
        )
    return run_dir


def test_the_report_shows_the_configuration_metrics_and_samples_of_the_run(run_dir):
    path = write_run_report(run_dir)

    html = path.read_text()
    assert path == RunDirectory(run_dir).report
    for expected in (
        "BAPO run reversal",
        "TP 2, PP 1, DP 2; 1 vLLM engine",
        "2 of 5, 4 updates each",
        "built for this run",
        "3.0",
        "12.5",
        "87.5",
        "Held-out accuracy",
        "Mean reward of the sampled responses",
        "&lt;script&gt;eert&lt;/script&gt;",
        "ppo_mini_batch_size: 8",
    ):
        assert expected in html, expected
    assert "<script>" not in html


def test_the_report_names_seed_commits_and_hardware(run_dir):
    starts = [("c0ffee-dirty", "2 CPU cores"), (None, "2 CPU cores"), ("c0ffee-dirty", "8 × GPU")]
    rows = [{"time_s": 1.0, "version": "1.2", "commit": commit, "hardware": where} for commit, where in starts]
    RunDirectory(run_dir).starts.write_text("".join(json.dumps(row) + "\n" for row in rows))

    html = write_run_report(run_dir).read_text()
    for fact in (
        "<dt>seed</dt><dd>0</dd>",
        "<dd>c0ffee-dirty, then version 1.2</dd>",
        "<dd>2 CPU cores, then 8 × GPU</dd>",
    ):
        assert fact in html, fact


def test_a_run_without_samples_still_has_a_report(run_dir):
    RunDirectory(run_dir).samples.unlink()

    assert "Held-out accuracy" in write_run_report(run_dir).read_text()


def test_a_run_without_metric_rows_has_a_report(run_dir):
    RunDirectory(run_dir).metrics.write_text("")

    assert "0 of 5" in write_run_report(run_dir).read_text()


def test_a_folder_without_metrics_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"holds no metrics\.jsonl; give the folder of a run"):
        write_run_report(tmp_path)


def test_accuracy_before_and_after_is_that_of_all_held_out_prompts():
    rows = [
        {"phase": "validation", "metrics": {"val/words/mean@4": 0.9, "val/mean@4": value, "val/score/mean@4": 0.8}}
        for value in (0.1, 0.2, 0.3)
    ]

    assert accuracies([{"phase": "train", "metrics": {"val/mean@4": 1.0}}, *rows]) == (0.1, 0.3)
    assert accuracies([]) == (None, None)


def test_a_stopped_run_names_the_command_that_continues_it_as_a_shell_takes_it(
    run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = RunDirectory(run_dir.rename(run_dir.with_name("run #1")))
    directory.stop_request.touch()
    assert report_end(ProgressDisplay(5), directory, Path("recorded rollouts")) == INTERRUPTED
    command = shlex.split(capsys.readouterr().out.partition(", or: ")[2])
    assert command[-4:] == ["train", str(directory.config), "--rollouts-from", "recorded rollouts"]
