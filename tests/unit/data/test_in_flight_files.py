import json
import os
import zlib
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from megatron_bapo.data.in_flight_files import FOLDER, load_in_flight, save_in_flight
from megatron_bapo.errors import UserError
from megatron_bapo.records import (
    BufferedGroup,
    InFlightState,
    Trajectory,
    UnfinishedGroup,
    UnfinishedTrajectory,
)
from tests.unit.data.test_rollout_files import bits, groups, routed, taught, trajectory, with_kept_tokens

TOKENS = {
    "response_token_ids": pa.list_(pa.int32()),
    "behaviour_log_probs": pa.list_(pa.float32()),
    "version_spans": pa.list_(pa.struct({"policy_version": pa.int64(), "num_tokens": pa.int64()})),
    "finish_reason": pa.string(),
}
PROMPT = dict.fromkeys(("prompt_id", "messages", "ground_truth", "data_source", "extra_info"), pa.string())
BUFFERED = pa.schema(
    {"group": pa.int32(), **PROMPT, "prompt_token_ids": pa.list_(pa.int32()), **TOKENS, "text": pa.string()}
    | {"reward": pa.float64(), "loss_mask": pa.list_(pa.bool_()), "turns": pa.string(), "num_uses": pa.int32()}
)
UNFINISHED = pa.schema(
    {"group": pa.int32(), "prompt_id": pa.string(), "turn_ended": pa.bool_(), **TOKENS}
    | {"loss_mask": pa.list_(pa.bool_()), "turns": pa.string()}
)


def unfinished(length: int, *, turn_ended: bool) -> UnfinishedTrajectory:
    """Return a partial rollout of `length` response tokens."""
    finished = trajectory(length, 0.0)
    return UnfinishedTrajectory(
        response_token_ids=finished.response_token_ids,
        behaviour_log_probs=finished.behaviour_log_probs,
        version_spans=finished.version_spans if length else (),
        finish_reason="stop" if length == 2 else None,
        loss_mask=finished.loss_mask,
        turns=finished.turns,
        turn_ended=turn_ended,
    )


@pytest.fixture
def in_flight() -> InFlightState:
    first, second = groups()
    return InFlightState(
        buffered=(BufferedGroup(3, first, num_uses=1), BufferedGroup(7, second)),
        unfinished=(
            UnfinishedGroup(5, "p:1", (unfinished(4, turn_ended=True), unfinished(2, turn_ended=False))),
            UnfinishedGroup(8, "p:1", (unfinished(0, turn_ended=False), unfinished(3, turn_ended=False))),
        ),
    )


def assert_equal(found: InFlightState, expected: InFlightState) -> None:
    assert [(e.serial, e.num_uses, e.group.prompt) for e in found.buffered] == [
        (e.serial, e.num_uses, e.group.prompt) for e in expected.buffered
    ]
    assert [[bits(t) for t in e.group.trajectories] for e in found.buffered] == [
        [bits(t) for t in e.group.trajectories] for e in expected.buffered
    ]
    assert [(group.serial, group.prompt_id) for group in found.unfinished] == [(5, "p:1"), (8, "p:1")]
    for group, written in zip(found.unfinished, expected.unfinished, strict=True):
        for loaded, one in zip(group.trajectories, written.trajectories, strict=True):
            for name in UnfinishedTrajectory.__dataclass_fields__:
                value, same = getattr(loaded, name), getattr(one, name)
                if isinstance(same, np.ndarray):
                    assert (value.dtype, value.tobytes()) == (same.dtype, same.tobytes())
                else:
                    assert value == same


def test_in_flight_state_is_read_back_bit_by_bit(in_flight, tmp_path):
    save_in_flight(tmp_path, in_flight)

    assert_equal(load_in_flight(tmp_path), in_flight)


