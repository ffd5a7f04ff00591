"""Rollout batches as Parquet, a file a step: a row for each trajectory, and what all share in the file's metadata.

Columns are the fields of `Prompt` and `Trajectory`; chat messages and extra_info are JSON. `group` counts the batch's
prompts from 0. `advantages`, one for each sampled token like `behaviour_log_probs`, is null where no trainer has seen
the batch; `loss_mask` is null where all response tokens were sampled.

What a checkpoint holds of later batches is written alike. `buffered.parquet` has scored groups, with their prompts'
serial numbers as `group`, and how often each was trained on; `unfinished.parquet` has answers as far as they are known.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from megatron_bapo.errors import UserError
from megatron_bapo.records import (
    BufferedGroup,
    Group,
    HeldRollouts,
    Prompt,
    Trajectory,
    UnfinishedAnswer,
    UnfinishedGroup,
    VersionSpan,
)

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
_GROUP_TYPES = {
    "group": pa.int32(),
    **dict.fromkeys(("prompt_id", "messages", "ground_truth", "data_source", "extra_info"), pa.string()),
}
_SCHEMA = pa.schema({**_GROUP_TYPES, **_TRAJECTORY_TYPES, "advantages": pa.list_(pa.float64())})
_BUFFERED_SCHEMA = pa.schema({**_GROUP_TYPES, **_TRAJECTORY_TYPES, "num_uses": pa.int32()})
_ANSWER_TYPES = {
    name: _TRAJECTORY_TYPES[name]
    for name in ("response_token_ids", "behaviour_log_probs", "version_spans", "finish_reason", "loss_mask", "turns")
}
_UNFINISHED_SCHEMA = pa.schema(
    {"group": pa.int32(), "prompt_id": pa.string(), "turn_ended": pa.bool_(), **_ANSWER_TYPES}
)
BUFFERED, UNFINISHED = "buffered.parquet", "unfinished.parquet"


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
    rows = [row for index, group in enumerate(groups) for row in _rows(index, group)]
    for row, each in zip(rows, advantages or [None] * len(rows), strict=True):
        row["advantages"] = each
    schema = _SCHEMA.with_metadata({_HEADER: json.dumps(asdict(header))})
    path = folder / f"step-{header.step:08d}.parquet"
    partial = path.with_suffix(".partial")
    _write(partial, rows, schema)
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
        table = _read(path, _SCHEMA)
        header = _header(table.schema)
    except (OSError, pa.ArrowException) as error:
        raise _unreadable(path, error) from None
    return header, [group for _, group in _groups(table)]


def write_held(folder: Path, held: HeldRollouts) -> None:
    """Into a checkpoint that is being written; a file that would be empty is left out, and so is a folder."""
    if held.buffered:
        rows = [{**row, "num_uses": e.num_uses} for e in held.buffered for row in _rows(e.serial, e.group)]
        _write(folder / BUFFERED, rows, _BUFFERED_SCHEMA)
    if held.unfinished:
        rows = [
            {"group": group.serial, "prompt_id": group.prompt_id, "turn_ended": answer.turn_ended}
            | _columns(answer, _ANSWER_TYPES)
            for group in held.unfinished
            for answer in group.answers
        ]
        _write(folder / UNFINISHED, rows, _UNFINISHED_SCHEMA)


def read_held(checkpoint: Path) -> HeldRollouts:
    """What `write_held` wrote, bit by bit; nothing where there are no files. Raises UserError for a broken one."""
    buffered, unfinished = checkpoint / BUFFERED, checkpoint / UNFINISHED
    return HeldRollouts(
        _read_buffered(buffered) if buffered.exists() else (),
        _read_unfinished(unfinished) if unfinished.exists() else (),
    )


def _read_buffered(path: Path) -> tuple[BufferedGroup, ...]:
    table = _read_held(path, _BUFFERED_SCHEMA)
    num_uses = dict(zip(table.column("group").to_pylist(), table.column("num_uses").to_pylist(), strict=True))
    return tuple(BufferedGroup(serial, group, num_uses[serial]) for serial, group in _groups(table))


def _read_unfinished(path: Path) -> tuple[UnfinishedGroup, ...]:
    table = _read_held(path, _UNFINISHED_SCHEMA)
    heads = zip(*(table.column(name).to_pylist() for name in _UNFINISHED_SCHEMA.names[:3]), strict=True)
    columns = zip(*(table.column(name) for name in _ANSWER_TYPES), strict=True)
    rows = [
        (serial, prompt_id, UnfinishedAnswer(**_answer(*values), turn_ended=turn_ended))
        for (serial, prompt_id, turn_ended), values in zip(heads, columns, strict=True)
    ]
    return tuple(
        UnfinishedGroup(serial, prompt_id, tuple(answer for *_, answer in members))
        for (serial, prompt_id), members in groupby(rows, key=lambda row: row[:2])
    )


def _read_held(path: Path, schema: pa.Schema) -> pa.Table:
    try:
        return _read(path, schema)
    except (OSError, pa.ArrowException) as error:
        raise UserError(
            f"{path} is not as the checkpoint was written: {error}. Delete it, and what it held is generated anew"
        ) from None


def _write(path: Path, rows: list[dict[str, Any]], schema: pa.Schema) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(rows, schema), path, compression="zstd", write_page_checksum=True)


def _read(path: Path, schema: pa.Schema) -> pa.Table:
    table = pq.read_table(path, page_checksum_verification=True)
    if table.schema != schema:  # metadata is not compared
        raise pa.ArrowInvalid(f"its columns are {', '.join(table.column_names)}")
    return table


def _groups(table: pa.Table) -> list[tuple[int, Group]]:
    """With what the file calls them."""
    columns = (table.column(name) for name in _TRAJECTORY_TYPES)
    trajectories = [_trajectory(*values) for values in zip(*columns, strict=True)]
    rows = zip(table.select([*_GROUP_TYPES]).to_pylist(), trajectories, strict=True)
    groups = []
    for name, members in groupby(rows, key=lambda row: row[0]["group"]):
        found = [*members]
        groups.append((name, Group(_prompt(found[0][0]), tuple(trajectory for _, trajectory in found))))
    return groups


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


def _rows(name: int, group: Group) -> list[dict[str, Any]]:
    shared = {"group": name, **_prompt_columns(group.prompt)}
    return [shared | _columns(trajectory, _TRAJECTORY_TYPES) for trajectory in group.trajectories]


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


def _columns(answer: Trajectory | UnfinishedAnswer, names: Iterable[str]) -> dict[str, Any]:
    columns = {name: getattr(answer, name) for name in names}
    spans = [asdict(span) for span in answer.version_spans]
    return columns | {"version_spans": spans, "turns": json.dumps(answer.turns)}


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
        prompt_token_ids=prompt.values.to_numpy().copy(),
        text=text.as_py(),
        reward=reward.as_py(),
        **_answer(response, log_probs, spans, finish_reason, loss_mask, turns),
    )


def _answer(
    response: pa.ListScalar,
    log_probs: pa.ListScalar,
    spans: pa.ListScalar,
    finish_reason: pa.StringScalar,
    loss_mask: pa.ListScalar,
    turns: pa.StringScalar,
) -> dict[str, Any]:
    return {
        # Copies: what Arrow lends is read-only.
        "response_token_ids": response.values.to_numpy().copy(),
        "behaviour_log_probs": log_probs.values.to_numpy().copy(),
        "version_spans": tuple(VersionSpan(**span) for span in spans.as_py()),
        "finish_reason": finish_reason.as_py(),
        "loss_mask": np.array(loss_mask.as_py(), bool) if loss_mask.is_valid else None,
        "turns": tuple(json.loads(turns.as_py())),
    }
