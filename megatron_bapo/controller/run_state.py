"""The state of a run that a checkpoint saves, and the check whether a run can be resumed."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from megatron_bapo.config.checks import resume_conflicts
from megatron_bapo.config.loading import load_config
from megatron_bapo.config.schema import Config
from megatron_bapo.errors import UserError
from megatron_bapo.files import read_json_object
from megatron_bapo.run_directory import RunDirectory


@dataclass
class RunState:
    """Progress counters and data state of a run; saved as JSON in each checkpoint."""

    warm_start_step: int = 0
    """Number of supervised updates done."""
    step: int = 0
    """Number of rollout batches trained on."""
    update: int = 0
    """Number of optimizer updates done, including supervised ones; names the checkpoint."""
    policy_version: int = 0
    """Policy version that the engines serve; 0 is the initial model."""
    data: dict[str, Any] = field(default_factory=dict)
    """Position of the prompt stream, and the prompts that are open."""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, saved: dict[str, Any]) -> RunState:
        return cls(**{name: saved[name] for name in cls.__dataclass_fields__})


def check_resumable(config: Config, directory: RunDirectory, *, rollout_only: bool = False) -> None:
    """Raise UserError if the directory has a run of another kind, with another configuration or a damaged state."""
    if directory.is_rollout_only and not rollout_only:
        raise UserError(
            f"{directory.root} holds the rollouts of train --rollout-only; to train on them choose run_dir=<another "
            f"folder> and --rollouts-from {directory.rollouts}"
        )
    if rollout_only and directory.metrics.exists():
        raise UserError(f"{directory.root} holds a training run; choose run_dir=<another folder> for --rollout-only")
    if not directory.config.is_file() or (directory.newest_checkpoint is None and not directory.is_rollout_only):
        return  # without a checkpoint nothing depends on the old configuration
    conflicts = resume_conflicts(load_config(directory.config), config)
    if conflicts:
        listed = "\n".join(f"  {conflict}" for conflict in conflicts)
        raise UserError(
            f"{directory.root} holds a run with another configuration:\n{listed}\n"
            "Choose run_dir=<another folder>, delete that folder, or use its configuration"
        )
    if (newest := directory.newest_checkpoint) is not None:
        _check_state(newest)


def _check_state(checkpoint: Path) -> None:
    path = checkpoint / "state.json"
    saved = read_json_object(path)
    names = ("warm_start_step", "step", "update", "policy_version", "adam_step")
    wrong = [name for name in names if type(saved.get(name)) is not int or saved[name] < 0]
    rules = [f"{name} must be a whole number of at least 0" for name in wrong]
    if not isinstance(saved.get("data"), dict):
        rules.append("data must be an object")
    if rules:
        raise UserError(
            f"{path} is damaged: {', '.join(rules)}; delete {checkpoint}, and the run continues from the checkpoint "
            "before it"
        )
