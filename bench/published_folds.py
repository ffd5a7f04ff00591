"""Cross-validation of the planner's efficiencies over published runs.

python -m bench.published_folds

`plan` has five efficiencies that no data sheet states. For each model, and for each project that publishes runs, they
are estimated over the runs of all others, and the left-out runs are planned with these estimates. An estimate is a
Gauss-Newton step for the logarithms of planned over published seconds, from the values of planning/hardware.py, which
a small penalty keeps where no run tells more. Superseded runs are planned, but nothing is estimated with them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

from bench.published_runs import TOLERANCE, PublishedRun, geometric_mean, published_runs
from bench.report import option_parser, report
from megatron_bapo.planning.hardware import Assumptions

Vector = npt.NDArray[np.floating[Any]]

EFFICIENCIES = (
    "compute_efficiency",
    "fp8_efficiency",
    "attention_efficiency",
    "tile_us",
    "host_expert_layer_ms",
)
DIFFERENCE = 0.02
"""Change of a logarithm for a derivative."""
PENALTY = 0.1
"""Weight of a squared relative change of an efficiency against the squared error of a run."""


def folds(key: Callable[[PublishedRun], str]) -> dict[str, dict[str, float]]:
    """Return for each value of `key` the time ratios of its runs, planned with efficiencies that did not see them."""
    found: dict[str, dict[str, float]] = {}
    for left_out in dict.fromkeys(key(run) for run in _runs()):
        values = estimated([run for run in _runs() if key(run) != left_out])
        found[left_out] = {run.name: run.time_ratio(**values) for run in _runs() if key(run) == left_out}
    return found


def estimated(runs: Sequence[PublishedRun]) -> dict[str, float]:
    """Return the efficiencies that fit these runs best, of those on the way of one Gauss-Newton step."""
    seen = [run for run in runs if not run.exception]
    none = np.zeros(len(EFFICIENCIES))
    logs = _log_ratios(seen, none)
    moved = [_log_ratios(seen, row) for row in DIFFERENCE * np.eye(len(none))]
    slopes = (np.stack(moved, axis=1) - logs[:, None]) / DIFFERENCE
    step = np.linalg.solve(slopes.T @ slopes + PENALTY * np.eye(len(none)), slopes.T @ logs)
    return _values(min((-part * step for part in (1.0, 0.5, 0.25, 0.0)), key=lambda change: _error(seen, change)))


def _error(runs: Sequence[PublishedRun], change: Vector) -> float:
    return float(np.sum(_log_ratios(runs, change) ** 2) + PENALTY * np.sum(change**2))


@cache
def model_folds() -> dict[str, dict[str, float]]:
    return folds(lambda run: run.fields["model"])


def model_spreads() -> dict[bool, tuple[float, float]]:
    """Return the (lowest, highest) planned over published seconds of RL steps, without and with experts.

    Each is planned with efficiencies that were estimated without runs of its model.
    """
    ratios: dict[bool, list[float]] = {False: [], True: []}
    for found in model_folds().values():
        for run in _runs():
            if run.name in found and "step_s" in run.fields["published"] and not run.trains_only:
                ratios[bool(run.architecture.moe_layers)].append(found[run.name])
    return {has_experts: (min(values), max(values)) for has_experts, values in ratios.items()}


def _log_ratios(runs: Sequence[PublishedRun], change: Vector) -> Vector:
    return np.array([_log_ratio(run, tuple(change.tolist())) for run in runs])


@cache
def _log_ratio(run: PublishedRun, change: tuple[float, ...]) -> float:
    return float(np.log(run.time_ratio(**_values(np.array(change)))))


def _values(change: Vector) -> dict[str, float]:
    """Return the efficiencies after these changes of their logarithms."""
    return {name: _default(name) * float(np.exp(by)) for name, by in zip(EFFICIENCIES, change, strict=True)}


@cache
def _runs() -> tuple[PublishedRun, ...]:
    return tuple(run for run in published_runs() if run.group == "steps")


def _default(name: str) -> float:
    return getattr(Assumptions(), name)


def _project(run: PublishedRun) -> str:
    return {"pretraining": "Megatron-Bridge, Megatron-LM", "nemo_rl": "NeMo-RL", "verl": "verl"}[run.fields["base"]]


def main() -> None:
    rows: list[tuple[object, ...]] = []
    ratios: dict[str, float] = {}
    figures: dict[str, float] = {}
    for name, found in ("model", model_folds()), ("project", folds(_project)):
        for left_out, values in found.items():
            each = list(values.values())
            rows.append((f"{name} {left_out}", len(each), geometric_mean(each), min(each), max(each), _near(each)))
        together = {run: ratio for values in found.values() for run, ratio in values.items()}
        ratios |= {f"{name}: {run}": ratio for run, ratio in together.items()}
        figures[f"{name}_geometric_mean"] = geometric_mean(list(together.values()))
        figures[f"{name}_within_25_percent"] = _near(list(together.values()))
    values = estimated(_runs())
    rows += [(f"estimate of {name}", "", f"{value:.3g}", f"now {_default(name):g}") for name, value in values.items()]
    columns = ("left out", "runs", "geometric mean", "lowest", "highest", "share within 25%")
    report("published_folds", columns, rows, ratios=ratios, figures=figures)


def _near(ratios: Sequence[float]) -> float:
    return sum(1 / TOLERANCE <= ratio <= TOLERANCE for ratio in ratios) / len(ratios)


if __name__ == "__main__":
    option_parser(__doc__).parse_args()
    main()