def with_routes(state: InFlightState, dtype: str) -> InFlightState:
    """Return the state with routes [num_tokens, 3, 2] in its first unfinished group and all buffered ones."""
    routes = np.random.default_rng(0).integers(-1, 127, (7, 3, 2)).astype(dtype)
    one, two = state.unfinished
    partial = tuple(
        replace(each, routes=routes[:length]) for each, length in zip(one.trajectories, (3, 7), strict=True)
    )
    buffered = tuple(replace(e, group=g) for e, g in zip(state.buffered, routed(groups(), dtype), strict=True))
    return InFlightState(buffered, (replace(one, trajectories=partial), two))


def test_kept_tokens_of_in_flight_state_are_read_back_bit_by_bit(in_flight, tmp_path):
    one, two = in_flight.unfinished
    partial = tuple(
        replace(t, kept_tokens=-np.arange(1, 3 * len(t.behaviour_log_probs), dtype=np.int32)) for t in one.trajectories
    )
    buffered = tuple(
        replace(e, group=g) for e, g in zip(in_flight.buffered, with_kept_tokens(taught(groups())), strict=True)
    )
    state = InFlightState(buffered, (replace(one, trajectories=partial), two))
    save_in_flight(tmp_path, state)

    assert_equal(load_in_flight(tmp_path), state)


@pytest.mark.parametrize("dtype", ["i1", "i2"])
def test_routes_of_in_flight_state_are_read_back_bit_by_bit(in_flight, tmp_path, dtype):
    state = with_routes(in_flight, dtype)
    save_in_flight(tmp_path, state)
    found = load_in_flight(tmp_path)

    assert_equal(found, state)
    assert [each.routes.shape for each in found.unfinished[0].trajectories] == [(3, 3, 2), (7, 3, 2)]


def test_a_teachers_log_probs_of_buffered_groups_are_read_back_bit_by_bit(in_flight, tmp_path):
    first, second = (replace(e, group=g) for e, g in zip(in_flight.buffered, taught(routed(groups())), strict=True))
    state = replace(in_flight, buffered=(first, second))
    save_in_flight(tmp_path, state)

    assert_equal(load_in_flight(tmp_path), state)


def test_arrays_of_in_flight_state_are_writable_and_aligned(in_flight, tmp_path):
    save_in_flight(tmp_path, in_flight)
    found = load_in_flight(tmp_path)

    trajectories = [t for e in found.buffered for t in e.group.trajectories]
    for each in (*trajectories, *(t for group in found.unfinished for t in group.trajectories)):
        for array in (each.response_token_ids, each.behaviour_log_probs):
            assert array.flags.writeable
            assert array.flags.aligned


def test_many_groups_are_divided_among_the_files_and_come_back_in_the_order_of_their_prompts(in_flight, tmp_path):
    (one, *_), (other, *_) = in_flight.buffered, in_flight.unfinished
    state = InFlightState(
        tuple(BufferedGroup(2 * i, one.group) for i in range(50)),
        tuple(UnfinishedGroup(2 * i + 1, "p:1", other.trajectories) for i in range(50)),
    )
    save_in_flight(tmp_path, state)
    sizes = [path.stat().st_size for path in (tmp_path / FOLDER).iterdir()]
    found = load_in_flight(tmp_path)

    assert len(sizes) == 8
    assert max(sizes) < 1.5 * min(sizes)
    assert [entry.serial for entry in found.buffered] == [entry.serial for entry in state.buffered]
    assert [group.serial for group in found.unfinished] == [group.serial for group in state.unfinished]


@pytest.mark.parametrize("state", [InFlightState(), InFlightState(unfinished=(UnfinishedGroup(1, "p:1", ()),))])
def test_a_state_without_tokens_is_read_back_as_empty(state, tmp_path):
    save_in_flight(tmp_path, state)

    assert load_in_flight(tmp_path) == InFlightState()


def test_without_rollouts_nothing_is_created(tmp_path):
    save_in_flight(tmp_path, InFlightState())

    assert [*tmp_path.iterdir()] == []


def test_saving_again_replaces_what_an_interrupted_call_has_left(in_flight, tmp_path):
    (tmp_path / FOLDER).mkdir()
    (tmp_path / FOLDER / "shard-009.rollouts").write_text("half a li")
    save_in_flight(tmp_path, in_flight)

    assert_equal(load_in_flight(tmp_path), in_flight)


