import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from megatron_bapo.data.rollout_files import (
    RolloutHeader,
    read_header,
    read_rollouts,
    remove_rollouts_after,
    rollout_files,
    write_parts,
    write_rollouts,
)
from megatron_bapo.errors import UserError
from megatron_bapo.records import Group, Prompt, Trajectory, VersionSpan

HEADER = RolloutHeader(
    step=1,
    policy_version=3,
    num_groups=2,
    n=2,
    vocab_size=320,
    num_reward_timeouts=1,
    data_state={"stream": [1, 2]},
    sampling={"temperature": 0.6, "top_k": -1},
    longest_prompt=2,
    longest_response=5,
)
AWKWARD = np.array([-0.0, -1e-45, -0.1, -np.inf, np.nan], np.float32)
"""Values that a decimal or lossy column would change: minus zero, the smallest subnormal, infinity and NaN."""


def trajectory(length: int, reward: float) -> Trajectory:
    return Trajectory(
        prompt_token_ids=np.array([1, 2**31 - 1], np.int32),
        response_token_ids=np.arange(length, dtype=np.int32),
        behaviour_log_probs=AWKWARD[-length:][: length - (length == 4)],
        version_spans=(VersionSpan(1, 1), VersionSpan(1, length - 1)),
        finish_reason="length" if length > 2 else "stop",
        text="\x00 ü\n'\"",
        reward=reward,
        loss_mask=np.arange(length) != 1 if length == 4 else None,
        turns=({"role": "assistant", "content": "\x00"}, {"role": "tool", "content": "ü"}) if length == 4 else (),
    )


def groups() -> list[Group]:
    prompt = Prompt("p:0", ({"role": "user", "content": "1+1?"},), "2", "p", {"f": 0.1, "deep": {"list": [1, None]}})
    # The same prompt twice, as at the border of two epochs.
    return [
        Group(prompt, (trajectory(5, 0.1), trajectory(2, float("nan")))),
        Group(prompt, (trajectory(3, -0.0), trajectory(4, 1 / 3))),
    ]


def bits(trajectory: Trajectory) -> tuple:
    arrays = (trajectory.prompt_token_ids, trajectory.response_token_ids, trajectory.behaviour_log_probs)
    return (
        *((array.dtype, array.tobytes()) for array in arrays),
        np.float64(trajectory.reward).tobytes(),
        (trajectory.version_spans, trajectory.finish_reason, trajectory.text, trajectory.turns),
        None if trajectory.loss_mask is None else (trajectory.loss_mask.dtype, trajectory.loss_mask.tobytes()),
        None if trajectory.routes is None else (trajectory.routes.dtype, trajectory.routes.tobytes()),
        None if (taught := trajectory.teacher_log_probs) is None else (taught.dtype, taught.tobytes()),
        None if (kept := trajectory.kept_tokens) is None else (kept.dtype, kept.tobytes()),
    )


@pytest.fixture
def file(tmp_path: Path) -> Path:
    write_rollouts(tmp_path, HEADER, groups(), [np.full(length, 0.1) for length in (5, 2, 3, 3)])
    return tmp_path / "step-00000001.parquet"


def test_a_batch_is_read_back_bit_by_bit(file):
    header, found = read_rollouts(file)

    assert header == read_header(file) == HEADER
    assert [group.prompt for group in found] == [group.prompt for group in groups()]
    assert [[bits(each) for each in group.trajectories] for group in found] == [
        [bits(each) for each in group.trajectories] for group in groups()
    ]


def test_arrays_that_are_read_are_writable(file):
    (first, *_), *_ = [group.trajectories for group in read_rollouts(file)[1]]

    assert all(array.flags.writeable for array in (first.response_token_ids, first.behaviour_log_probs))


def test_advantages_and_groups_are_plain_columns_for_other_programs(file, tmp_path):
    table = pq.read_table(file)

    assert table["group"].to_pylist() == [0, 0, 1, 1]
    assert table["advantages"].to_pylist() == [[0.1] * length for length in (5, 2, 3, 3)]
    write_rollouts(tmp_path / "untrained", HEADER, groups(), None)
    assert pq.read_table(tmp_path / "untrained" / file.name)["advantages"].to_pylist() == [None] * 4


def test_a_batch_that_arrives_in_parts_is_read_like_a_whole_one(tmp_path: Path):
    write_parts(tmp_path, HEADER, ([group] for group in groups()))
    (file,) = rollout_files(tmp_path).values()
    assert pq.read_metadata(file).num_row_groups == 2
    assert pq.read_table(file)["advantages"].to_pylist() == [None] * 4
    header, found = read_rollouts(file)
    assert header == HEADER
    assert [[bits(each) for each in group.trajectories] for group in found] == [
        [bits(each) for each in group.trajectories] for group in groups()
    ]


def test_a_truncated_file_is_refused(file):
    file.write_bytes(file.read_bytes()[:-20])

    for read in (read_header, read_rollouts):
        with pytest.raises(UserError, match=r"step-00000001\.parquet is not a complete rollout file"):
            read(file)


