"""Lengths of the responses that asynchronous runs train on, against a synchronous run.

python -m bench.stale_groups            # four real runs on two cores: 8 minutes
python -m bench.stale_groups --runs DIR # keep the run directories
python -m bench.stale_groups trainer.total_steps=100 rollout.max_staleness=4 # other runs

The runs have the same prompts, and a learning rate so small that the policy stays the same. Sampling seeds depend on
the prompt's number only, so that a response is the same in all runs unless a weight update interrupts it: `drain`
differs from `sync` only by which groups are trained on, and the others also by chance, which the standard error shows.
Responses are those of `bench.rollout_modes`, with geometric lengths.
"""

from __future__ import annotations

import tempfile
from contextlib import ExitStack
from pathlib import Path
from statistics import mean, stdev

import psutil

from bench.report import option_parser, report
from bench.rollout_modes import step_s, trained
from megatron_bapo.metrics.sinks import read_rows

SAME_POLICY = (
    *("optimizer.lr=1e-30", "trainer.ppo_epochs=1", "trainer.total_steps=40"),
    *("rollout.max_staleness=1", "rollout.max_response_length=768"),
)
RUNS = {
    "sync": ("rollout.mode=sync",),
    "async, drain": ("rollout.mode=async", "rollout.on_weight_update=drain"),
    "async, wait": ("rollout.mode=async", "rollout.on_weight_update=keep"),
    "async, drop": ("rollout.mode=async", "rollout.on_weight_update=keep", "rollout.on_stale=drop"),
}


def mean_length(run_dir: Path) -> tuple[float, float]:
    """Return the mean number of tokens of the responses that the run was trained on, and its standard error."""
    rows = [row["metrics"] for row in read_rows(run_dir / "metrics.jsonl") if row["phase"] == "train"]
    lengths = [row["response_length/mean"] for row in rows]
    return mean(lengths), stdev(lengths) / len(lengths) ** 0.5


def dropped_share(run_dir: Path) -> float:
    """Return the share of the prompts that were started whose groups were dropped because they had become too old."""
    last = [row["metrics"] for row in read_rows(run_dir / "metrics.jsonl") if row["phase"] == "train"][-1]
    dropped, used = (last[f"rollout/accounting/{name}"] for name in ("dropped_stale", "trained"))
    return dropped / (dropped + used)


def main() -> None:
    parser = option_parser(__doc__)
    parser.add_argument("--runs", type=Path, metavar="DIR", help="an empty folder for the run directories")
    parser.add_argument("changes", nargs="*", metavar="key=value", help="overrides of the runs' configuration")
    arguments = parser.parse_intermixed_args()
    figures = {"others_cpu_percent_at_start": psutil.cpu_percent(2.0)}
    rows: list[tuple[object, ...]] = []
    ratios: dict[str, float] = {}
    with ExitStack() as stack:
        folder = arguments.runs or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        folder.mkdir(parents=True, exist_ok=True)
        first: tuple[float, float] | None = None
        for name, mode in RUNS.items():
            run_dir = trained(folder.absolute(), name, (*SAME_POLICY, *mode, *arguments.changes))
            (length, error), seconds, dropped = mean_length(run_dir), step_s(run_dir), dropped_share(run_dir)
            first = first or (length, seconds)
            rows.append((name, length, error, length / first[0], dropped, seconds, seconds / first[1]))
            key = name.replace(", ", "_")
            figures |= {f"{key}_tokens": round(length, 2), f"{key}_standard_error": round(error, 2)}
            figures |= {f"{key}_step_s": round(seconds, 3), f"{key}_dropped": round(dropped, 3)}
            if name != "sync":
                ratios |= {f"{key}_length": round(length / first[0], 4), f"{key}_step": round(seconds / first[1], 3)}
            print(f"{name}: {length:.1f} tokens a response", flush=True)
    header = ("run", "mean tokens", "error", "to sync", "dropped", "s/step", "to sync")
    report("stale_groups", header, rows, ratios=ratios, figures=figures)


if __name__ == "__main__":
    main()
