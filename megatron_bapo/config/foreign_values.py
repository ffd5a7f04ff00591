"""Conversions of other projects' values to ours, which the rows of foreign_keys.yaml name."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import PurePosixPath
from typing import Any, NamedTuple, get_args

from megatron_bapo.config.hub_ids import is_hub_id
from megatron_bapo.config.lora import TargetModule

FUSED_MODULES = {"linear_qkv": "qkv", "linear_proj": "o", "linear_fc1": ("gate", "up"), "linear_fc2": ("down",)}
"""Megatron's linear layers and the beginnings of the names of those of Hugging Face models that they consist of."""
RECOMPUTED = ("core_attn", "mlp", "moe")
"""Modules that parallel.recompute_modules accepts."""
TRACKERS = ("console", "file", "tensorboard", "wandb", "mlflow")


class NoCounterpart(Exception):
    """Our keys cannot express this value; the message gives the reason and what to do instead."""


class ByHand(Exception):
    """The result depends on several keys or on unknown values; the message says what to compute."""


class Foreign(NamedTuple):
    """A value of another project with what its conversion may need."""

    value: Any
    ours: tuple[str, ...]
    """Our keys, from the row."""
    choices: Mapping[Any, Any]
    """The `values` of the row."""
    other: Any
    """Value of the key that the row's `with` names; None if unknown."""
    note: str
    known: Callable[[str], Any]
    """Returns the value of one of our keys, or None if it has none yet."""


class Converted(NamedTuple):
    values: dict[str, Any]
    """Values by our keys; empty where our default applies."""
    how: str = ""
    """Arithmetic of the conversion, for a comment."""
    to_do: str = ""
    """What the user has to do in addition."""


class Conversion(NamedTuple):
    convert: Callable[[Foreign], Converted]
    words: str = ""
    """Description for docs/guides/coming_from.md."""
    stage: int = 0
    """0 needs none of our values, 1 needs those of stage 0 (rollout.n), 2 needs those of stage 1 (batch sizes)."""


def _all(foreign: Foreign, value: Any, how: str = "") -> Converted:
    return Converted(dict.fromkeys(foreign.ours, value), how)


def _number(value: Any) -> float:
    """Return a value as a number. Raises ByHand if it is not one."""
    try:
        number = float(value) if not isinstance(value, bool) else math.nan
    except (TypeError, ValueError):
        number = math.nan
    if not math.isfinite(number):
        raise ByHand(f"{value!r} is not a number")
    return int(number) if number == int(number) else number


def _needed(foreign: Foreign, key: str) -> int:
    """Return the value of one of our keys that counts something. Raises ByHand if it is not a whole number above 0."""
    value = foreign.known(key)
    if not whole(value):
        raise ByHand(f"it depends on {key}" + ("" if value is None else f", which is {value!r}"))
    return value


def whole(value: Any) -> int:
    """Return a positive whole number; 0 for anything else."""
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else 0