def test_checkpoints_with_the_checksum_of_earlier_versions_are_read(in_flight, tmp_path):
    save_in_flight(tmp_path, in_flight)
    for file in (tmp_path / FOLDER).iterdir():
        head, _, rest = file.read_bytes().partition(b"\n")
        values = json.loads(head)
        checksum = zlib.crc32(rest[: values["num_bytes"]])
        del values["xxh3"]
        file.write_bytes(json.dumps(values | {"crc32": checksum}).encode() + b"\n" + rest)

    assert_equal(load_in_flight(tmp_path), in_flight)


def test_a_record_is_complete_although_a_system_call_writes_a_part_of_it(in_flight, tmp_path, monkeypatch):
    state = with_routes(in_flight, "i2")
    monkeypatch.setattr(os, "writev", lambda descriptor, parts: os.write(descriptor, bytes(parts[0])[:7]))
    save_in_flight(tmp_path, state)

    assert_equal(load_in_flight(tmp_path), state)


def changed(content: bytes) -> bytes:
    place = content.index(b"}\n") + 4
    return content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :]


@pytest.mark.parametrize(
    "damage",
    [lambda content: content[:-20], lambda content: content[:90], lambda content: b"", changed],
    ids=["no end", "half a record", "empty", "a changed bit"],
)
def test_damaged_in_flight_files_are_refused_with_a_remedy(in_flight, tmp_path, damage):
    save_in_flight(tmp_path, in_flight)
    file = tmp_path / FOLDER / "shard-000.rollouts"
    file.write_bytes(damage(file.read_bytes()))

    with pytest.raises(UserError, match=r"shard-000\.rollouts is damaged: .* Delete it; its rollouts"):
        load_in_flight(tmp_path)


def test_without_a_deleted_file_the_groups_of_the_others_are_read(in_flight, tmp_path):
    save_in_flight(tmp_path, in_flight)
    (tmp_path / FOLDER / "shard-000.rollouts").unlink()
    found = load_in_flight(tmp_path)

    assert [entry.serial for entry in found.buffered] == [7]
    assert [group.serial for group in found.unfinished] == [5, 8]


def columns(each: Trajectory | UnfinishedTrajectory) -> dict[str, Any]:
    values = {name: getattr(each, name) for name in (*TOKENS, "loss_mask")}
    return values | {"version_spans": [asdict(s) for s in each.version_spans], "turns": json.dumps(each.turns)}


@pytest.fixture
def earlier(in_flight, tmp_path: Path) -> Path:
    """Return the folder of a checkpoint of an earlier version."""
    buffered = [
        {"group": e.serial, "num_uses": e.num_uses, **asdict(e.group.prompt), **columns(t)}
        | {name: json.dumps(getattr(e.group.prompt, name)) for name in ("messages", "extra_info")}
        | {"prompt_token_ids": t.prompt_token_ids, "text": t.text, "reward": t.reward}
        for e in in_flight.buffered
        for t in e.group.trajectories
    ]
    rows = [
        {"group": group.serial, "prompt_id": group.prompt_id, "turn_ended": t.turn_ended, **columns(t)}
        for group in in_flight.unfinished
        for t in group.trajectories
    ]
    pq.write_table(pa.Table.from_pylist(buffered, BUFFERED), tmp_path / "buffered.parquet", write_page_checksum=True)
    pq.write_table(pa.Table.from_pylist(rows, UNFINISHED), tmp_path / "unfinished.parquet", write_page_checksum=True)
    return tmp_path


def test_the_in_flight_state_of_a_checkpoint_of_an_earlier_version_is_read(earlier, in_flight):
    assert_equal(load_in_flight(earlier), in_flight)


@pytest.mark.parametrize("name", ["buffered.parquet", "unfinished.parquet"])
def test_truncated_in_flight_files_of_an_earlier_version_are_refused_with_a_remedy(earlier, name):
    file = earlier / name
    file.write_bytes(file.read_bytes()[:-20])

    with pytest.raises(UserError, match=rf"{name} is damaged: .* Delete it; its rollouts"):
        load_in_flight(earlier)
