"""Hints for options of slime, OpenRLHF and TRL, such as `train CONFIG --rollout-batch-size 32`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from typer.core import TyperCommand

from megatron_bapo.cli.app import messages
from megatron_bapo.errors import UserError

if TYPE_CHECKING:
    from typer import Context


class KeyCommand(TyperCommand):
    """A command with KEY=VALUE arguments that names our key when it gets an option of another project."""

    def parse_args(self, ctx: Context, args: list[str]) -> list[str]:
        own = {option for parameter in self.params for option in parameter.opts}
        for position, argument in enumerate(args):
            name, equals, value = argument.partition("=")
            if name.startswith("--") and name not in own:
                following = args[position + 1 : position + 2]
                given = [value] if equals else [each for each in following if not each.startswith("-")]
                with messages():
                    _refuse(name, given[0] if given else "true", args)
        return super().parse_args(ctx, args)


def _refuse(option: str, value: str, args: Sequence[str]) -> None:
    """Raise UserError if the option is another project's."""
    from megatron_bapo.config.foreign_hints import option_hint
    from megatron_bapo.config.yaml_text import parse_yaml

    if hint := option_hint(option, parse_yaml(value, f"the value of {option}"), _known(args)):
        raise UserError(f"{option} is no option here, where keys are given as KEY=VALUE; {hint}")


def _known(args: Sequence[str]) -> Callable[[str], Any]:
    """Return the values of the configuration that the arguments name, else the defaults."""
    from megatron_bapo.config.loading import load_config, value_in
    from megatron_bapo.config.schema import Config

    files = [argument for argument in args if argument.endswith((".yaml", ".yml"))]
    overrides = [argument for argument in args if "=" in argument and not argument.startswith("-")]
    try:
        document = load_config(files[0], overrides).model_dump(mode="json")
    except (IndexError, UserError):
        document = {}
    return partial(value_in, Config, document)
