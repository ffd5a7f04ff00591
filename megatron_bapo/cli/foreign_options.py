"""Hints for options of slime, OpenRLHF and TRL, such as `train CONFIG --rollout-batch-size 32`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
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
        unknown = dict[str, str]()
        for position, argument in enumerate(args):
            name, equals, value = argument.partition("=")
            if name.startswith("--") and name not in own:
                following = args[position + 1 : position + 2]
                given = [value] if equals else [each for each in following if not each.startswith("-")]
                unknown[name] = given[0] if given else "true"
        if unknown:
            with messages():
                _refuse(unknown, args)
        return super().parse_args(ctx, args)


def _refuse(unknown: Mapping[str, str], args: Sequence[str]) -> None:
    """Raise UserError with one line for each option, given with its value, that is another project's or a key."""
    from megatron_bapo.config.foreign_hints import option_hint, with_given
    from megatron_bapo.config.loading import dotted_keys
    from megatron_bapo.config.schema import Config
    from megatron_bapo.config.yaml_text import parse_yaml

    values = {option: parse_yaml(value, f"the value of {option}") for option, value in unknown.items()}
    known = with_given(((option.lstrip("-"), value) for option, value in values.items()), _known(args))
    keys = {*dotted_keys(Config)}
    hints = {
        option: f"write {option[2:]}={unknown[option]}" if option[2:] in keys else option_hint(option, value, known)
        for option, value in values.items()
    }
    lines = [f"{option}: {hint}" for option, hint in hints.items() if hint]
    if lines:
        raise UserError("\n  ".join(["keys are given as KEY=VALUE here, and not as options:", *lines]))


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
