"""The HTML report of a run directory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron_bapo.config.loading import dump_config, load_config
from megatron_bapo.errors import UserError
from megatron_bapo.metrics.report import write_report
from megatron_bapo.metrics.sinks import read_rows
from megatron_bapo.run_directory import RunDirectory


def write_run_report(run_dir: Path) -> Path:
    """Write the HTML report of a run directory and return its path.

    Raises UserError if the directory has no metrics.
    """
    directory = RunDirectory(run_dir)
    if not directory.metrics.is_file():
        raise UserError(f"{run_dir} holds no metrics.jsonl; give the folder of a run that has trained")
    config = load_config(directory.config, [])
    rows = read_rows(directory.metrics)
    before, after = accuracies(rows)
    train = [row for row in rows if row["phase"] == "train"]
    parallel, num_engines = config.parallel, config.rollout.num_engines
    summary: dict[str, Any] = {
        "accuracy_before": before,
        "accuracy_after": after,
        "model": config.model.path or "built for this run",
        "layout": f"TP {parallel.tensor_model_parallel_size}, PP {parallel.pipeline_model_parallel_size}, "
        f"DP {parallel.data_parallel_size}; {num_engines} vLLM engine{'s' if num_engines > 1 else ''}",
        "steps": f"{len(train)} of {config.trainer.total_steps}, {config.trainer.updates_per_step} updates each",
        "minutes": f"{rows[-1]['time_s'] / 60:.1f}" if rows else "0",
        "seed": config.seed,
    } | _starts(directory)
    return write_report(
        run_dir,
        title=f"{config.algorithm.function or config.algorithm.objective.upper()} run {run_dir.name}",
        summary=summary,
        rows=rows,
        samples=read_rows(directory.samples) if directory.samples.is_file() else [],
        config_yaml=dump_config(config),
    )


def _starts(directory: RunDirectory) -> dict[str, str]:
    """Return commit and hardware of all starts of the run, each once; nothing for a run of an earlier version."""
    rows = read_rows(directory.starts) if directory.starts.is_file() else []
    facts = {
        "commit": dict.fromkeys(row["commit"] or f"version {row['version']}" for row in rows),
        "hardware": dict.fromkeys(row["hardware"] for row in rows),
    }
    return {name: ", then ".join(values) for name, values in facts.items() if values}


def accuracies(rows: Sequence[Mapping[str, Any]]) -> tuple[float | None, float | None]:
    """Return the held-out accuracies of the first and the last evaluation, None if there is none."""
    values = [
        value
        for row in rows
        if row["phase"] == "validation"
        for name, value in row["metrics"].items()
        if name.startswith("val/mean@")
    ]
    return (values[0], values[-1]) if values else (None, None)