def _updates(foreign: Foreign) -> int:
    """Return the number of optimizer updates per rollout batch."""
    batch, mini_batch = (_needed(foreign, f"trainer.{key}") for key in ("train_batch_size", "ppo_mini_batch_size"))
    return max(1, _needed(foreign, "trainer.ppo_epochs") * batch // mini_batch)


def _same(foreign: Foreign) -> Converted:
    return _all(foreign, foreign.value)


def _weight_bounds(foreign: Foreign) -> Converted:
    """Truncate weights at one bound; verl's `lower_upper` rejects (IcePop), at the level of the weights."""
    lower, _, upper = str(foreign.value).rpartition("_")
    truncation, level, highest, lowest = foreign.ours
    values = {truncation: _number(upper)}
    if lower and foreign.known(level) is not None:
        raise NoCounterpart(f"it takes the place of rollout_rs, which is {foreign.known(level)}, and there is only one")
    if lower and foreign.other is None:
        raise ByHand("rollout_rs is the level of verl's rollout_is")
    if lower:
        values |= {level: foreign.other, highest: _number(upper), lowest: _number(lower)}
    return Converted(values)


def _positive(foreign: Foreign) -> Converted:
    value = _number(foreign.value)
    return _all(foreign, value) if value > 0 else Converted({})


def _prompts(foreign: Foreign) -> Converted:
    prompts, n = _number(foreign.value), _needed(foreign, "rollout.n")
    if prompts <= 0:
        raise ByHand("it is 0 prompts there")
    return _all(foreign, prompts * n, f"{prompts} prompts x rollout.n={n}")


def _rollout_batches(foreign: Foreign) -> Converted:
    batches = _number(foreign.value)
    if batches <= 0:
        return Converted({})
    updates = _updates(foreign)
    return _all(foreign, batches * updates, f"{batches} rollout batches x {updates} updates")


def _from_updates(foreign: Foreign) -> Converted:
    num, updates = _number(foreign.value), _updates(foreign)
    if num <= 0:
        return Converted({})
    return _all(foreign, math.ceil(num / updates), f"{num} updates / {updates} updates of a rollout batch")


def _fraction_of_run(foreign: Foreign) -> Converted:
    fraction = _number(foreign.value)
    if fraction <= 0:
        return Converted({})
    total, updates = _needed(foreign, "trainer.total_steps"), _updates(foreign)
    return _all(foreign, round(fraction * total * updates), f"{fraction} of {total} steps x {updates} updates")


def _longest(foreign: Foreign) -> int:
    return _needed(foreign, "data.max_prompt_length") + _needed(foreign, "rollout.max_response_length")


def _sequences(foreign: Foreign) -> Converted:
    num, longest = _number(foreign.value), _longest(foreign)
    ranks = _needed(foreign, "parallel.context_parallel_size")
    how = f"{num} sequences x {longest} tokens" + (f" / context_parallel_size={ranks}" if ranks > 1 else "")
    return _all(foreign, math.ceil(num * longest / ranks), how)


def _per_context_rank(foreign: Foreign) -> Converted:
    tokens, ranks = _number(foreign.value), _needed(foreign, "parallel.context_parallel_size")
    how = f"{tokens} tokens / context_parallel_size={ranks}" if ranks > 1 else ""
    return _all(foreign, math.ceil(tokens / ranks), how)


def _product(foreign: Foreign) -> Converted:
    if foreign.other is None:
        raise ByHand(foreign.note)
    value, other = _number(foreign.value), _number(foreign.other)
    return _all(foreign, value * other, f"{value} x {other}")


def _choice(foreign: Foreign) -> Converted:
    value = foreign.value if isinstance(foreign.value, bool | int | float) else str(foreign.value)
    if value not in foreign.choices:
        raise NoCounterpart(f"the values that have one are {', '.join(_with_counterpart(foreign.choices))}")
    chosen = foreign.choices[value]
    if chosen is None:
        named = ", ".join(_with_counterpart(foreign.choices))
        raise NoCounterpart(f"{value} is not here; the values that have a counterpart are {named}")
    return Converted(dict(chosen)) if isinstance(chosen, Mapping) else _all(foreign, chosen)


def _with_counterpart(choices: Mapping[Any, Any]) -> list[str]:
    return [str(value).lower() if isinstance(value, bool) else str(value) for value, ours in choices.items() if ours]


def _each(foreign: Foreign) -> Converted:
    value = foreign.value
    values = re.split(r"[\s,]+", value.strip("[]() ")) if isinstance(value, str) else value
    if not isinstance(values, Sequence) or len(values) != len(foreign.ours):
        raise ByHand(f"give {len(foreign.ours)} numbers")
    return Converted(dict(zip(foreign.ours, map(_number, values), strict=True)))


def _inverse_bounds(foreign: Foreign) -> Converted:
    """Invert verl's bounds of rollout / trainer, `lower_upper` or the upper one; ours bound trainer / rollout."""
    lower, _, upper = str(foreign.value).rpartition("_")
    high = _number(upper)
    if high == 0 or (lower and _number(lower) == 0):
        raise ByHand("a bound of 0 has no inverse")
    low = _number(lower) if lower else 1.0 / high
    bounds = (round(1.0 / high, 12), round(1.0 / low, 12))
    return Converted(dict(zip(foreign.ours, bounds, strict=True)), "bounds of trainer / engine, the inverse of verl's")


def _more_than_one(foreign: Foreign) -> Converted:
    return _all(foreign, _number(foreign.value) > 1)


def _at_most_one(foreign: Foreign) -> Converted:
    value = _number(foreign.value)
    return _all(foreign, 1.0, "1 - clip_ratio_low is 0 at least") if value > 1 else _all(foreign, foreign.value)


def _minus_one(foreign: Foreign) -> Converted:
    return _all(foreign, max(int(_number(foreign.value)) - 1, 0), "the versions that a trajectory spans, less one")


def _round_up(foreign: Foreign) -> Converted:
    return _all(foreign, math.ceil(_number(foreign.value)), f"{foreign.value} of a rollout batch, rounded up")


def _two_or_more(foreign: Foreign) -> Converted:
    value = _number(foreign.value)
    if value < 2:
        raise NoCounterpart(f"{', '.join(foreign.ours)} is 2 or more, 3 by default; after it such groups are kept")
    return _all(foreign, value)


def _tensor_parallel_only(foreign: Foreign) -> Converted:
    ranks = _needed(foreign, "parallel.tensor_model_parallel_size")
    if foreign.value and ranks == 1:
        return _all(foreign, False, "tensor_model_parallel_size is 1")
    return _all(foreign, bool(foreign.value))


def _modules(foreign: Foreign) -> Converted:
    given = foreign.value.split() if isinstance(foreign.value, str) else _names(foreign.value or ["core_attn"])
    taken, left = [name for name in given if name in RECOMPUTED], [name for name in given if name not in RECOMPUTED]
    if not taken:
        raise NoCounterpart(f"the modules are {', '.join(RECOMPUTED)}; parallel.recompute_granularity=full does all")
    return _all(foreign, taken, f"without {', '.join(map(str, left))}" if left else "")


def _first_stage(foreign: Foreign) -> Converted:
    return _all(foreign, [_number(foreign.value), None if foreign.other is None else _number(foreign.other)])


def _last_stage(foreign: Foreign) -> Converted:
    return _all(foreign, [None if foreign.other is None else _number(foreign.other), _number(foreign.value)])


def _stage_contents(foreign: Foreign) -> Converted:
    """Count the layers of every model chunk in Megatron's notation, such as `Et*3|(tt|)*2t,L`."""
    text = str(foreign.value).replace(",", "")
    for repeated in (r"\(([^)]+)\)\*(\d+)", r"(.)\*(\d+)"):
        text = re.sub(repeated, lambda match: match[1] * int(match[2]), text)
    counts = [chunk.count("t") for chunk in text.split("|")]
    if set(text) - set("EtL|") or not all(counts):
        raise NoCounterpart("every model chunk has layers here, and nothing else beside the embedding and the loss")
    return _all(foreign, counts)


def _targets(foreign: Foreign) -> Converted:
    """Name linear layers as in Hugging Face models; Megatron's fused layers are several of them."""
    given = _names(foreign.value)
    if given in (["all-linear"], []):
        return Converted({})
    fused = [[f"{part}_proj" for part in FUSED_MODULES.get(name, ())] or [name] for name in map(str, given)]
    modules, known = [name for names in fused for name in names], get_args(TargetModule)
    if not {*modules} <= {*known}:
        raise NoCounterpart(f"the layers are {', '.join(known)}")
    return _all(foreign, modules)


def _any(foreign: Foreign) -> Converted:
    return _all(foreign, True) if foreign.value else Converted({})


def _loggers(foreign: Foreign) -> Converted:
    names = _names(foreign.value)
    absent = [str(name) for name in names if name not in TRACKERS]
    if absent:
        raise NoCounterpart(
            f"{', '.join(absent)} is not here; logging.wandb, logging.mlflow, logging.tensorboard and metrics.jsonl are"
        )
    return _all(foreign, "tensorboard" in names)


def _by_tracker(foreign: Foreign) -> Converted:
    """Give a name to each tracker that the list beside it has."""
    trackers, names = [ours.split(".")[1] for ours in foreign.ours], _names(foreign.other)
    named = zip(trackers, foreign.ours, strict=True)
    return Converted({ours: foreign.value for tracker, ours in named if tracker in names})


def _names(value: Any) -> list[Any]:
    return list(value or ()) if value is None or isinstance(value, list) else [value]


def _file(foreign: Foreign) -> Converted:
    paths = [foreign.value] if isinstance(foreign.value, str) else foreign.value
    if not isinstance(paths, Sequence) or not paths:
        raise ByHand("give one .jsonl or .parquet file")
    if len(paths) > 1:
        names = " ".join(map(str, paths))
        raise ByHand(f"one file holds all prompts: python tools/prepare_data.py {names} --output ALL.parquet")
    return _all(foreign, str(paths[0]))


def _model(foreign: Foreign) -> Converted:
    path = str(foreign.value)
    if not is_hub_id(path):
        return _all(foreign, path)
    folder = f"models/{path.partition('/')[2]}"
    return _all(foreign, folder)._replace(to_do=f"hf download {path} --local-dir {folder}")


def _function(foreign: Foreign) -> Converted:
    """Name the function of a Python file as module:function."""
    file, name = PurePosixPath(str(foreign.value)), foreign.other or "compute_score"
    spec = dict.fromkeys(foreign.ours, f"{file.stem}:{name}")
    return Converted({"reward.type": "function"} | spec, to_do=f"put the folder {file.parent} into PYTHONPATH")


def _function_name(foreign: Foreign) -> Converted:
    module, _, name = str(foreign.value).rpartition(".")
    return Converted({"reward.type": "function"} | dict.fromkeys(foreign.ours, f"{module}:{name}"))


def _leave_one_out(foreign: Foreign) -> Converted:
    """Choose an estimator: NeMo-RL also divides by the standard deviation unless normalize_rewards=false."""
    if foreign.value and foreign.other is False:
        return _all(foreign, "rloo")
    return _all(foreign, "grpo", "the baseline is the whole group's mean" if foreign.value else "")


def _mib(foreign: Foreign) -> Converted:
    return _all(foreign, max(1, round(_number(foreign.value) / 2**20)), "bytes / 2^20")


def _by_hand(foreign: Foreign) -> Converted:
    raise ByHand(foreign.note)


READ_TOGETHER = ("switch", "several")
"""Conversions of keys that other rows, or several keys together, read."""

CONVERSIONS: dict[str, Conversion] = {
    "same": Conversion(_same),
    "weight_bounds": Conversion(
        _weight_bounds, "one bound truncates weights; `lower_upper` rejects, as IcePop does, in the place of rollout_rs"
    ),
    "positive": Conversion(_positive, "0 and below: leave it out"),
    "prompts": Conversion(_prompts, "counts prompts there and trajectories here: x `rollout.n`", 1),
    "rollout_batches": Conversion(_rollout_batches, "counts rollout batches there and updates here", 2),
    "updates": Conversion(_from_updates, "counts updates there and rollout batches here", 2),
    "fraction_of_run": Conversion(_fraction_of_run, "a share of the run there, updates here", 2),
    "sequences": Conversion(
        _sequences,
        "sequences there, tokens here: x (`data.max_prompt_length` + `rollout.max_response_length`) "
        "/ `parallel.context_parallel_size`",
        1,
    ),
    "per_context_rank": Conversion(
        _per_context_rank, "tokens of all context-parallel ranks there, of one here: / its number", 1
    ),
    "product": Conversion(_product, "x the learning rate"),
    "choice": Conversion(_choice),
    "each": Conversion(_each, "two numbers there, two keys here"),
    "inverse_bounds": Conversion(_inverse_bounds, "`lower_upper` there; the inverses: `1/upper` and `1/lower`"),
    "more_than_one": Conversion(_more_than_one, "true where it is more than 1"),
    "at_most_one": Conversion(_at_most_one, "1 at most, which leaves the lower side open"),
    "minus_one": Conversion(_minus_one, "less 1"),
    "round_up": Conversion(_round_up, "rounded up"),
    "two_or_more": Conversion(_two_or_more),
    "tensor_parallel_only": Conversion(_tensor_parallel_only, "true needs tensor parallelism", 1),
    "modules": Conversion(_modules, "of `core_attn`, `mlp`, `moe`"),
    "targets": Conversion(_targets, "Hugging Face names; `all-linear`: leave it out"),
    "first_stage": Conversion(_first_stage, "`[first, last]`, null where only the other is given"),
    "last_stage": Conversion(_last_stage, "`[first, last]`, null where only the other is given"),
    "stage_contents": Conversion(_stage_contents, "the number of `t` in every model chunk"),
    "any": Conversion(_any, "one key for parameters, gradients and optimizer"),
    "given": Conversion(_any, "a path there, true or false here"),
    "loggers": Conversion(_loggers),
    "file": Conversion(_file, "one .jsonl or .parquet file"),
    "model": Conversion(_model, "a Hugging Face folder on disk, not a name on the Hub"),
    "function": Conversion(_function, "`module:function`, with `reward.type: function`"),
    "function_name": Conversion(_function_name, "`module:function`"),
    "by_tracker": Conversion(_by_tracker, "for each of `wandb` and `mlflow` in `trainer.logger`"),
    "leave_one_out": Conversion(_leave_one_out, "`rloo` without `grpo.normalize_rewards`, else `grpo`"),
    "mib": Conversion(_mib, "/ 2^20"),
    "switch": Conversion(_by_hand),
    "several": Conversion(_by_hand),
    "by_hand": Conversion(_by_hand),
}
