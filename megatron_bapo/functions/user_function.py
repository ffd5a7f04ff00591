"""Load a function by its `path.to.module:function` name, the user's or a built-in one, in a worker process."""

from __future__ import annotations

import difflib
import importlib
import inspect
import math
import pkgutil
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from types import ModuleType
from typing import Any, Literal

from megatron_bapo.errors import UserError


@dataclass(frozen=True)
class Target:
    """A function and how it is called. All values are JSON values, because they are sent to the worker processes."""

    name: str
    """Configuration key and value, for messages."""
    spec: str
    """`path.to.module:function`."""
    arguments: tuple[str, ...]
    """Keyword arguments of every call."""
    returns: Literal["score", "reply", "turns", "values"]
    """What the result is; `values` are tensors, which no process sends, and which their caller checks."""
    optional_arguments: tuple[str, ...] = ()
    """Keyword arguments that are passed only if the function has such parameters."""
    settings: dict[str, Any] = field(default_factory=dict)
    """Further keyword arguments with the same value in every call."""
    withheld: tuple[str, ...] = ()
    """Environment variables that are removed from the worker processes."""
    memory_key: str = ""
    """Configuration key of `memory_gib`, for messages."""
    memory_gib: float | None = None
    """Limit of the memory of each worker process in GiB, None for no limit."""

    @property
    def memory_limit(self) -> str:
        """The memory limit with its value, for messages."""
        return f"memory limit {self.memory_key}={self.memory_gib:g}"

    @property
    def memory_advice(self) -> str:
        return f"raise its {self.memory_limit}, or set it to null for no limit"


@dataclass(frozen=True)
class LoadedFunction:
    """A function in its process."""

    call: Callable[..., Any]
    """Takes `arguments` as keywords; its result needs `checked`."""
    is_async: bool
    """Whether it is a coroutine function."""
    arguments: tuple[str, ...]
    """Keyword arguments that it takes: those of every call, and the optional ones that are among its parameters."""


def load(target: Target) -> LoadedFunction:
    """Import the function.

    Raises UserError if it cannot be found, imported or called with the target's keyword arguments.
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
    return LoadedFunction(partial(function, **target.settings), _is_async(function), (*target.arguments, *known))


def checked(target: Target, result: Any) -> Any:
    """Return the result in the target's return type. Raises ValueError if it has another type."""
    return {"score": _score, "reply": _reply, "turns": _turns}[target.returns](result)


def _is_async(function: Callable[..., Any]) -> bool:
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(getattr(function, "__call__", None))  # noqa: B004


def _score(result: Any) -> dict[str, Any]:
    """Return `score`, and as `pred` the extracted answer if the function returns one."""
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
        raise ValueError(f"it returned {result!r:.120}; a reply is a non-empty text, or None at the end")
    return result


def _turns(result: Any) -> list[str]:
    if (
        not isinstance(result, list)
        or len(result) % 2 == 0
        or not all(isinstance(text, str) and text for text in result)
    ):
        raise ValueError(
            f"it returned {result!r:.120}; a demonstration is a list of non-empty texts: the policy's turns with a "
            "reply between each two"
        )
    return result


def _import(name: str, target: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise UserError(f"{target}: importing {name} failed, as it needs {error.name!r}") from error
        raise UserError(
            f"{target}: there is no module {error.name!r}{_nearest(error.name, _siblings(error.name))}; "
            "modules are searched in the folder where the run is started and in PYTHONPATH"
        ) from error
    except Exception as error:  # The import executes the user's code.
        trace = "\n".join(traceback.format_exc().splitlines()[-4:])
        raise UserError(f"{target}: importing {name} failed:\n{trace}") from error


def _siblings(name: str) -> list[str]:
    """Return the importable modules of the package that should contain `name`."""
    package, _, _ = name.rpartition(".")
    paths = getattr(importlib.import_module(package), "__path__", []) if package else None
    return [module.name for module in pkgutil.iter_modules(paths, prefix=f"{package}." if package else "")]


def _nearest(name: str, known: Any) -> str:
    matches = difflib.get_close_matches(name, known, n=1)
    return f"; did you mean {matches[0]!r}?" if matches else ""