def test_a_changed_byte_of_a_column_is_refused(file):
    damaged, columns = bytearray(file.read_bytes()), pq.read_metadata(file).row_group(0)
    log_probs = next(
        column
        for column in map(columns.column, range(columns.num_columns))
        if column.path_in_schema.startswith("behaviour_log_probs")
    )
    damaged[log_probs.data_page_offset + log_probs.total_compressed_size // 2] ^= 1
    file.write_bytes(damaged)

    with pytest.raises(UserError, match="is not a complete rollout file"):
        read_rollouts(file)


def test_another_kind_of_table_is_refused(file):
    metadata = pq.read_schema(file).metadata
    pq.write_table(pa.table({"update": [1.0]}), file)
    with pytest.raises(UserError, match="its metadata has no header of a rollout batch"):
        read_header(file)

    pq.write_table(pa.table({"update": [1.0]}).replace_schema_metadata(metadata), file)
    with pytest.raises(UserError, match="its columns are update"):
        read_rollouts(file)


@pytest.mark.parametrize(("step", "kept"), [(0, []), (1, [1]), (5, [1, 2])])
def test_a_resumed_run_drops_the_files_of_the_steps_that_it_repeats(tmp_path, step, kept):
    for written in (2, 1):
        (tmp_path / f"step-{written:08d}.parquet").touch()
    (tmp_path / "step-00000003.partial").touch()

    remove_rollouts_after(tmp_path, step)

    assert list(rollout_files(tmp_path)) == kept
    assert rollout_files(tmp_path / "missing") == {}


def test_a_file_of_an_earlier_version_says_nothing_of_how_it_was_sampled(file):
    schema = pq.read_schema(file)
    ((key, saved),) = [(key, json.loads(value)) for key, value in schema.metadata.items() if b"rollouts" in key]
    del saved["sampling"]
    pq.write_table(pq.read_table(file).replace_schema_metadata({key: json.dumps(saved)}), file)

    assert read_header(file) == replace(HEADER, sampling={})


def test_lone_surrogates_are_replaced_in_text_columns_and_kept_in_json(tmp_path: Path) -> None:
    turns = ({"role": "tool", "content": "\ud83d"},)
    prompt = Prompt("p:0", ({"role": "user", "content": "\ud800"},), "\ud801", "\ud802", {"key": "\ud803"})
    group = Group(prompt, (replace(trajectory(3, 1.0), text="4 \udc80", turns=turns),))
    write_rollouts(tmp_path, HEADER, [group], None)
    _, (found,) = read_rollouts(tmp_path / "step-00000001.parquet")

    assert found.prompt == replace(prompt, ground_truth="\ufffd", data_source="\ufffd")
    assert (found.trajectories[0].text, found.trajectories[0].turns) == ("4 \ufffd", turns)


def routed(groups: list[Group], dtype: str = "i1") -> list[Group]:
    """Return the groups with routes, except for the very first trajectory."""

    def routes(trajectory: Trajectory, seed: int) -> np.ndarray | None:
        shape = len(trajectory.prompt_token_ids) + len(trajectory.response_token_ids) - 1, 3, 2
        return np.random.default_rng(seed).integers(-1, 127, shape).astype(dtype) if seed else None

    return [
        Group(g.prompt, tuple(replace(t, routes=routes(t, 2 * i + k)) for k, t in enumerate(g.trajectories)))
        for i, g in enumerate(groups)
    ]


@pytest.mark.parametrize("dtype", ["i1", "i2"])
def test_routes_are_read_back_bit_by_bit(tmp_path, dtype):
    written = routed(groups(), dtype)
    write_rollouts(tmp_path, HEADER, written, None)
    header, found = read_rollouts(tmp_path / "step-00000001.parquet")

    assert header == replace(HEADER, route_shape=(3, 2, np.dtype(dtype).itemsize))
    assert [[bits(t) for t in group.trajectories] for group in found] == [
        [bits(t) for t in group.trajectories] for group in written
    ]
    assert found[0].trajectories[0].routes is None
    assert found[1].trajectories[1].routes.shape == (5, 3, 2)
    assert found[1].trajectories[1].routes.flags.writeable


def with_kept_tokens(groups: list[Group]) -> list[Group]:
    """Return the groups with two kept tokens for each sampled one."""
    return [
        Group(
            g.prompt,
            tuple(replace(t, kept_tokens=np.arange(2 * t.num_sampled, dtype=np.int32)) for t in g.trajectories),
        )
        for g in groups
    ]


def test_kept_tokens_are_read_back_bit_by_bit_beside_a_teachers_log_probs(tmp_path):
    written = with_kept_tokens(taught(groups()))
    write_rollouts(tmp_path, replace(HEADER, teacher="teacher"), written, None)
    header, found = read_rollouts(tmp_path / "step-00000001.parquet")

    assert header == replace(HEADER, teacher="teacher", has_kept_tokens=True)
    assert [[bits(t) for t in group.trajectories] for group in found] == [
        [bits(t) for t in group.trajectories] for group in written
    ]
    assert found[0].trajectories[0].kept_tokens.flags.writeable


def taught(groups: list[Group]) -> list[Group]:
    """Return the groups with a teacher's log-probs."""

    def scored(trajectory: Trajectory) -> Trajectory:
        return replace(trajectory, teacher_log_probs=trajectory.behaviour_log_probs[::-1].copy())

    return [Group(group.prompt, tuple(map(scored, group.trajectories))) for group in groups]


def test_a_teachers_log_probs_are_read_back_bit_by_bit_and_their_column_exists_only_with_a_teacher(tmp_path):
    header, written = replace(HEADER, teacher="models/teacher"), taught(groups())
    write_rollouts(tmp_path, header, written, None)
    path = tmp_path / "step-00000001.parquet"
    found = read_rollouts(path)

    assert found[0] == header
    assert [[bits(t) for t in g.trajectories] for g in found[1]] == [[bits(t) for t in g.trajectories] for g in written]
    assert "teacher_log_probs" in pq.read_schema(path).names
    write_rollouts(tmp_path, HEADER, groups(), None)
    assert "teacher_log_probs" not in pq.read_schema(path).names
