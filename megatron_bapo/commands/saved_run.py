"""What the run directory already holds, and what `train` would do with it."""

from __future__ import annotations

from megatron_bapo.config.checks import resume_conflicts
from megatron_bapo.config.schema import Config
from megatron_bapo.data.rollout_files import rollout_files
from megatron_bapo.files import read_json_object
from megatron_bapo.run_directory import RunDirectory


def saved_run(config: Config, *, rollout_only: bool = False) -> str | None:
    """Say from where the command would continue; None for a run directory without a run."""
    directory, total = RunDirectory(config.run_dir), config.trainer.total_steps
    if rollout_only:
        return _saved_rollouts(directory, total)
    checkpoint = directory.newest_checkpoint
    if checkpoint is None:
        started = f"{directory.root} holds a run without a checkpoint; train starts it from the beginning"
        return started if directory.config.is_file() else None
    state = read_json_object(checkpoint / "state.json")
    step, warm_start_step = state["step"], state["warm_start_step"]
    warm_start_steps = 0 if config.warm_start is None or step > 0 else config.warm_start.num_steps
    if warm_start_step < warm_start_steps:
        return (
            f"{directory.root} was interrupted in its warm start; train continues after {warm_start_step} of "
            f"{warm_start_steps} supervised updates"
        )
    if step < total:
        return (
            f"{directory.root} was interrupted; train continues after step {step} of {total} (checkpoint "
            f"{checkpoint.name})"
        )
    longer = config.trainer.model_copy(update={"total_steps": max(step, total) + 1})
    extensible = not resume_conflicts(config, config.model_copy(update={"trainer": longer}))
    more = ", or raise trainer.total_steps to train longer" if extensible else ""
    return (
        f"{directory.root} is finished ({step} of {total} steps); train would only evaluate what is not evaluated yet "
        f"and export the model again. Choose run_dir=<another folder> for a new run{more}"
    )


def _saved_rollouts(directory: RunDirectory, total: int) -> str | None:
    num = max(rollout_files(directory.rollouts), default=0)
    if num == 0:
        return None
    if num < total:
        return f"{directory.root} was interrupted; train --rollout-only continues after batch {num} of {total}"
    return f"{directory.root} is finished ({num} of {total} rollout batches); choose run_dir=<another folder> for more"
