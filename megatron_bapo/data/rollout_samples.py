"""Sampled rollouts with what the update did with each token, as Parquet: one file per step, a row for each response.

The columns of a response are those of `rollout_files.py`. Figures of tokens are lists of S values, one for each sampled
token, and null if no update used the response. The summary columns are computed from them, so that a reader can list
thousands of responses without reading their tokens. A row group has `ROWS_PER_GROUP` responses, and the metadata have a
header. `tokenizer.json` beside the files turns token ids into text.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from megatron_bapo.data.rollout_files import unicode_prompt_columns
from megatron_bapo.errors import UserError
from megatron_bapo.records import Group, Trajectory
from megatron_bapo.text import without_lone_surrogates

_HEADER = b"megatron_bapo.sampled_rollouts"
TOKENIZER_FILE = "tokenizer.json"
ROWS_PER_GROUP = 16
UPPER, LOWER, DUAL, REJECTED, DROPPED, MASKED = 1, 2, 4, 8, 16, 32
"""Bits of a token's marks: clipped by the upper bound, by the lower bound or by the dual clip, rejected by the rollout
correction, dropped because a value is NaN or infinite, or masked because the policy has left the response."""
TOKEN_FIGURES = ("advantages", "log_probs", "entropy", "ratio", "proximal_log_probs", "correction")
"""Columns of figures: advantage; log-prob under the trainer's weights in the update, and entropy of the distribution,
in nats; ratio in the loss; log-prob in the denominator of the ratio, if the trainer recomputed it; weight of the
rollout correction, if there is one."""
SUMMARY = {
    "num_tokens": pa.int32(),
    "num_sampled": pa.int32(),
    "num_upper": pa.int32(),
    "num_lower": pa.int32(),
    "num_dual": pa.int32(),
    "num_rejected": pa.int32(),
    "mean_advantage": pa.float32(),
    "mean_ratio": pa.float32(),
    "max_ratio": pa.float32(),
    "mean_entropy": pa.float32(),
    "mean_log_prob_diff": pa.float32(),
    "mean_staleness": pa.float32(),
    "max_staleness": pa.int32(),
    "num_versions": pa.int32(),
}
"""Columns computed from the others. The difference is the mean of |trainer's - engine's log-prob|, in nats; staleness
is the number of weight updates between the sampling of a token and the step."""
_FLOATS = pa.list_(pa.float32())
SCHEMA = pa.schema(
    {
        "group": pa.int32(),
        "response": pa.int32(),
        **dict.fromkeys(("prompt_id", "messages", "ground_truth", "data_source", "extra_info"), pa.string()),
        "reward": pa.float64(),
        "finish_reason": pa.string(),
        "update": pa.int32(),
        "clip_low": pa.float32(),
        "clip_high": pa.float32(),
        **SUMMARY,
        "text": pa.string(),
        "turns": pa.string(),
        "prompt_token_ids": pa.list_(pa.int32()),
        "response_token_ids": pa.list_(pa.int32()),
        "loss_mask": pa.list_(pa.bool_()),
        "version_spans": pa.list_(pa.struct({"policy_version": pa.int64(), "num_tokens": pa.int64()})),
        "rollout_log_probs": _FLOATS,
        **dict.fromkeys(TOKEN_FIGURES, _FLOATS),
        "marks": pa.list_(pa.uint8()),
    }
)


@dataclass(frozen=True)
class SampleHeader:
    """Metadata of a file."""

    step: int
    policy_version: int
    """Version of the trainer's weights at the start of the step."""
    num_groups: int
    """Groups of the rollout batch, of which the file has some."""
    n: int
    """Responses per group."""
    objective: str
    temperature: float


@dataclass(frozen=True)
class SampledResponse:
    """One response and the figures of its S sampled tokens."""

    trajectory: Trajectory
    advantages: np.ndarray
    """float [S]"""
    proximal_log_probs: np.ndarray | None = None
    """Log-probs [S] in the denominator of the ratio, if the trainer recomputed them."""
    update: int = 0
    """Number of the first update in the step that used it, starting at 1; 0: none did."""
    clip_low: float = float("nan")
    clip_high: float = float("nan")
    figures: Mapping[str, np.ndarray] | None = None
    """`log_probs`, `entropy`, `ratio`, `correction` and `marks` [S]; None if no update used it."""


@dataclass(frozen=True)
class SampledGroup:
    """A group of the batch with its index there."""

    index: int
    group: Group
    responses: tuple[SampledResponse, ...]


