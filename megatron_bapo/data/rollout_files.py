"""Rollout batches as Parquet, one file per step with a row for each trajectory and a header in the file's metadata.

Columns are the fields of `Prompt` and `Trajectory`; chat messages and extra_info are JSON. `group` numbers the batch's
prompts from 0. `advantages`, one for each sampled token like `behaviour_log_probs`, is null if no trainer has used the
batch; `loss_mask` is null if all response tokens were sampled. `routes` exists only in batches with routes; it has the
bytes of the array, whose shape but for the number of tokens is in the header. `teacher_log_probs` exists only in
batches that the teacher's engines have scored, and `kept_tokens` only in those of `algorithm.keep_sampling_mask`.

The in-flight state of checkpoints of earlier versions has the same format. `buffered.parquet` has scored groups, with
their prompts' serial numbers as `group`, and how often each was trained on; `unfinished.parquet` has partial responses.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import count, groupby
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from megatron_bapo.errors import UserError
from megatron_bapo.records import (
    BufferedGroup,
    Group,
    InFlightState,
    Prompt,
    Trajectory,
    UnfinishedGroup,
    UnfinishedTrajectory,
    VersionSpan,
)
from megatron_bapo.text import without_lone_surrogates

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
_ROUTES, _TEACHER, _KEPT = "routes", "teacher_log_probs", "kept_tokens"
_BUFFERED_SCHEMA = pa.schema({**_GROUP_TYPES, **_TRAJECTORY_TYPES, "num_uses": pa.int32()})
_PARTIAL_TYPES = {
    name: _TRAJECTORY_TYPES[name]
    for name in ("response_token_ids", "behaviour_log_probs", "version_spans", "finish_reason", "loss_mask", "turns")
}
_UNFINISHED_SCHEMA = pa.schema(
    {"group": pa.int32(), "prompt_id": pa.string(), "turn_ended": pa.bool_(), **_PARTIAL_TYPES}
)
BUFFERED, UNFINISHED = "buffered.parquet", "unfinished.parquet"


@dataclass(frozen=True)
class RolloutHeader:
    """Metadata of a batch file."""

    step: int
    """Step of the run, starting at 1. Of held-out responses it is the step before the evaluation, or 0."""
    policy_version: int
    """Version of the trainer's weights when it took the batch; 0 is the initial model, also without a trainer."""
    num_groups: int
    n: int
    """Trajectories per group."""
    vocab_size: int
    """Number of tokens in the tokenizer's vocabulary."""
    num_reward_timeouts: int
    data_state: dict[str, Any] = field(default_factory=dict)
    """State from which a rollout-only run continues generation; other runs keep it in their checkpoints."""
    sampling: dict[str, float] = field(default_factory=dict)
    """Temperature, top_p, top_k and min_p that the batch was sampled with; empty in files of earlier versions."""
    route_shape: tuple[int, ...] = ()
    """Layers with experts, experts of a token and bytes of an expert's number; empty for a batch without routes."""
    teacher: str = ""
    """Folder of the teacher whose log-probs the batch has; empty for a batch without."""
    has_kept_tokens: bool = False
    """Whether the batch has the tokens that each token was sampled from."""
    longest_prompt: int = 0
    """Tokens of the longest prompt; 0 in files of earlier versions and of held-out responses."""
    longest_response: int = 0
    """Tokens of the longest response, likewise."""

    @property
    def has_trainer(self) -> bool:
        """True if a trainer took the batch, False for `train --rollout-only`."""
        return not self.data_state


def write_rollouts(
    folder: Path, header: RolloutHeader, groups: Sequence[Group], advantages: Sequence[np.ndarray] | None
) -> None:
    """Write `folder/step-00000012.parquet` atomically.

    `advantages` has one array [S] per trajectory, group by group, where S is the number of sampled tokens.
    """
    prompt, response = longest(groups)
    header = replace(header, longest_prompt=prompt, longest_response=response)
    rows = [row for index, group in enumerate(groups) for row in _rows(index, group)]
    for row, each in zip(rows, advantages or [None] * len(rows), strict=True):
        row["advantages"] = each
    shapes = {(*t.routes.shape[1:], t.routes.itemsize) for g in groups for t in g.trajectories if t.routes is not None}
    if shapes:
        (shape,) = shapes
        header = replace(header, route_shape=shape)
    header = replace(header, has_kept_tokens=any(t.kept_tokens is not None for g in groups for t in g.trajectories))
    _write(folder, header, [rows])


def write_parts(folder: Path, header: RolloutHeader, parts: Iterable[Sequence[Group]]) -> None:
    """Write the same file from the parts of a batch that no trainer uses, one of which is in memory at a time.

    It has no routes and no kept tokens.
    """
    numbers = count()
    _write(folder, header, ([row for group in part for row in _rows(next(numbers), group)] for part in parts))


