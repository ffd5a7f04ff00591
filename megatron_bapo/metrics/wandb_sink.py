"""Metrics to Weights & Biases; wandb, an optional package, is imported when a sink is made."""

from __future__ import annotations

from typing import Final

from megatron_bapo.config.schema import Config
from megatron_bapo.errors import RunError, UserError
from megatron_bapo.metrics.sinks import MetricsRow, Phase

STEP_AXES: Final[dict[Phase, str]] = {
    "warm_start": "warm_start/global_step",
    "train": "training/global_step",
    "validation": "training/global_step",
}
"""What a phase's metrics are drawn over: finished steps, of the training also where held-out prompts are evaluated."""

FINISH_TIMEOUT_S: Final = 120.0
"""In which the last rows go out; what does not stays in the run directory, for `wandb sync`."""


class WandbSink:
    """Writes every phase into one wandb run, created or continued by its id.

    Training's metrics and `val/*` keep their names, the others come under their phase's. A row's place among all rows
    is wandb's own step, also in a resumed run: what it repeats, wandb has already, and leaves out.

    Raises UserError without a key that wandb's server takes, RunError where the server does not answer.
    """

    def __init__(self, config: Config, run_id: str, *, num_rows: int = 0) -> None:
        import wandb
        from wandb.errors import AuthenticationError, CommError, UsageError

        settings = config.logging.wandb
        assert settings is not None, "a sink is configured"
        try:
            self._run = wandb.init(
                id=run_id,
                resume="allow" if settings.mode == "online" else None,  # offline there is nobody to ask
                dir=config.run_dir,
                name=settings.name or config.run_dir.name,
                config=config.model_dump(mode="json"),
                settings=wandb.Settings(console="off", finish_timeout=FINISH_TIMEOUT_S),
                **settings.model_dump(exclude={"name"}),
            )
        except (UsageError, AuthenticationError) as error:
            raise UserError(
                f"logging.wandb: {error}; set WANDB_API_KEY or run `wandb login`, or set logging.wandb.mode=offline"
            ) from error
        except CommError as error:
            raise RunError(f"logging.wandb: {error}; logging.wandb.mode=offline trains without its server") from error
        self._num_rows, self._known = num_rows, set[str]()

    def write(self, row: MetricsRow) -> None:
        phase, axis = row["phase"], STEP_AXES[row["phase"]]
        values: dict[str, float] = {axis: row["step"]}
        for name, value in row["metrics"].items():
            if value is None:
                continue
            if phase != "train" and not name.startswith("val/"):
                name = f"{phase}/{name}"
            if name not in self._known:
                self._run.define_metric(name, step_metric=axis)
                self._known.add(name)
            values[name] = value
        self._run.log(values, step=self._num_rows)
        self._num_rows += 1

    def close(self) -> None:
        self._run.finish()