def write_samples(
    folder: Path,
    header: SampleHeader,
    groups: Iterable[SampledGroup],
    texts: Callable[[list[list[int]]], list[str]],
) -> Path:
    """Write `folder/step-00000012.parquet` atomically, one row group after the other as `groups` are read; return it.

    `texts` decodes the responses whose text was dropped.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"step-{header.step:08d}.parquet"
    partial = path.with_suffix(".partial")
    schema = SCHEMA.with_metadata({_HEADER: json.dumps(asdict(header))})
    rows = (
        {
            "group": group.index,
            "response": number,
            **unicode_prompt_columns(group.group.prompt),
            **_columns(response, header),
        }
        for group in groups
        for number, response in enumerate(group.responses)
    )
    with pq.ParquetWriter(partial, schema, compression="zstd", write_statistics=False) as writer:
        while part := [*islice(rows, ROWS_PER_GROUP)]:
            missing = [row for row in part if not row["text"]]
            for row, text in zip(missing, texts([row["response_token_ids"].tolist() for row in missing]), strict=True):
                row["text"] = without_lone_surrogates(text)
            writer.write_table(pa.Table.from_pylist(part, schema))
    return partial.replace(path)


def read_sample_header(file: pq.ParquetFile) -> SampleHeader:
    """Return a file's header. Raises UserError if the file is of another kind."""
    try:
        return SampleHeader(**json.loads((file.schema_arrow.metadata or {})[_HEADER]))
    except (KeyError, TypeError, ValueError):
        raise UserError("the metadata of the file have no header of sampled rollouts") from None


def token_staleness(spans: Sequence[tuple[int, int]], policy_version: int) -> np.ndarray:
    """Return the staleness of each sampled token, int64 [S]; `spans` are policy versions and token counts."""
    versions, counts = zip(*spans, strict=True) if spans else ((), ())
    return policy_version - np.repeat(np.array(versions, np.int64), np.array(counts, np.int64))


def _columns(response: SampledResponse, header: SampleHeader) -> dict[str, Any]:
    trajectory, figures = response.trajectory, response.figures
    spans = [(span.policy_version, span.num_tokens) for span in trajectory.version_spans]
    columns: dict[str, Any] = {
        "reward": trajectory.reward,
        "finish_reason": trajectory.finish_reason,
        "update": response.update,
        "clip_low": response.clip_low,
        "clip_high": response.clip_high,
        "text": without_lone_surrogates(trajectory.text),
        "turns": json.dumps(trajectory.turns),
        "prompt_token_ids": trajectory.prompt_token_ids,
        "response_token_ids": trajectory.response_token_ids,
        "loss_mask": trajectory.loss_mask,
        "version_spans": [{"policy_version": version, "num_tokens": num} for version, num in spans],
        "rollout_log_probs": trajectory.behaviour_log_probs,
        "advantages": np.asarray(response.advantages, np.float32),
        "proximal_log_probs": response.proximal_log_probs,
    }
    if figures is not None:
        correction = figures["correction"]
        columns |= {name: figures[name] for name in ("log_probs", "entropy", "ratio")}
        columns |= {"correction": None if (correction == 1).all() else correction}
        columns |= {"marks": figures["marks"].astype(np.uint8)}
    return columns | _summary(response, token_staleness(spans, header.policy_version))


def _summary(response: SampledResponse, staleness: np.ndarray) -> dict[str, Any]:
    trajectory, figures = response.trajectory, response.figures
    summary: dict[str, Any] = {
        "num_tokens": len(trajectory.response_token_ids),
        "num_sampled": trajectory.num_sampled,
        "mean_advantage": _mean(response.advantages),
        "mean_staleness": _mean(staleness),
        "max_staleness": int(staleness.max(initial=0)),
        "num_versions": len({span.policy_version for span in trajectory.version_spans}),
    }
    if figures is None:
        return summary
    marks = figures["marks"].astype(np.uint8)
    bits = {"num_upper": UPPER, "num_lower": LOWER, "num_dual": DUAL, "num_rejected": REJECTED}
    summary |= {name: int(np.count_nonzero(marks & bit)) for name, bit in bits.items()}
    return summary | {
        "mean_ratio": _mean(figures["ratio"]),
        "max_ratio": _finite(figures["ratio"]).max(initial=0.0),
        "mean_entropy": _mean(figures["entropy"]),
        "mean_log_prob_diff": _mean(np.abs(figures["log_probs"] - trajectory.behaviour_log_probs)),
    }


def _mean(values: np.ndarray) -> float | None:
    """Return the mean of the finite values; None without one."""
    finite = _finite(np.asarray(values, np.float64))
    return float(finite.mean()) if finite.size else None


def _finite(values: np.ndarray) -> np.ndarray:
    return values[np.isfinite(values)]