def longest(groups: Sequence[Group]) -> tuple[int, int]:
    """Return the tokens of the longest prompt and of the longest response."""
    trajectories = [trajectory for group in groups for trajectory in group.trajectories]
    prompt = max(len(trajectory.prompt_token_ids) for trajectory in trajectories)
    return prompt, max(len(trajectory.response_token_ids) for trajectory in trajectories)


def rollout_files(folder: Path) -> dict[int, Path]:
    """Return the files by step, in order; empty if the folder is missing."""
    return {int(path.stem.removeprefix("step-")): path for path in sorted(folder.glob(f"step-{'[0-9]' * 8}.parquet"))}


def remove_rollouts_after(folder: Path, step: int) -> None:
    """Delete the files of later steps, which a resumed run repeats."""
    for found, path in rollout_files(folder).items():
        if found > step:
            path.unlink()


def read_header(path: Path) -> RolloutHeader:
    """Read a file's header. Raises UserError if the file is damaged or of another kind."""
    try:
        return _header(pq.read_schema(path))
    except (OSError, pa.ArrowException) as error:
        raise _unreadable(path, error) from None


def read_rollouts(path: Path) -> tuple[RolloutHeader, list[Group]]:
    """Read a batch, bit-identical to what was written. Raises UserError if the file is damaged or of another kind."""
    try:
        header = _header(pq.read_schema(path))
        table = _read(path, _schema(header))
    except (OSError, pa.ArrowException) as error:
        raise _unreadable(path, error) from None
    return header, [group for _, group in _groups(table, header.route_shape)]


def read_in_flight_parquet(checkpoint: Path) -> InFlightState:
    """Read the in-flight state of a checkpoint of an earlier version; empty without files.

    Raises UserError if a file is damaged.
    """
    buffered, unfinished = checkpoint / BUFFERED, checkpoint / UNFINISHED
    return InFlightState(
        _read_buffered(buffered) if buffered.exists() else (),
        _read_unfinished(unfinished) if unfinished.exists() else (),
    )


def _read_buffered(path: Path) -> tuple[BufferedGroup, ...]:
    table = _read_saved(path, _BUFFERED_SCHEMA)
    num_uses = dict(zip(table.column("group").to_pylist(), table.column("num_uses").to_pylist(), strict=True))
    return tuple(BufferedGroup(serial, group, num_uses[serial]) for serial, group in _groups(table))


def _read_unfinished(path: Path) -> tuple[UnfinishedGroup, ...]:
    table = _read_saved(path, _UNFINISHED_SCHEMA)
    heads = zip(*(table.column(name).to_pylist() for name in _UNFINISHED_SCHEMA.names[:3]), strict=True)
    columns = zip(*(table.column(name) for name in _PARTIAL_TYPES), strict=True)
    rows = [
        (serial, prompt_id, UnfinishedTrajectory(**_trajectory_fields(*values), turn_ended=turn_ended))
        for (serial, prompt_id, turn_ended), values in zip(heads, columns, strict=True)
    ]
    return tuple(
        UnfinishedGroup(serial, prompt_id, tuple(trajectory for *_, trajectory in members))
        for (serial, prompt_id), members in groupby(rows, key=lambda row: row[:2])
    )


def _read_saved(path: Path, schema: pa.Schema) -> pa.Table:
    try:
        return _read(path, schema)
    except (OSError, pa.ArrowException) as error:
        raise UserError(f"{path} is damaged: {error}. Delete it; its rollouts are then generated again") from None


def _write(folder: Path, header: RolloutHeader, parts: Iterable[list[dict[str, Any]]]) -> None:
    schema = _schema(header).with_metadata({_HEADER: json.dumps(asdict(header))})
    path = folder / f"step-{header.step:08d}.parquet"
    partial = path.with_suffix(".partial")
    folder.mkdir(parents=True, exist_ok=True)
    with pq.ParquetWriter(partial, schema, compression="zstd", write_page_checksum=True) as writer:
        for rows in parts:
            writer.write_table(pa.Table.from_pylist(rows, schema))
    partial.replace(path)


def _read(path: Path, schema: pa.Schema) -> pa.Table:
    table = pq.read_table(path, page_checksum_verification=True)
    if table.schema != schema:  # metadata is not compared
        raise pa.ArrowInvalid(f"its columns are {', '.join(table.column_names)}")
    return table


