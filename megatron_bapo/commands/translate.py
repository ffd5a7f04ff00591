"""Translation of a configuration of verl or NeMo-RL into our keys.

read the file, its defaults list and the overrides      foreign_files.py
every key: our key, a reason, or not known              config/foreign_keys.yaml
keys by themselves, then several together, then units   config/foreign_values.py, translated_layout.py and _loss.py
what the loader and the rules say of the result         config/loading.py, config/checks.py
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

from pydantic import ValidationError

from megatron_bapo.commands.foreign_files import MISSING, ForeignFile, Unresolved, place, read_foreign, resolved
from megatron_bapo.commands.translated_layout import Absent, nemo_rl_layout, verl_layout
from megatron_bapo.commands.translated_loss import nemo_rl_loss
from megatron_bapo.config.checks import rule_problems
from megatron_bapo.config.foreign_hints import shown
from megatron_bapo.config.foreign_keys import ForeignRow, find, flattened, project_of, projects, rows
from megatron_bapo.config.foreign_values import CONVERSIONS, READ_TOGETHER, ByHand, NoCounterpart, whole
from megatron_bapo.config.loading import problems_of, value_in
from megatron_bapo.config.schema import Config
from megatron_bapo.errors import UserError

From = Literal["verl", "nemo-rl", "auto"]

REQUIRED: dict[str, Any] = {
    "run_dir": "runs/translated",
    "model.path": "models/MODEL",
    "data.train.path": "train.parquet",
    "trainer.total_steps": 1,
    "trainer.train_batch_size": 1,
    "trainer.ppo_mini_batch_size": 1,
}
"""Keys that the loader requires, with values that let the other keys be checked if the source gives none."""


DERIVATIONS = {"verl": (verl_layout,), "nemo-rl": (nemo_rl_layout, nemo_rl_loss)}
"""What follows from several keys of a project's file, in this order."""


class LeftOut(NamedTuple):
    """A setting of the source that the result does not contain."""

    setting: str
    reason: str
    group: str = ""
    """Pattern of foreign_keys.yaml that matched the key, if any."""


@dataclass
class Translation:
    """Result of a translation, with what happened to every key of the source."""

    path: Path
    project: str
    config: dict[str, Any] = field(default_factory=dict)
    """Values by our dotted keys; `???` where a value is still to be set."""
    comments: dict[str, str] = field(default_factory=dict)
    converted: list[str] = field(default_factory=list)
    to_set: dict[str, str] = field(default_factory=dict)
    """Our keys that have to be set or checked -> the reason."""
    without: list[LeftOut] = field(default_factory=list)
    """Settings without a counterpart."""
    idle: list[LeftOut] = field(default_factory=list)
    """Keys that need no translation."""
    unknown: list[str] = field(default_factory=list)
    unresolved: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    broken_rules: list[str] = field(default_factory=list)
    num_translated: int = 0

    @property
    def title(self) -> str:
        return projects()[self.project].title

    def known(self, key: str) -> Any:
        """Return the value of one of our keys so far, else its default; None if it has neither."""
        value = self.config.get(key)
        return value_in(Config, {}, key) if value is None or value == MISSING else value

    def put(self, key: str, value: Any, comment: str = "") -> None:
        self.config[key] = value
        self.comments.pop(key, None)
        if comment:
            self.comments[key] = comment


class _Source:
    """Leaves of another project's configuration, completed by the project's defaults."""

    def __init__(self, project: str, file: ForeignFile) -> None:
        self.project, self.own, content = project, file.own, file.content
        given = dict(flattened(content, ""))
        self.given = set(given)
        values = [f"{key}." for key, value in given.items() if not _is_unset(value)]
        for row in rows(project):
            # A default neither goes below a value that is given in the place of a section nor replaces a section.
            in_the_way = any(f"{row.key}.".startswith(key) or key.startswith(f"{row.key}.") for key in values)
            if row.default is not None and not in_the_way and not self.given & {row.key, *row.older}:
                place(content, row.key.split("."), row.default)
        self.leaves = dict(flattened(resolved(content), ""))

    def get(self, key: str) -> Any:
        """Return the value of a key by its current or an earlier name; None if it is not set."""
        row = find(self.project, key)
        value = self.leaves.get(self.name_read(row) if row is not None and row.key == key else key)
        return None if _is_unset(value) else value

    def name_read(self, row: ForeignRow) -> str:
        """Return the name by which a row's key is read: the first of its names that is set."""
        names = (row.key, *row.older)
        return next((name for name in names if not _is_unset(self.leaves.get(name))), row.key)

    def holds(self, condition: str) -> bool:
        """Evaluate KEY, !KEY, KEY=VALUE or !KEY=VALUE. A negative number means `not set` in verl."""
        key, equals, text = condition.lstrip("!").partition("=")
        value = self.get(key)
        if equals:
            found = text in (map(str, value) if isinstance(value, list) else (str(value),))
        else:
            found = bool(value) and not (isinstance(value, int | float) and value < 0) and value != "null"
        return found != condition.startswith("!")


