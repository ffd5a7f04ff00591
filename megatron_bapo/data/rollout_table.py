"""A short table of one step's sampled rollouts, for the pages of other programs: a row for each response."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any, Final

import pyarrow.parquet as pq

from megatron_bapo.data.rollout_samples import read_sample_header
from megatron_bapo.text import visible

MAX_ROWS, MAX_TEXT = 128, 4000
"""Largest numbers of responses, and of characters of a text."""
COLUMNS: Final = (
    *("step", "group", "sample", "prompt_id", "prompt", "response", "ground_truth", "reward", "advantage", "length"),
    *("finish_reason", "policy_versions", "clipped_share"),
)
"""`advantage` is the mean over the sampled tokens, `length` counts tokens, and `clipped_share` is the fraction of the
sampled tokens that the loss clipped, null if no update used the response."""
_READ = (
    *("group", "response", "prompt_id", "messages", "text", "ground_truth", "reward", "mean_advantage", "num_tokens"),
    *("num_sampled", "finish_reason", "version_spans", "update", "num_upper", "num_lower", "num_dual"),
)


def rollout_table(path: Path) -> list[list[Any]]:
    """Return rows with `COLUMNS`. A step with more than `MAX_ROWS` responses gives the first ones of every group."""
    with pq.ParquetFile(path) as file:
        step = read_sample_header(file).step
        found = file.read(columns=list(_READ)).to_pylist()
    chosen = sorted(found, key=lambda row: (row["response"], row["group"]))[:MAX_ROWS]
    return [_row(step, row) for row in sorted(chosen, key=lambda row: (row["group"], row["response"]))]


def _row(step: int, found: dict[str, Any]) -> list[Any]:
    versions = [span["policy_version"] for span in found["version_spans"]]
    clipped = None
    if found["update"] and found["num_sampled"]:
        clipped = sum(found[name] for name in ("num_upper", "num_lower", "num_dual")) / found["num_sampled"]
    return [
        *(step, found["group"], found["response"], visible(found["prompt_id"], MAX_TEXT)),
        *(visible(text, MAX_TEXT) for text in (_prompt(found["messages"]), found["text"], found["ground_truth"])),
        *(_number(found["reward"]), _number(found["mean_advantage"]), found["num_tokens"], found["finish_reason"]),
        *("-".join(map(str, sorted({min(versions), max(versions)}))) if versions else "", clipped),
    ]


def _prompt(messages: str) -> str:
    """Return the chat messages, each after its role; the content of a single one alone."""
    found = json.loads(messages)
    if len(found) == 1:
        return str(found[0]["content"])
    return "\n\n".join(f"{message['role']}: {message['content']}" for message in found)


def _number(value: float | None) -> float | None:
    return None if value is None or not math.isfinite(value) else value
