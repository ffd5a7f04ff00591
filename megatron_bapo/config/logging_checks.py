"""Checks that the packages and trainer ranks that the section `logging` needs are there."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from importlib.util import find_spec

from megatron_bapo.config.schema import Config

_MLFLOW_DATABASE = ("sqlalchemy", "alembic")
"""Packages that mlflow-skinny leaves out, for tracking without a server."""


def logging_problems(config: Config) -> Iterator[str]:
    ranks, world = config.logging.profile_ranks, config.parallel.world_size
    if not all(rank < world for rank in ranks):
        yield (
            f"logging.profile_ranks={list(ranks)} must be trainer ranks, which are 0 to {world - 1} "
            f"(parallel.world_size={world}); remove the others"
        )


def missing_packages(config: Config) -> Iterator[str]:
    """Yield the optional packages that the configuration needs and this machine lacks."""
    wandb, mlflow = config.logging.wandb, config.logging.mlflow
    if wandb is not None:
        yield from _missing("logging.wandb", ["wandb"], "wandb")
    if mlflow is not None:
        yield from _missing("logging.mlflow", ["mlflow"], "mlflow-skinny")
        uri = mlflow.resolved_uri(config.run_dir)
        if not uri.startswith(("http:", "https:", "databricks")):
            yield from _missing("logging.mlflow without a tracking server", _MLFLOW_DATABASE, *_MLFLOW_DATABASE)


def _missing(key: str, modules: Sequence[str], *packages: str) -> Iterator[str]:
    # A folder `wandb`, which wandb leaves where programs run, is found too, as a namespace package without an origin.
    if any(getattr(find_spec(module), "origin", None) is None for module in modules):
        names = " ".join(packages)
        plural, verb = ("s", "are") if len(packages) > 1 else ("", "is")
        yield (
            f"{key} needs the package{plural} {names}, which {verb} not installed: pip install {names}, or "
            "remove the section"
        )
