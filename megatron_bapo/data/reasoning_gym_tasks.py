"""Questions from reasoning-gym's procedural generators (https://github.com/open-thought/reasoning-gym) and our own."""

from __future__ import annotations

import dataclasses
import difflib
import json
import os
import random
from collections.abc import Iterator
from itertools import islice
from typing import Any

import psutil

from megatron_bapo.errors import UserError

CHUNK_SIZE = 500
_PROMPT_BYTES = 6 << 10
"""Memory of a generated prompt with a short question, such as that of chain_sum; longer ones need more."""
# reasoning-gym 0.1.25: the questions of these tasks depend on the iteration order of string sets. Remove when fixed.
HASH_SEEDED_TASKS = frozenset({"isomorphic_strings", "polynomial_multiplication", "ransom_note"})


def generate_entries(
    tasks: dict[str, dict[str, Any]], *, size: int, seed: int, distinct: bool = True
) -> list[tuple[str, dict[str, Any]]]:
    """Return `size` pairs (task, entry) that alternate between the tasks in alphabetical order.

    The questions of a task are distinct, unless `distinct` is False. An entry is the generator's {question, answer,
    metadata} as JSON values, which the task's own scorer needs. The result depends only on the arguments. Raises
    UserError for an unknown task, rejected parameters, a task with too few (distinct) questions, or a size that does
    not fit into the free memory.
    """
    if not tasks or size < len(tasks):
        raise UserError(
            f"size is {size} for {len(tasks)} reasoning_gym tasks; name a task and give each at least one prompt"
        )
    if size > (most := psutil.virtual_memory().available // _PROMPT_BYTES):
        raise UserError(
            f"size={size} does not fit into memory: a generated prompt takes {_PROMPT_BYTES >> 10} KiB or more, so the "
            f"free memory has room for {most:,} prompts at most; lower size"
        )
    names = sorted(tasks)
    entries = []
    for position, name in enumerate(names):
        share = len(range(position, size, len(names)))
        generated = _entries(name, tasks[name], seed)
        found = list(islice(_distinct(generated) if distinct else generated, share))
        if len(found) < share:
            raise UserError(
                f"reasoning_gym task {name} has only {len(found)} distinct questions with the parameters "
                f"{tasks[name]}, and {share} are needed; lower size, widen its parameters or set distinct: false"
            )
        entries.append(found)
    return [(names[index % len(names)], entries[index % len(names)][index // len(names)]) for index in range(size)]


def _distinct(entries: Iterator[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield entries without repeated questions; stop when repeats indicate that there are no further questions.

    With D equally likely questions, the probability of missing the last one in 10 D samples is e^-10.
    """
    seen: set[str] = set()
    num_repeats = 0
    for entry in entries:
        if entry["question"] not in seen:
            seen.add(entry["question"])
            num_repeats = 0
            yield entry
        else:
            num_repeats += 1
            if num_repeats >= 200 + 10 * len(seen):
                return


def _entries(name: str, params: dict[str, Any], seed: int) -> Iterator[dict[str, Any]]:
    """Yield a task's entries from datasets of CHUNK_SIZE, because some generators have no index beyond their size."""
    chunk = 0
    while True:
        # Generators seed question i with seed + i, so adjacent seeds would give nearly the same questions.
        dataset = _create_dataset(name, params, seed=random.Random(f"{seed}/{name}/{chunk}").getrandbits(31))
        num_entries = 0
        for index in range(CHUNK_SIZE):
            try:
                entry = dataset[index]
            except IndexError:
                break
            if chunk == 0 and index == 0:
                _check_scorable(name, dataset, entry)
            num_entries += 1
            yield _plain(entry)
        if num_entries == 0:
            return
        chunk += 1


def _create_dataset(name: str, params: dict[str, Any], seed: int) -> Any:
    # The import takes a second, so it is deferred to runs that need it.
    from reasoning_gym.factory import DATASETS, create_dataset

    from megatron_bapo.tasks import grid_walk as grid_walk  # registers the task

    if name not in DATASETS:
        near = difflib.get_close_matches(name, DATASETS, n=1, cutoff=0.0)[0]
        raise UserError(f"reasoning_gym has no task {name!r}; the nearest is {near!r} (there are {len(DATASETS)})")
    if name in HASH_SEEDED_TASKS and os.environ.get("PYTHONHASHSEED", "random") == "random":
        raise UserError(
            f"reasoning_gym task {name} gives different questions in every process, so a run could not be resumed; "
            "set the environment variable PYTHONHASHSEED=0"
        )
    known = [field.name for field in dataclasses.fields(DATASETS[name][1]) if field.name not in ("seed", "size")]
    for key in params:
        if key in ("seed", "size"):
            raise UserError(f"{key} is not a parameter of reasoning_gym task {name}: give it next to reasoning_gym")
        if key not in known:
            near = "".join(difflib.get_close_matches(key, known, n=1, cutoff=0.0)) or "none"
            raise UserError(
                f"reasoning_gym task {name} has no parameter {key!r}; the nearest is {near}, all are {', '.join(known)}"
            )
    try:
        return create_dataset(name, **params, seed=seed, size=CHUNK_SIZE)
    except (TypeError, ValueError, AssertionError) as error:
        raise UserError(f"reasoning_gym task {name} rejects the parameters {params}: {error}") from error


def _plain(entry: dict[str, Any]) -> dict[str, Any]:
    return json.loads(json.dumps(entry, default=str))


def _check_scorable(name: str, dataset: Any, entry: dict[str, Any]) -> None:
    """Raise UserError if a task's scorer fails after a JSON round trip.

    Some scorers compare tuples, which JSON turns into lists, and would score every right answer as wrong.
    """
    if isinstance(entry["answer"], str):
        expected, got = (dataset.score_answer(entry["answer"], form) for form in (entry, _plain(entry)))
        if got != expected:
            raise UserError(
                f"reasoning_gym task {name} cannot be used: its scorer gives its own answer {got} instead of "
                f"{expected} once the entry has been stored as JSON; remove the task"
            )
