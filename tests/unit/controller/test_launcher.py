import os
import signal
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest

from megatron_bapo.config.schema import Config
from megatron_bapo.controller import launcher


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Exit codes that other nodes get from a run without processes and checks, which gets two signals at once."""

    @contextmanager
    def joined(*_: object):
        yield None

    def planes(*_: object) -> None:
        for _number in range(2):
            os.kill(os.getpid(), signal.SIGUSR1)

    codes: list[int] = []
    monkeypatch.setattr(launcher, "checked_prompts", lambda *_, **__: SimpleNamespace(notes=[]))
    monkeypatch.setattr(launcher, "prepare", lambda *_: None)
    monkeypatch.setattr(launcher, "joined_cluster", joined)
    monkeypatch.setattr(launcher, "tell_nodes", codes.append)
    monkeypatch.setattr(launcher, "_run_planes", planes)
    return codes


def test_a_run_that_a_second_signal_ends_has_another_exit_code_than_one_that_has_saved(
    told: list[int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = Config.model_validate(
        {
            "run_dir": tmp_path,
            "model": {"create": {}},
            "data": {"train": {"path": "none"}},
            "trainer": {"total_steps": 1, "train_batch_size": 8, "ppo_mini_batch_size": 8},
        }
    )
    assert launcher.run_training(config, num_nodes=2) == 131
    assert told == [131]
    assert "stopped at once; the same command continues from the last complete checkpoint" in capsys.readouterr().err
