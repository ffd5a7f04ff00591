from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from megatron_bapo.data.rollout_files import remove_rollouts_after, rollout_files
from megatron_bapo.data.rollout_samples import (
    ROWS_PER_GROUP,
    SampledGroup,
    SampledResponse,
    SampleHeader,
    read_sample_header,
    token_staleness,
    write_samples,
)
from megatron_bapo.errors import UserError
from megatron_bapo.records import Group, Prompt, Trajectory, VersionSpan

HEADER = SampleHeader(step=1, policy_version=4, num_groups=8, n=3, objective="bapo", temperature=1.0)


def sampled_group(index: int, num: int, text: str = "") -> SampledGroup:
    tokens = np.arange(4, dtype=np.int32)
    trajectory = Trajectory(
        tokens, tokens, np.full(4, -1.0, np.float32), (VersionSpan(1, 1), VersionSpan(3, 3)), "stop", text, 0.5
    )
    figures = {
        "log_probs": np.array([-1.5, -1.0, np.nan, -np.inf], np.float32),
        "entropy": np.ones(4, np.float32),
        "ratio": np.array([0.5, 1.5, np.nan, 0.0], np.float32),
        "correction": np.array([1.0, 1.0, 0.0, 1.0], np.float32),
        "marks": np.array([1, 2 + 4, 8, 16], np.float32),
    }
    response = SampledResponse(trajectory, np.full(4, -0.5), None, 2, 0.6, 1.2, figures)
    prompt = Prompt(f"p:{index}", ({"role": "user", "content": "\ud800"},), "\ud800", "p")
    return SampledGroup(index, Group(prompt, (trajectory,) * num), (response,) * num)


def decode(batch: list[list[int]]) -> list[str]:
    return [f"{len(token_ids)} tokens \ud800" for token_ids in batch]


def test_lone_surrogates_and_values_that_are_not_finite_are_written(tmp_path: Path) -> None:
    write_samples(tmp_path, HEADER, [sampled_group(5, 1), sampled_group(7, 1, "given")], decode)
    file = pq.ParquetFile(tmp_path / "step-00000001.parquet")
    first, second = file.read().to_pylist()

    assert read_sample_header(file) == HEADER
    assert (first["group"], first["text"], first["ground_truth"]) == (5, "4 tokens \ufffd", "\ufffd")
    assert first["messages"] == '[{"role": "user", "content": "\\ud800"}]'
    assert second["text"] == "given"
    assert first["marks"] == [1, 6, 8, 16]
    counts = {name: first[name] for name in ("num_upper", "num_lower", "num_dual", "num_rejected")}
    assert counts == {"num_upper": 1, "num_lower": 1, "num_dual": 1, "num_rejected": 1}
    assert (first["mean_log_prob_diff"], first["max_ratio"]) == (0.25, 1.5)
    assert (first["max_staleness"], first["mean_staleness"], first["num_versions"]) == (3, 1.5, 2)


def test_a_row_group_has_few_responses(tmp_path: Path) -> None:
    write_samples(tmp_path, HEADER, [sampled_group(0, ROWS_PER_GROUP + 1)], decode)
    metadata = pq.ParquetFile(tmp_path / "step-00000001.parquet").metadata
    assert [metadata.row_group(i).num_rows for i in range(metadata.num_row_groups)] == [ROWS_PER_GROUP, 1]


def test_files_of_later_steps_are_removed(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        write_samples(tmp_path, SampleHeader(step, 0, 1, 1, "bapo", 1.0), [sampled_group(0, 1)], decode)
    remove_rollouts_after(tmp_path, 2)
    assert [*rollout_files(tmp_path)] == [1, 2]


def test_a_file_of_another_kind_is_refused(tmp_path: Path) -> None:
    write_samples(tmp_path, HEADER, [sampled_group(0, 1)], decode)
    path = tmp_path / "step-00000001.parquet"
    pq.write_table(pq.read_table(path).replace_schema_metadata({}), path)
    with pytest.raises(UserError, match="no header"):
        read_sample_header(pq.ParquetFile(path))


def test_staleness_counts_weight_updates_since_a_token_was_sampled() -> None:
    assert token_staleness([(1, 2), (4, 1)], 4).tolist() == [3, 3, 0]
    assert token_staleness([], 4).tolist() == []
