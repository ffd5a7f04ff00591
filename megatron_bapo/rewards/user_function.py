"""A reward function of the user's own, named as `path.to.module:function`."""

from __future__ import annotations

import asyncio
import difflib
import importlib
import inspect
import math
import pkgutil
import traceback
from collections.abc import Callable
from types import ModuleType
from typing import Any

from megatron_bapo.errors import UserError
from megatron_bapo.rewards.score import Score

ARGUMENTS = ("data_source", "solution_str", "ground_truth", "extra_info")


def load(spec: str) -> Callable[..., Score]:
    """Import the function and make it return a finite float, whatever it is allowed to return.

    It is called with verl's keywords (ARGUMENTS), may be a coroutine function, and returns a number or a dict with
    `score` and, if it likes, the answer that it read as `pred`. Raises UserError when it cannot be found, imported or
    called so.
    """
    module_name, function_name = spec.split(":")
    module = _import(module_name, spec)
    function = getattr(module, function_name, None)
    if function is None:
        raise UserError(
            f"reward.function={spec}: {module_name} has no {function_name!r}{_nearest(function_name, vars(module))}"
        )
    if not callable(function):
        raise UserError(f"reward.function={spec} is a {type(function).__name__}, not a function")
    try:
        signature = inspect.signature(function)
        signature.bind(**dict.fromkeys(ARGUMENTS))
    except (TypeError, ValueError) as error:
        raise UserError(
            f"reward.function={spec} cannot be called with the arguments {', '.join(ARGUMENTS)} ({error}); "
            f"write it as def {function_name}(data_source, solution_str, ground_truth, extra_info=None)"
        ) from error

    def compute_score(**arguments: Any) -> Score:
        result = function(**arguments)
        if inspect.iscoroutine(result):
            result = asyncio.run(result)
        return _number(result)

    return compute_score


def _number(result: Any) -> Score:
    score, answer = (result.get("score"), result.get("pred")) if isinstance(result, dict) else (result, None)
    try:
        number = float(score)  # pyright: ignore[reportArgumentType]
    except (TypeError, ValueError):
        number = math.nan
    if isinstance(score, str) or not math.isfinite(number):
        raise ValueError(f"it returned {result!r:.120}; a reward is a finite number, or a dict with one under 'score'")
    return Score(number, None if answer is None else str(answer))


def _import(name: str, spec: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise UserError(f"reward.function={spec}: importing {name} failed, as it needs {error.name!r}") from error
        raise UserError(
            f"reward.function={spec}: there is no module {error.name!r}{_nearest(error.name, _siblings(error.name))}; "
            "modules are looked for in the folder where the run is started and in PYTHONPATH"
        ) from error
    except Exception as error:  # The user's own code runs at import.
        trace = "\n".join(traceback.format_exc().splitlines()[-4:])
        raise UserError(f"reward.function={spec}: importing {name} failed:\n{trace}") from error


def _siblings(name: str) -> list[str]:
    """Importable modules of the package in which `name` was looked for."""
    package, _, _ = name.rpartition(".")
    paths = getattr(importlib.import_module(package), "__path__", []) if package else None
    return [module.name for module in pkgutil.iter_modules(paths, prefix=f"{package}." if package else "")]


def _nearest(name: str, known: Any) -> str:
    matches = difflib.get_close_matches(name, known, n=1)
    return f"; did you mean {matches[0]!r}?" if matches else ""
