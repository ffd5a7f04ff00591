"""Sink for Weights & Biases. The optional package wandb is imported when a sink is created."""

from __future__ import annotations

from collections.abc import Sequence
from queue import SimpleQueue
from typing import Any, Final

from pydantic import ValidationError

from megatron_bapo.config.schema import Config
from megatron_bapo.errors import RunError, UserError
from megatron_bapo.metrics.sinks import MetricsRow, Phase, tracker_values

STEP_AXES: Final[dict[Phase, str]] = {
    "warm_start": "warm_start/global_step",
    "train": "training/global_step",
    "validation": "training/global_step",
}
"""x axis of each phase's metrics, in finished steps; validation shares the axis of training."""

FINISH_TIMEOUT_S: Final = 120.0
"""Timeout for uploading the last rows; the rest stays in the run directory for `wandb sync`."""


class WandbSink:
    """Writes all phases to one wandb run, which is created or continued by its id.

    The index of a row among all rows is wandb's step, also in a resumed run, so that wandb ignores rows that it already
    has. A run that has rows, such as one that was restarted, writes offline if the server cannot be reached.

    Raises UserError if wandb's server rejects the API key or wandb rejects an environment variable such as WANDB_MODE,
    RunError if a new run cannot reach the server.
    """

    def __init__(self, config: Config, run_id: str, *, num_rows: int = 0) -> None:
        import wandb
        from wandb.errors import AuthenticationError, CommError, UsageError

        settings = config.logging.wandb
        assert settings is not None, "the sink needs logging.wandb"

        def begin(mode: Any) -> wandb.Run:
            return wandb.init(
                id=run_id,
                mode=mode,
                resume="allow" if mode == "online" else None,  # resuming needs the server
                dir=config.run_dir,
                name=settings.name or config.run_dir.name,
                config=config.model_dump(mode="json"),
                settings=wandb.Settings(console="off", finish_timeout=FINISH_TIMEOUT_S),
                **settings.model_dump(exclude={"name", "mode", "rollouts"}),
            )

        try:
            self._run = begin(settings.mode or wandb.setup().settings.mode)  # the latter is WANDB_MODE, else online
        except ValidationError as error:  # of wandb's settings, such as WANDB_MODE=of
            raise UserError(f"logging.wandb: {error}") from error
        except (UsageError, AuthenticationError) as error:
            raise UserError(
                f"logging.wandb: {error}; set WANDB_API_KEY or run `wandb login`, or set logging.wandb.mode=offline"
            ) from error
        except CommError as error:
            if not num_rows:
                raise RunError(
                    f"logging.wandb: {error}; logging.wandb.mode=offline trains without its server"
                ) from error
            print(f"logging.wandb: {error}; the run goes on offline, see `wandb sync`", flush=True)
            wandb.teardown()  # it still has the run's id in use
            self._run = begin("offline")
        self._num_rows, self._defined = num_rows, set[str]()
        self._waiting: SimpleQueue[tuple[str, Sequence[str], Sequence[Sequence[Any]]]] = SimpleQueue()

    def write(self, row: MetricsRow) -> None:
        axis = STEP_AXES[row["phase"]]
        values = tracker_values(row)
        for name in values.keys() - self._defined:
            self._run.define_metric(name, step_metric=axis)
        self._defined |= values.keys()
        self._run.log({axis: row["step"], **values, **self._tables()}, step=self._num_rows)
        self._num_rows += 1

    def add_table(self, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        """Have the next row log a table; any thread may call this."""
        self._waiting.put((name, columns, rows))

    def close(self) -> None:
        if self._num_rows and (tables := self._tables()):
            self._run.log(tables, step=self._num_rows - 1)  # another step would be the next row's of a resumed run
        self._run.finish()

    def _tables(self) -> dict[str, Any]:
        """Return the tables that wait, by name; two of one name become one."""
        from wandb import Table

        found: dict[str, Any] = {}
        while not self._waiting.empty():
            name, columns, rows = self._waiting.get()
            table = found.setdefault(name, Table(columns=list(columns), allow_mixed_types=True))
            for row in rows:
                table.add_data(*row)
        return found
