"""Rollout batches as Parquet, a file a step: a row for each trajectory, and what all share in the file's metadata.

Columns are the fields of `Prompt` and `Trajectory`; chat messages and extra_info are JSON. `group` counts the batch's
prompts from 0. `advantages`, one for each sampled token like `behaviour_log_probs`, is null where no trainer has seen
the batch; `loss_mask` is null where all response tokens were sampled.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from megatron_bapo.errors import UserError
from megatron_bapo.records import Group, Prompt, Trajectory, VersionSpan

_HEADER = b"megatron_bapo.rollouts"
_TRAJECTORY_TYPES = {
    "prompt_token_ids": pa.list_(pa.int32()),
    "response_token_ids": pa.list_(pa.int32()),
    "behaviour_log_probs": pa.list_(pa.float32()),
    "version_spans": pa.list_(pa.struct({"policy_version": pa.int64(), "num_tokens": pa.int64()})),
    "finish_reason": pa.string(),
    "text": pa.string(),
    "reward": pa.float64(),
    "loss_mask": pa.list_(pa.bool_()),
    "turns": pa.string(),
}
_SCHEMA = pa.schema(
    {
        "group": pa.int32(),
        **dict.fromkeys(("prompt_id", "messages", "ground_truth", "data_source", "extra_info"), pa.string()),
        **_TRAJECTORY_TYPES,
        "advantages": pa.list_(pa.float64()),
    }
)


@dataclass(frozen=True)
class RolloutHeader:
    """What a file says of its batch as a whole."""

    step: int
    """1 is the run's first."""
    policy_version: int
    """Of the trainer's weights when it took the batch; 0 is the initial model."""
    num_groups: int
    n: int
    """Trajectories of each group."""
    vocab_size: int
    """Tokens of the tokenizer."""
    num_reward_timeouts: int
    data_state: dict[str, Any] = field(default_factory=dict)
    """Where generation continues after this batch, in a run without a trainer, whose checkpoints hold it otherwise."""


def write_rollouts(
    folder: Path, header: RolloutHeader, groups: Sequence[Group], advantages: Sequence[np.ndarray] | None
) -> None:
    """Write `folder/step-00000012.parquet` as a whole or not at all.

    `advantages` [S] are of all trajectories, group by group.
    """
    rows = [
        {"group": index, **_prompt_columns(group.prompt), **_trajectory_columns(trajectory)}
        for index, group in enumerate(groups)
        for trajectory in group.trajectories
    ]
    for row, each in zip(rows, advantages or [None] * len(rows), strict=True):
        row["advantages"] = each
    schema = _SCHEMA.with_metadata({_HEADER: json.dumps(asdict(header))})
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"step-{header.step:08d}.parquet"
    partial = path.with_suffix(".partial")
    pq.write_table(pa.Table.from_pylist(rows, schema), partial, compression="zstd", write_page_checksum=True)
    partial.replace(path)


def rollout_files(folder: Path) -> dict[int, Path]:
    """By step, in order; none where the folder is missing."""
    return {int(path.stem.removeprefix("step-")): path for path in sorted(folder.glob(f"step-{'[0-9]' * 8}.parquet"))}


def remove_rollouts_after(folder: Path, step: int) -> None:
    """Drop those of the steps that a resumed run takes again."""
    for found, path in rollout_files(folder).items():
        if found > step:
            path.unlink()


def read_header(path: Path) -> RolloutHeader:
    """Raises UserError for a file that is broken or of another kind."""
    try:
        return _header(pq.read_schema(path))
    except (OSError, pa.ArrowException) as error:
        raise _unreadable(path, error) from None


def read_rollouts(path: Path) -> tuple[RolloutHeader, list[Group]]:
    """A batch as it was written, bit by bit; raises UserError for a file that is broken or of another kind."""
    try:
        table = pq.read_table(path, page_checksum_verification=True)
        header = _header(table.schema)
    except (OSError, pa.ArrowException) as error:
        raise _unreadable(path, error) from None
    if table.schema != _SCHEMA:  # metadata is not compared
        raise _unreadable(path, f"its columns are {', '.join(table.column_names)}")
    columns = {name: table.column(name) for name in _TRAJECTORY_TYPES}
    trajectories = [_trajectory(*values) for values in zip(*columns.values(), strict=True)]
    rows = zip(table.select(_SCHEMA.names[:6]).to_pylist(), trajectories, strict=True)
    groups = []
    for _, members in groupby(rows, key=lambda row: row[0]["group"]):
        found = [*members]
        groups.append(Group(_prompt(found[0][0]), tuple(trajectory for _, trajectory in found)))
    return header, groups


def _header(schema: pa.Schema) -> RolloutHeader:
    try:
        return RolloutHeader(**json.loads((schema.metadata or {})[_HEADER]))
    except (KeyError, TypeError, ValueError):
        raise pa.ArrowInvalid("its metadata name no rollout batch") from None


def _unreadable(path: Path, reason: object) -> UserError:
    return UserError(
        f"{path} is no whole file of rollouts: {reason}. Give a folder that logging.dump_rollouts=true or "
        "train --rollout-only has written; a broken file must be written anew"
    )


def _prompt_columns(prompt: Prompt) -> dict[str, Any]:
    return {
        "prompt_id": prompt.prompt_id,
        "messages": json.dumps(prompt.messages),
        "ground_truth": prompt.ground_truth,
        "data_source": prompt.data_source,
        "extra_info": json.dumps(prompt.extra_info),
    }


def _prompt(row: dict[str, Any]) -> Prompt:
    return Prompt(
        prompt_id=row["prompt_id"],
        messages=tuple(json.loads(row["messages"])),
        ground_truth=row["ground_truth"],
        data_source=row["data_source"],
        extra_info=json.loads(row["extra_info"]),
    )


def _trajectory_columns(trajectory: Trajectory) -> dict[str, Any]:
    columns = {name: getattr(trajectory, name) for name in _TRAJECTORY_TYPES}
    spans = [asdict(span) for span in trajectory.version_spans]
    return columns | {"version_spans": spans, "turns": json.dumps(trajectory.turns)}


def _trajectory(
    prompt: pa.ListScalar,
    response: pa.ListScalar,
    log_probs: pa.ListScalar,
    spans: pa.ListScalar,
    finish_reason: pa.StringScalar,
    text: pa.StringScalar,
    reward: pa.DoubleScalar,
    loss_mask: pa.ListScalar,
    turns: pa.StringScalar,
) -> Trajectory:
    return Trajectory(
        # Copies: what Arrow lends is read-only.
        prompt_token_ids=prompt.values.to_numpy().copy(),
        response_token_ids=response.values.to_numpy().copy(),
        behaviour_log_probs=log_probs.values.to_numpy().copy(),
        version_spans=tuple(VersionSpan(**span) for span in spans.as_py()),
        finish_reason=finish_reason.as_py(),
        text=text.as_py(),
        reward=reward.as_py(),
        loss_mask=np.array(loss_mask.as_py(), bool) if loss_mask.is_valid else None,
        turns=tuple(json.loads(turns.as_py())),
    )
