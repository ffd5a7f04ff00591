"""Names of models on the Hugging Face Hub among paths."""

from __future__ import annotations

import re

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_FOLDERS = ("models", "model", "hf_models", "checkpoints", "checkpoint", "ckpts", "ckpt", "weights", "data", "runs")
"""Common names of folders, which are assumed not to be owners of models on the Hub."""


def is_hub_id(path: str) -> bool:
    """Return whether a path reads like `owner/model`."""
    return _HUB_ID.fullmatch(path) is not None and path.partition("/")[0] not in _FOLDERS
