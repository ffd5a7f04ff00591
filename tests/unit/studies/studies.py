"""A small study, and run directories like those that its runs would leave."""

from pathlib import Path
from typing import Any

import numpy as np
import yaml

from megatron_bapo.metrics.sinks import JsonlSink
from megatron_bapo.metrics.token_table import write_token_table
from megatron_bapo.studies.plan import StudyRun, expand
from megatron_bapo.studies.study import Study, load_study

ROOT = Path(__file__).parents[3]
NUM_UPDATES = 8


def document(tmp_path: Path) -> dict[str, Any]:
    return {
        "run_dir": str(tmp_path / "runs"),
        "output": str(tmp_path / "output"),
        "base": str(ROOT / "configs/spell_backward.yaml"),
        "seeds": [1, 2],
        "updates_per_step": [4, 1],
        "num_updates": NUM_UPDATES,
        "common": {"trainer": {"ppo_mini_batch_size": 16}, "parallel": {"world_size": 1}},
        "start": {"warm_start": {"num_steps": 5}, "parallel": {"tensor_model_parallel_size": 1}},
        "continued": {"optimizer": {"lr": 1e-3}, "parallel": {"tensor_model_parallel_size": 1}},
        "arms": {
            "fixed": {"label": "PPO", "overrides": {"algorithm": {"objective": "ppo", "clip_ratio_high": 0.28}}},
            "moving": {"label": "BAPO", "updates_per_step": [4]},
        },
        "columns": {"reward": "critic/score/mean", "accuracy": "val/mean@4", "entropy": "actor/entropy"},
        "tokens_of": {"fixed": [4]},
        "window": 4,
        "final_updates": 4,
        "summary": ["reward", "accuracy"],
        "figures": {
            "curves": {
                "kind": "curves",
                "title": "Curves",
                "arms": ["fixed", "moving"],
                "updates_per_step": [4, 1],
                "panels": {"reward": "reward", "entropy": "nats"},
            },
            "boxes": {"kind": "ratio_boxes", "title": "Boxes", "arms": ["fixed"], "updates_per_step": [4]},
            "scatter": {"kind": "token_scatter", "title": "Dots", "arms": ["fixed"], "updates_per_step": [4]},
        },
    }


def make_study(tmp_path: Path, **values: Any) -> tuple[Study, list[StudyRun]]:
    path = tmp_path / "study.yaml"
    path.write_text(yaml.safe_dump(document(tmp_path) | values, sort_keys=False))
    study = load_study(path)
    return study, expand(study)


def write_run(run: StudyRun) -> None:
    """Write the run directory of a finished run.

    The reward is 100 x seed plus the number of updates before the step; the entropy is the number of the update.
    """
    run.directory.create()
    run.marker.touch()
    if run.cell is None:
        return
    size, seed = run.cell.updates_per_step, run.cell.seed
    rng = np.random.default_rng(seed)
    with JsonlSink(run.directory.updates) as updates, JsonlSink(run.directory.metrics) as metrics:
        metrics.write({"step": 0, "phase": "validation", "time_s": 0.0, "metrics": {"val/mean@4": 0.125}})
        for step in range(1, NUM_UPDATES // size + 1):
            done = (step - 1) * size
            for update in range(done + 1, done + size + 1):
                updates.write({"step": step, "update": update, "metrics": {"actor/entropy": float(update)}})
            values = {"critic/score/mean": 100.0 * seed + done, "actor/entropy": -1.0}
            metrics.write({"step": step, "phase": "train", "time_s": 0.0, "metrics": values})
            table = {
                "update": np.repeat(np.arange(1, size + 1), 10),
                "log_ratio": rng.normal(0, 0.5, 10 * size),
                "prob": rng.random(10 * size),
                "entropy": rng.random(10 * size),
                "advantage_sign": np.tile([1, -1, 0, 1, -1], 2 * size),
            }
            write_token_table(run.directory.tokens, step, {n: x.astype(np.float32) for n, x in table.items()})
        end = NUM_UPDATES // size
        metrics.write({"step": end, "phase": "validation", "time_s": 0.0, "metrics": {"val/mean@4": seed / 4}})