def _groups(table: pa.Table, route_shape: Sequence[int] = ()) -> list[tuple[int, Group]]:
    """Return (value of the `group` column, group) for each group."""
    columns = (table.column(name) for name in _TRAJECTORY_TYPES)
    trajectories = [_trajectory(*values) for values in zip(*columns, strict=True)]
    if route_shape:
        routes = [_array_of(each, route_shape) for each in table.column(_ROUTES)]
        trajectories = [replace(t, routes=each) for t, each in zip(trajectories, routes, strict=True)]
    for name in {_TEACHER, _KEPT}.intersection(table.column_names):
        values = [each.values.to_numpy().copy() if each.is_valid else None for each in table.column(name)]
        trajectories = [replace(t, **{name: each}) for t, each in zip(trajectories, values, strict=True)]
    rows = zip(table.select([*_GROUP_TYPES]).to_pylist(), trajectories, strict=True)
    groups = []
    for number, members in groupby(rows, key=lambda row: row[0]["group"]):
        found = [*members]
        groups.append((number, Group(prompt_of(found[0][0]), tuple(trajectory for _, trajectory in found))))
    return groups


def _schema(header: RolloutHeader) -> pa.Schema:
    optional = {_ROUTES: pa.binary()} if header.route_shape else {}
    optional |= {_TEACHER: pa.list_(pa.float32())} if header.teacher else {}
    optional |= {_KEPT: pa.list_(pa.int32())} if header.has_kept_tokens else {}
    return pa.schema([*_SCHEMA, *(pa.field(*each) for each in optional.items())])


def _header(schema: pa.Schema) -> RolloutHeader:
    try:
        fields = json.loads((schema.metadata or {})[_HEADER])
        return RolloutHeader(**fields | {"route_shape": tuple(fields.get("route_shape", ()))})
    except (KeyError, TypeError, ValueError):
        raise pa.ArrowInvalid("its metadata has no header of a rollout batch") from None


def _unreadable(path: Path, reason: object) -> UserError:
    return UserError(
        f"{path} is not a complete rollout file ({reason}); give a folder that logging.dump_rollouts=true or "
        "train --rollout-only has written; a damaged file must be written again"
    )


def _rows(number: int, group: Group) -> list[dict[str, Any]]:
    shared = {"group": number, **unicode_prompt_columns(group.prompt)}
    return [shared | _columns(trajectory, _TRAJECTORY_TYPES) for trajectory in group.trajectories]


def prompt_columns(prompt: Prompt) -> dict[str, str]:
    """Return the prompt as strings."""
    return {
        "prompt_id": prompt.prompt_id,
        "messages": json.dumps(prompt.messages),
        "ground_truth": prompt.ground_truth,
        "data_source": prompt.data_source,
        "extra_info": json.dumps(prompt.extra_info),
    }


def unicode_prompt_columns(prompt: Prompt) -> dict[str, str]:
    """Return the prompt as strings that Parquet accepts: prompts may have been made without a file."""
    return {name: without_lone_surrogates(value) for name, value in prompt_columns(prompt).items()}


def prompt_of(row: dict[str, Any]) -> Prompt:
    """Return the prompt of `prompt_columns`."""
    return Prompt(
        prompt_id=row["prompt_id"],
        messages=tuple(json.loads(row["messages"])),
        ground_truth=row["ground_truth"],
        data_source=row["data_source"],
        extra_info=json.loads(row["extra_info"]),
    )


def _columns(trajectory: Trajectory, names: Iterable[str]) -> dict[str, Any]:
    columns = {name: getattr(trajectory, name) for name in names}
    spans = [asdict(span) for span in trajectory.version_spans]
    text, turns = without_lone_surrogates(trajectory.text), json.dumps(trajectory.turns)
    routes = None if trajectory.routes is None else trajectory.routes.tobytes()
    columns |= {"version_spans": spans, "text": text, "turns": turns, _ROUTES: routes}
    return columns | {_TEACHER: trajectory.teacher_log_probs, _KEPT: trajectory.kept_tokens}


def _array_of(routes: pa.BinaryScalar, shape: Sequence[int]) -> np.ndarray | None:
    num_layers, num_experts, itemsize = shape
    values = np.frombuffer(routes.as_buffer(), f"<i{itemsize}") if routes.is_valid else None
    return None if values is None else values.reshape(-1, num_layers, num_experts).copy()


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
        **_trajectory_fields(response, log_probs, spans, finish_reason, loss_mask, turns),
    )


def _trajectory_fields(
    response: pa.ListScalar,
    log_probs: pa.ListScalar,
    spans: pa.ListScalar,
    finish_reason: pa.StringScalar,
    loss_mask: pa.ListScalar,
    turns: pa.StringScalar,
) -> dict[str, Any]:
    return {
        # Copied because Arrow's views are read-only.
        "response_token_ids": response.values.to_numpy().copy(),
        "behaviour_log_probs": log_probs.values.to_numpy().copy(),
        "version_spans": tuple(VersionSpan(**span) for span in spans.as_py()),
        "finish_reason": finish_reason.as_py(),
        "loss_mask": np.array(loss_mask.as_py(), bool) if loss_mask.is_valid else None,
        "turns": tuple(json.loads(turns.as_py())),
    }
