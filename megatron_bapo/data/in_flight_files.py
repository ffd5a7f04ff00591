"""Files of a checkpoint with the rollouts for later batches: buffered groups and partial responses.

The groups are divided among the files `in_flight/shard-NNN.rollouts`, which threads write and read side by side. A file
has a record for each group: a line of JSON, and the bytes of its arrays and texts as they are in memory, because
encoding gigabytes of tokens would take minutes. The last line says how many records there are.

    {"kind": "unfinished", ..., "num_bytes": 24, "xxh3": "ab6e5f64077e7d8a"}\\n
    24 bytes: all 4-byte arrays (little-endian), trajectory by trajectory, then all loss masks, all texts and all routes
    {"kind": "end", "num_groups": 1}\\n

Parts of a record are written together, because each system call gives up the interpreter's lock, for which the event
loop then competes with these threads. Checkpoints of earlier versions have `crc32` instead of `xxh3`, or
`buffered.parquet` and `unfinished.parquet` instead of the shards; they are read, too.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import zlib
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import astuple
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from xxhash import xxh3_64

from megatron_bapo.data.rollout_files import prompt_columns, prompt_of, read_in_flight_parquet
from megatron_bapo.errors import UserError
from megatron_bapo.files import flush
from megatron_bapo.records import (
    BufferedGroup,
    Group,
    InFlightState,
    Trajectory,
    UnfinishedGroup,
    UnfinishedTrajectory,
    VersionSpan,
)

FOLDER = "in_flight"
MAX_SHARDS = 8
MAX_PARTS = 1024
"""Most parts of a `writev` (IOV_MAX of Linux)."""
_INT, _FLOAT = np.dtype("<i4"), np.dtype("<f4")
_Saved = BufferedGroup | UnfinishedGroup


def save_in_flight(folder: Path, state: InFlightState) -> None:
    """Write the state into a checkpoint that is being written, and flush it to the disk.

    Without rollouts nothing is created. The groups are read while they are written.
    """
    groups = _Joined(state.buffered, state.unfinished)
    num_shards = min(MAX_SHARDS, len(groups))
    if num_shards == 0:
        return
    target = folder / FOLDER
    shutil.rmtree(target, ignore_errors=True)  # left by a call that is repeated
    target.mkdir(parents=True)
    with ThreadPoolExecutor(min(num_shards, len(os.sched_getaffinity(0)))) as threads:  # more would slow the event loop
        written = [
            threads.submit(_write_shard, target / f"shard-{i:03}.rollouts", groups, range(i, len(groups), num_shards))
            for i in range(num_shards)
        ]
        for each in written:
            each.result()
    flush(target)
    flush(folder)


def load_in_flight(checkpoint: Path) -> InFlightState:
    """Read the state that `save_in_flight` wrote, bit-identical; empty without files. Raises UserError if damaged."""
    shards = sorted((checkpoint / FOLDER).glob("shard-*.rollouts"))
    if not shards:
        return read_in_flight_parquet(checkpoint)
    with ThreadPoolExecutor(len(shards)) as threads:
        groups = [group for shard in threads.map(_read_shard, shards) for group in shard]
    groups.sort(key=lambda group: group.serial)
    return InFlightState(
        tuple(group for group in groups if isinstance(group, BufferedGroup)),
        tuple(group for group in groups if isinstance(group, UnfinishedGroup)),
    )


class _Joined:
    """Both kinds of groups as one sequence; unfinished ones are made when they are read."""

    def __init__(self, buffered: Sequence[BufferedGroup], unfinished: Sequence[UnfinishedGroup]) -> None:
        self._buffered, self._unfinished = buffered, unfinished

    def __len__(self) -> int:
        return len(self._buffered) + len(self._unfinished)

    def __getitem__(self, index: int) -> _Saved:
        num = len(self._buffered)
        return self._buffered[index] if index < num else self._unfinished[index - num]


def write_groups(file: BinaryIO, groups: Iterable[_Saved]) -> None:
    """Write a record for each group that has tokens, and the last line, past the file's buffer, which must be empty."""
    num_groups = sum(_write_group(file, group) for group in groups)
    _write(file, [_line({"kind": "end", "num_groups": num_groups})])


