"""Check that wandb will find an API key for its server, without importing wandb, which takes a second."""

from __future__ import annotations

import netrc
import os
from pathlib import Path
from urllib.parse import urlsplit

from megatron_bapo.config.logging import WandbConfig

_SERVER = "https://api.wandb.ai"
_SENDING = ("online", "run", "shared")
"""Modes of wandb that need its server; it has more modes than logging.wandb.mode."""
_VARIABLES = ("WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE")


def missing_key(settings: WandbConfig | None) -> str | None:
    """Return a warning if metrics are to be sent and no key is on this machine.

    Keys are looked for where wandb 0.30 does (wandb/sdk/lib/wbauth): in environment variables and the netrc file.
    """
    if settings is None or _mode(settings) not in _SENDING or any(os.environ.get(name) for name in _VARIABLES):
        return None
    host = urlsplit(os.environ.get("WANDB_BASE_URL") or _SERVER).netloc
    if _has_netrc_entry(host):
        return None
    ignored = os.environ.get("WANDB_MODE") if settings.mode is not None else None
    mode = f"; logging.wandb.mode={settings.mode} takes precedence over WANDB_MODE={ignored}" if ignored else ""
    return (
        f"logging.wandb sends metrics, and this machine has no key for {host}{mode}. The run would end as it starts: "
        "set WANDB_API_KEY, run `wandb login` where trainer rank 0 runs, or set logging.wandb.mode=offline"
    )


def _mode(settings: WandbConfig) -> str:
    return settings.mode or os.environ.get("WANDB_MODE") or "online"


def _has_netrc_entry(host: str) -> bool:
    given = os.environ.get("NETRC")
    files = [Path(given).expanduser()] if given else [Path.home() / ".netrc", Path.home() / "_netrc"]
    file = next((file for file in files if file.exists()), None)
    if file is None:
        return False
    try:
        entry = netrc.netrc(file).authenticators(host)
    except (netrc.NetrcParseError, OSError):
        return False
    return entry is not None and bool(entry[2])  # login, account, password