def translate(path: Path, overrides: Sequence[str] = (), source: From = "auto") -> Translation:
    """Translate a file. Raises UserError if it belongs to neither project."""
    file = read_foreign(path, overrides)
    project = _project(path, file.content) if source == "auto" else source
    _check_training(path, project, file.content)
    theirs = _Source(project, file)
    result = Translation(path, project, notes=file.notes)
    for key, value in projects()[project].always.items():
        result.put(key, value, f"as {result.title} does")
    rows_to_convert = [(key, row) for key, row in _sorted(theirs, result) if row.convert not in READ_TOGETHER]
    # Of several keys that set one of ours, the one whose row stands last takes precedence.
    rows_to_convert.sort(key=lambda each: rows(project).index(each[1]))
    for stage in range(3):
        for key, row in rows_to_convert:
            if CONVERSIONS[row.convert].stage == stage:
                _convert(key, row, theirs, result)
        if stage == 0:
            _derive(theirs, result)
    _tidy(result)
    _require(theirs, result)
    result.broken_rules = list(_broken_rules(result))
    return result


def _project(path: Path, content: dict[str, Any]) -> str:
    found = project_of(content)
    if found is None and "run_dir" in content:
        raise UserError(f"{path} has our section names already; `megatron-bapo train {path} --dry-run` checks it")
    if found is None:
        given = ", ".join(map(str, content)) or "nothing"
        raise UserError(
            f"{path} holds {given}: neither verl's section actor_rollout_ref nor NeMo-RL's sections policy and "
            "loss_fn; say which it is with --from verl or --from nemo-rl"
        )
    return found


def _check_training(path: Path, project: str, content: dict[str, Any]) -> None:
    """Raise UserError if the file is for a kind of training that has no counterpart here."""
    for section, name in projects()[project].unlike.items():
        if section in content:
            raise UserError(
                f"{path} has the section {section}, for {name}: only reinforcement learning without a critic and "
                f"on-policy distillation are here; give a configuration of {projects()[project].title} for one of them"
            )


def _sorted(theirs: _Source, result: Translation) -> Iterator[tuple[str, ForeignRow]]:
    """Yield the keys that have a value and a counterpart; note all others in the result."""
    for key, value in theirs.leaves.items():
        row, is_given = find(theirs.project, key), key in theirs.given
        if row is None:
            if _is_unset(value):
                result.idle.append(LeftOut(key, "not set"))
            else:
                result.unknown.append(f"{key}={_text(value)}")
            continue
        result.num_translated += bool(row.ours) and is_given
        applies, group = all(map(theirs.holds, row.only)), row.key if row.is_pattern else ""
        if _is_unresolved(value):
            if row.ours and applies:
                result.unresolved.append(f"{key}={_text(value)} (here {', '.join(row.ours)})")
        elif row.ours and applies and not _is_unset(value):
            read = key if row.is_pattern else theirs.name_read(row)
            if read == key:
                yield key, row
                continue
            instead = f"{result.title} reads {read}={_text(theirs.leaves[read])} instead"
            is_lost = key in theirs.own and value != theirs.leaves[read]
            (result.without if is_lost else result.idle).append(LeftOut(f"{key}={_text(value)}", instead))
        elif row.none and applies and not _is_unset(value) and not _is_neutral(value, row):
            default = "" if is_given else f" ({result.title}'s default)"
            result.without.append(LeftOut(f"{key}={shown(value)}{default}", row.reason, group))
        elif is_given and not row.ours:
            result.idle.append(LeftOut(key, row.reason, group))


def _is_unset(value: Any) -> bool:
    return value is None or value == MISSING or value in ({}, [], [""], "", "null")


def _is_neutral(value: Any, row: ForeignRow) -> bool:
    """Return whether the value has no effect on the run."""
    return any(isinstance(value, bool) == isinstance(each, bool) and value == each for each in row.neutral)


def _is_unresolved(value: Any) -> bool:
    return isinstance(value, Unresolved) or (isinstance(value, list) and any(map(_is_unresolved, value)))


def _text(value: Any) -> str:
    """Return a value as YAML; an unresolved text stays as it is in the file."""
    plain = [str(each) for each in value] if isinstance(value, list) else value
    return str(value) if isinstance(value, Unresolved) else shown(plain)


def _convert(key: str, row: ForeignRow, theirs: _Source, result: Translation) -> None:
    value, other = theirs.leaves[key], theirs.get(row.with_key) if row.with_key else None
    setting = f"{key}={shown(value)}" + ("" if key in theirs.given else f" ({result.title}'s default)")
    try:
        values, how, to_do = row.converted(value, result.known, other)
    except NoCounterpart as error:
        note = f"; {row.note}" if row.note and row.note != str(error) else ""
        left = "".join(f"; the result leaves {ours} at {shown(result.known(ours))}" for ours in row.ours[:1])
        result.without.append(LeftOut(setting, f"{error}{note}{left}"))
        return
    except ByHand as error:
        for ours in row.ours:
            result.to_set[ours] = f"{setting}: {error or row.note}"
        return
    for ours, converted in values.items():
        result.put(ours, converted, to_do or how or ("" if key in theirs.given else f"{result.title}'s default"))
        if to_do and ours in row.ours:
            result.to_set[ours] = to_do
    is_changed = bool(values) and (how or list(values.values()) != [value] * len(values))
    # The note of a choice is about values of another name; that of another row is about the value that is given.
    is_noted = row.note and row.convert != "choice" and key in theirs.own and not _is_neutral(value, row)
    if is_changed or is_noted:
        written = " ".join(f"{ours}={shown(converted)}" for ours, converted in values.items()) or "left out"
        told = "; ".join(text for text in (how, row.note) if text)
        result.converted.append(f"{setting} -> {written}" + (f": {told}" if told else ""))