def read_groups(file: BinaryIO) -> Iterator[_Saved]:
    """Yield what `write_groups` wrote, bit-identical. Raises ValueError, KeyError or TypeError if it is damaged."""
    num_groups = 0
    while (head := json.loads(file.readline()))["kind"] != "end":
        yield _read_group(file, head)
        num_groups += 1
    if head["num_groups"] != num_groups:
        raise ValueError(f"it has {num_groups} groups, and its end says {head['num_groups']}")


def _write_shard(path: Path, groups: _Joined, indices: Iterable[int]) -> None:
    with path.open("wb", buffering=0) as file:
        write_groups(file, (groups[index] for index in indices))
        os.fsync(file.fileno())


def _write_group(file: BinaryIO, group: _Saved) -> bool:
    """Write the group's record; return False for a group without tokens, which has none."""
    if isinstance(group, BufferedGroup):
        head = {"kind": "buffered", "num_uses": group.num_uses, **prompt_columns(group.group.prompt)}
        trajectories: Sequence[Trajectory | UnfinishedTrajectory] = group.group.trajectories
    else:
        head, trajectories = {"kind": "unfinished", "prompt_id": group.prompt_id}, group.trajectories
    if not trajectories:
        return False
    parts = [part for t in trajectories for part in _arrays(t)]
    parts += [_view(t.loss_mask, np.dtype(bool)) for t in trajectories if t.loss_mask is not None]
    parts += [memoryview(_text_bytes(t)) for t in trajectories if isinstance(t, Trajectory)]
    parts += [_view(t.routes, _route_type(t.routes.itemsize)) for t in trajectories if t.routes is not None]
    checksum = xxh3_64()
    for part in parts:
        checksum.update(part)
    head |= {"serial": group.serial, "trajectories": [_fields(trajectory) for trajectory in trajectories]}
    head |= {"num_bytes": sum(part.nbytes for part in parts), "xxh3": checksum.hexdigest()}
    _write(file, [_line(head), *parts])
    return True


def _line(values: dict[str, Any]) -> memoryview:
    return memoryview(json.dumps(values).encode() + b"\n")


def _write(file: BinaryIO, parts: Sequence[memoryview]) -> None:
    """Write all parts of bytes, `MAX_PARTS` at a time."""
    for first in range(0, len(parts), MAX_PARTS):
        left = deque(parts[first : first + MAX_PARTS])
        while left:
            num_written = os.writev(file.fileno(), left)  # at most 2 GiB; a signal may cut it short
            while left and num_written >= left[0].nbytes:
                num_written -= left.popleft().nbytes
            if num_written:
                left[0] = left[0][num_written:]


def _arrays(trajectory: Trajectory | UnfinishedTrajectory) -> Iterator[memoryview]:
    if isinstance(trajectory, Trajectory):
        yield _view(trajectory.prompt_token_ids, _INT)
    yield _view(trajectory.response_token_ids, _INT)
    yield _view(trajectory.behaviour_log_probs, _FLOAT)
    if isinstance(trajectory, Trajectory) and trajectory.teacher_log_probs is not None:
        yield _view(trajectory.teacher_log_probs, _FLOAT)
    if trajectory.kept_tokens is not None:
        yield _view(trajectory.kept_tokens, _INT)


def _route_type(itemsize: int) -> np.dtype:
    return np.dtype(f"<i{itemsize}")


def _text_bytes(trajectory: Trajectory) -> bytes:
    return trajectory.text.encode("utf-8", "surrogatepass")


def _view(array: np.ndarray, dtype: np.dtype) -> memoryview:
    return np.ascontiguousarray(array, dtype).reshape(-1).view(np.uint8).data


def _fields(trajectory: Trajectory | UnfinishedTrajectory) -> dict[str, Any]:
    fields = {
        "num_tokens": len(trajectory.response_token_ids),
        "num_log_probs": len(trajectory.behaviour_log_probs),
        "version_spans": [astuple(span) for span in trajectory.version_spans],
        "finish_reason": trajectory.finish_reason,
        "turns": trajectory.turns,
        "has_loss_mask": trajectory.loss_mask is not None,
    }
    if trajectory.routes is not None:
        fields |= {"routes": [*trajectory.routes.shape, trajectory.routes.itemsize]}
    if trajectory.kept_tokens is not None:
        fields |= {"num_kept_tokens": len(trajectory.kept_tokens)}
    if isinstance(trajectory, UnfinishedTrajectory):
        return fields | {"turn_ended": trajectory.turn_ended}
    return fields | {
        "reward": trajectory.reward,
        "num_prompt_tokens": len(trajectory.prompt_token_ids),
        "num_text_bytes": len(_text_bytes(trajectory)),
        "has_teacher_log_probs": trajectory.teacher_log_probs is not None,
    }


