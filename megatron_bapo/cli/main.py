"""Entry point of `megatron-bapo`: the application with all its commands, imported in the order of the help text."""

import sys

from megatron_bapo.errors import INTERRUPTED

try:
    from megatron_bapo.cli import (  # noqa: F401, I001
        train, plan, rehearse, eval, submit, status, logs, cancel, report, view, doctor, translate,
    )  # fmt: skip
    from megatron_bapo.cli.app import app
except KeyboardInterrupt:
    print("interrupted", file=sys.stderr)
    sys.exit(INTERRUPTED)

__all__ = ["app"]