def _derive(theirs: _Source, result: Translation) -> None:
    """Add the keys that follow from several keys of the source."""
    for derived in (each for derive in DERIVATIONS[theirs.project] for each in derive(theirs.get, result.known)):
        if isinstance(derived, Absent):
            result.without.append(LeftOut(f"{derived.key}={shown(derived.value)}", derived.reason))
            continue
        key, value, how, is_choice = derived
        result.put(key, value, how)
        if is_choice:
            result.to_set[key] = f"{value} in the result; {how}"
        elif how:
            result.converted.append(f"{key}={shown(value)}: {how}")


def _tidy(result: Translation) -> None:
    """Remove keys that need another key which the result does not have."""
    config = result.config
    if "data.validation.path" not in config:
        left = {key: value for key, value in config.items() if key.startswith(("data.validation.", "evaluation."))}
        if any(key.startswith("evaluation.") for key in left):
            given = " ".join(f"{key}={shown(value)}" for key, value in left.items())
            why = result.to_set.get("data.validation.path", "held-out prompts, if you have some")
            result.to_set["data.validation.path"] = f"{why}; with it {given}"
        _leave_out(result, left)
    if not config.get("rollout.colocate"):
        _leave_out(result, ("trainer.offload", "rollout.sleep_level"), "engines have GPUs of their own")
    for needed, name in (("wandb.project", "wandb.name"), ("mlflow.experiment", "mlflow.run_name")):
        if f"logging.{needed}" not in config:
            _leave_out(result, (f"logging.{name}",))
    if config.get("algorithm.objective") == "distill":
        sections = ("algorithm.kl_reward_", "algorithm.clip_ratio_c", "algorithm.overlong.", "rollout.filter_groups.")
        without_rewards = [key for key in config if key.startswith(sections)]
        _leave_out(result, without_rewards, "algorithm.objective=distill uses no rewards")
    if config.get("algorithm.overlong.mode") != "penalty":
        _leave_out(result, ("algorithm.overlong.buffer_length", "algorithm.overlong.penalty_factor"))
    if config.get("algorithm.rollout_correction.rollout_rs") is not None:
        threshold = config.get("algorithm.rollout_correction.rollout_is_threshold")
        if threshold is not None:
            config.setdefault("algorithm.rollout_correction.rollout_rs_threshold", threshold)


def _leave_out(result: Translation, keys: Sequence[str] | dict[str, Any], reason: str = "") -> None:
    for key in keys:
        value = result.config.pop(key, None)
        if value and reason:
            result.idle.append(LeftOut(f"{key}={shown(value)}", reason))


def _require(theirs: _Source, result: Translation) -> None:
    """Mark required keys that are still to be set, and name the keys of the source that concern them."""
    for key in REQUIRED:
        if key in result.config:
            continue
        if key == "run_dir":
            result.put(key, f"runs/{result.path.stem}", "the source names no folder")
            continue
        result.put(key, MISSING)
        concerning = [
            f"{name}={_text(value)}: {row.reason}" if row.see == key else f"{name}={_text(value)}"
            for name, value in theirs.leaves.items()
            if (row := find(theirs.project, name)) is not None and (key in row.ours or row.see == key)
            if not _is_unset(value) and (row.see is None or all(map(theirs.holds, row.only)))
        ]
        result.to_set.setdefault(key, "; ".join(concerning) or f"{result.title}'s file does not say")
    # A setting that has another of our keys in its place is told with that key.
    seen = {
        name for name in theirs.leaves if (row := find(theirs.project, name)) is not None and row.see in result.to_set
    }
    result.without = [each for each in result.without if each.setting.partition("=")[0] not in seen]


def _broken_rules(result: Translation) -> Iterator[str]:
    """Yield what `train` would refuse after the missing values have been set."""
    nested: dict[str, Any] = {}
    for key, value in result.config.items():
        place(nested, key.split("."), _checkable(key, value, result))
    try:
        config = Config.model_validate(nested)
    except ValidationError as error:
        yield from problems_of(error, Config, nested)
        return
    yield from rule_problems(config)


def _checkable(key: str, value: Any, result: Translation) -> Any:
    """Return the value; for one that is still to be set, a value that is valid on its own."""
    if value != MISSING:
        return value
    if not key.endswith("batch_size"):
        return REQUIRED[key]
    given = (result.config.get(f"trainer.{name}") for name in ("train_batch_size", "ppo_mini_batch_size"))
    known = next((size for size in given if size not in (None, MISSING)), None)
    return known or whole(result.known("rollout.n")) * whole(result.known("parallel.world_size")) or 1