def _read_shard(path: Path) -> list[_Saved]:
    try:
        with path.open("rb") as file:
            return [*read_groups(file)]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path} is damaged: {error}. Delete it; its rollouts are then generated again") from None


def _read_group(file: BinaryIO, head: dict[str, Any]) -> _Saved:
    content = bytearray(head["num_bytes"])
    num_read = file.readinto(content)  # pyright: ignore[reportAttributeAccessIssue]
    if num_read != len(content) or not _matches(content, head):
        raise ValueError(f"the group with serial number {head['serial']} does not match its checksum")
    # The arrays share the group's bytes.
    parts = _Parts(memoryview(content))
    is_buffered, fields = head["kind"] == "buffered", head["trajectories"]
    arrays = [
        (parts.take(each["num_prompt_tokens"] if is_buffered else 0, _INT),
         parts.take(each["num_tokens"], _INT), parts.take(each["num_log_probs"], _FLOAT),
         parts.take(each["num_log_probs"], _FLOAT) if each.get("has_teacher_log_probs") else None,
         parts.take(each["num_kept_tokens"], _INT) if "num_kept_tokens" in each else None)
        for each in fields
    ]  # fmt: skip
    shared = [
        _shared(parts, each, tokens, log_probs, kept)
        for each, (_, tokens, log_probs, _, kept) in zip(fields, arrays, strict=True)
    ]
    if not is_buffered:
        unfinished = (
            UnfinishedTrajectory(**values, turn_ended=each["turn_ended"], routes=parts.routes(each))
            for each, values in zip(fields, shared, strict=True)
        )
        return UnfinishedGroup(head["serial"], head["prompt_id"], tuple(unfinished))
    texts = [parts.text(each["num_text_bytes"]) for each in fields]
    trajectories = (
        Trajectory(
            prompt_token_ids=prompt,
            text=text,
            reward=each["reward"],
            **values,
            routes=parts.routes(each),
            teacher_log_probs=taught,
        )
        for each, (prompt, *_, taught, _), values, text in zip(fields, arrays, shared, texts, strict=True)
    )
    return BufferedGroup(head["serial"], Group(prompt_of(head), tuple(trajectories)), head["num_uses"])


def _matches(content: bytearray, head: dict[str, Any]) -> bool:
    if "crc32" in head:  # of an earlier version
        return zlib.crc32(content) == head["crc32"]
    return xxh3_64(content).hexdigest() == head["xxh3"]


def _shared(
    parts: _Parts, fields: dict[str, Any], tokens: np.ndarray, log_probs: np.ndarray, kept: np.ndarray | None
) -> dict[str, Any]:
    """Return the fields that finished and unfinished trajectories have in common."""
    return {
        "response_token_ids": tokens,
        "behaviour_log_probs": log_probs,
        "version_spans": tuple(VersionSpan(*span) for span in fields["version_spans"]),
        "finish_reason": fields["finish_reason"],
        "loss_mask": parts.take(len(tokens), np.dtype(bool)) if fields["has_loss_mask"] else None,
        "turns": tuple(fields["turns"]),
        "kept_tokens": kept,
    }


class _Parts:
    """Reads consecutive arrays from a buffer."""

    def __init__(self, buffer: memoryview) -> None:
        self._buffer, self._start = buffer, 0

    def take(self, num: int, dtype: np.dtype) -> np.ndarray:
        array = np.frombuffer(self._buffer, dtype, num, self._start)
        self._start += array.nbytes
        return array

    def routes(self, fields: dict[str, Any]) -> np.ndarray | None:
        if "routes" not in fields:
            return None
        *shape, itemsize = fields["routes"]
        return self.take(math.prod(shape), _route_type(itemsize)).reshape(shape)

    def text(self, num_bytes: int) -> str:
        return self.take(num_bytes, np.dtype(np.uint8)).tobytes().decode("utf-8", "surrogatepass")
