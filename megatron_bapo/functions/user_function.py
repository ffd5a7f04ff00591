"""A function named as `path.to.module:function`, the user's or one of ours, for the worker processes."""

from __future__ import annotations

import difflib
import importlib
import inspect
import math
import pkgutil
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any, Literal

from megatron_bapo.errors import UserError


@dataclass(frozen=True)
class Target:
    """Which function is called, and how; JSON values, as it goes to the worker processes."""

    name: str
    """In messages: the key and its value in the configuration."""
    spec: str
    """`path.to.module:function`."""
    arguments: tuple[str, ...]
    """Keywords of every call."""
    returns: Literal["score", "reply"]
    optional_arguments: tuple[str, ...] = ()
    """Keywords that are left out where the function has no such parameter."""
    settings: dict[str, Any] = field(default_factory=dict)
    """Further keywords, the same in every call."""
    withheld: tuple[str, ...] = ()
    """Environment variables that its processes do not get."""


def load(target: Target) -> tuple[Callable[..., Any], bool]:
    """Import the function, and say whether it is a coroutine function; what it returns is for `checked`.

    Raises UserError when it cannot be found, imported or called with the target's keywords.
    """
    module_name, function_name = target.spec.split(":")
    module = _import(module_name, target.name)
    function = getattr(module, function_name, None)
    if function is None:
        raise UserError(f"{target.name}: {module_name} has no {function_name!r}{_nearest(function_name, vars(module))}")
    if not callable(function):
        raise UserError(f"{target.name} is a {type(function).__name__}, not a function")
    try:
        signature = inspect.signature(function)
        known = [name for name in target.optional_arguments if name in signature.parameters]
        signature.bind(**dict.fromkeys([*target.arguments, *known]), **target.settings)
    except (TypeError, ValueError) as error:
        arguments = ", ".join(target.arguments)
        raise UserError(
            f"{target.name} cannot be called with the arguments {arguments} ({error}); "
            f"write it as def {function_name}({arguments}=None)"
        ) from error
    wanted = {*target.arguments, *known}

    def call(**arguments: Any) -> Any:
        return function(**{name: value for name, value in arguments.items() if name in wanted}, **target.settings)

    return call, _is_async(function)


def checked(target: Target, result: Any) -> dict[str, Any] | str | None:
    """The result as what the target must return; raises ValueError when it is something else."""
    return _score(result) if target.returns == "score" else _reply(result)


def _is_async(function: Callable[..., Any]) -> bool:
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(getattr(function, "__call__", None))  # noqa: B004


def _score(result: Any) -> dict[str, Any]:
    """`score`, and as `pred` the answer that was read, if the function says it: of one meaning, one text."""
    score, answer = (result.get("score"), result.get("pred")) if isinstance(result, dict) else (result, None)
    try:
        number = float(score)  # pyright: ignore[reportArgumentType]
    except (TypeError, ValueError):
        number = math.nan
    if isinstance(score, str) or not math.isfinite(number):
        raise ValueError(f"it returned {result!r:.120}; a reward is a finite number, or a dict with one under 'score'")
    return {"score": number, "pred": None if answer is None else str(answer)}


def _reply(result: Any) -> str | None:
    if result is not None and not (isinstance(result, str) and result):
        raise ValueError(f"it returned {result!r:.120}; a reply is a text that is not empty, or None at the end")
    return result


def _import(name: str, target: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise UserError(f"{target}: importing {name} failed, as it needs {error.name!r}") from error
        raise UserError(
            f"{target}: there is no module {error.name!r}{_nearest(error.name, _siblings(error.name))}; "
            "modules are looked for in the folder where the run is started and in PYTHONPATH"
        ) from error
    except Exception as error:  # The user's own code runs at import.
        trace = "\n".join(traceback.format_exc().splitlines()[-4:])
        raise UserError(f"{target}: importing {name} failed:\n{trace}") from error


def _siblings(name: str) -> list[str]:
    """Importable modules of the package in which `name` was looked for."""
    package, _, _ = name.rpartition(".")
    paths = getattr(importlib.import_module(package), "__path__", []) if package else None
    return [module.name for module in pkgutil.iter_modules(paths, prefix=f"{package}." if package else "")]


def _nearest(name: str, known: Any) -> str:
    matches = difflib.get_close_matches(name, known, n=1)
    return f"; did you mean {matches[0]!r}?" if matches else ""
