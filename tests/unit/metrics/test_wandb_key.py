from pathlib import Path

import pytest

from megatron_bapo.config.logging import WandbConfig
from megatron_bapo.metrics.wandb_key import missing_key

ONLINE = WandbConfig(project="bapo")  # where WANDB_MODE does not say otherwise


@pytest.fixture(autouse=True)
def _home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE", "WANDB_BASE_URL", "WANDB_MODE", "NETRC"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))


def test_sending_metrics_without_a_key_is_warned_of_with_the_ways_out() -> None:
    warning = str(missing_key(ONLINE))
    assert "logging.wandb sends metrics, and this machine has no key for api.wandb.ai" in warning
    for way_out in ("WANDB_API_KEY", "`wandb login`", "logging.wandb.mode=offline"):
        assert way_out in warning


def test_offline_mode_and_a_run_without_wandb_need_no_key() -> None:
    assert missing_key(None) is None
    assert missing_key(WandbConfig(project="bapo", mode="offline")) is None


def test_a_key_in_the_environment_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "k")
    assert missing_key(ONLINE) is None


@pytest.mark.parametrize("name", [".netrc", "_netrc", "elsewhere"])
def test_a_login_in_the_netrc_file_counts(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / name).write_text("machine api.wandb.ai login user password k\n")
    if name == "elsewhere":
        monkeypatch.setenv("NETRC", str(tmp_path / name))
    assert missing_key(ONLINE) is None


def test_a_login_to_another_server_does_not_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / ".netrc").write_text("machine wandb.example.com login user password k\n")
    assert "no key for api.wandb.ai" in str(missing_key(ONLINE))
    monkeypatch.setenv("WANDB_BASE_URL", "https://wandb.example.com")
    assert missing_key(ONLINE) is None


@pytest.mark.parametrize("text", ["machine api.wandb.ai login user\n", "user k\n"])
def test_a_netrc_file_without_a_key_or_with_broken_lines_counts_as_none(text: str, tmp_path: Path) -> None:
    (tmp_path / ".netrc").write_text(text)
    assert missing_key(ONLINE) is not None


@pytest.mark.parametrize("mode", ["offline", "dryrun", "disabled"])
def test_a_mode_in_the_environment_that_sends_nothing_needs_no_key(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", mode)
    assert missing_key(ONLINE) is None
    monkeypatch.setenv("WANDB_MODE", "online")
    assert missing_key(ONLINE) is not None


def test_the_configured_mode_takes_precedence_over_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    warning = str(missing_key(WandbConfig(project="bapo", mode="online")))
    assert "logging.wandb.mode=online takes precedence over WANDB_MODE=offline" in warning
