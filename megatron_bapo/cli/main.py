"""Entry point of `megatron-bapo`: the application with all its commands, imported in the order of the help text."""

from megatron_bapo.cli import (  # noqa: F401, I001
    train, plan, rehearse, eval, submit, status, logs, cancel, report, view, doctor, translate,
)  # fmt: skip
from megatron_bapo.cli.app import app

__all__ = ["app"]
