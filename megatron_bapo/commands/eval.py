"""Evaluate a model on problems with known answers, with the same engines and rewards as training.

    model ─► Hugging Face folder ─► engines ─► responses.jsonl: a row per response, in order of arrival ─► results.json

A response depends only on the seed, its problem and its number, so a continued evaluation generates only the missing
ones.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections import deque
from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from megatron_bapo.cluster.interrupts import Interrupts
from megatron_bapo.cluster.ray_cluster import finished, get_result
from megatron_bapo.commands.evaluated_model import EvaluatedModel, find_model
from megatron_bapo.config.checks import differences, missing_prompt_file, prompt_source_problems, refuse
from megatron_bapo.config.evaluation import FREE_ON_RESUME, EvalConfig
from megatron_bapo.config.loading import dump_config, load_section
from megatron_bapo.config.reward import missing_variables
from megatron_bapo.config.rollout import IDLE_LIMIT
from megatron_bapo.config.schema import Config
from megatron_bapo.controller.launcher import POLL_S, check_this_machine
from megatron_bapo.controller.preflight import check_functions, check_replies, check_writable
from megatron_bapo.controller.progress import ProgressDisplay
from megatron_bapo.controller.rollout_client import SERVICE, RolloutClient
from megatron_bapo.controller.rollout_plane import rollout_plane
from megatron_bapo.controller.terminal import terminal
from megatron_bapo.data.prompts import load_prompts
from megatron_bapo.errors import INTERRUPTED, RunError, UserError
from megatron_bapo.files import make_folder, read_json_object, replace_text
from megatron_bapo.metrics.benchmark import problems_of, results
from megatron_bapo.metrics.benchmark_table import print_results
from megatron_bapo.metrics.sinks import JsonlSink, ResponseRow, read_rows
from megatron_bapo.records import Prompt
from megatron_bapo.rewards.ground_truths import check_ground_truths
from megatron_bapo.rollout.generation import ScoredGroups
from megatron_bapo.rollout.tokenization import load_tokenizer, tokenize
from megatron_bapo.run_directory import RunDirectory
from megatron_bapo.weight_sync.transport import WeightStore

_QUICK_S = 60.0
_LINES = 20
"""Lines of progress without a terminal."""


@dataclass(frozen=True)
class Subject:
    """Model and problems of an evaluation. It can only be continued with the same ones."""

    model: str
    weights: str
    """Digest of names, sizes and modification times of the model's files."""
    dtype: str
    problems: str
    """Digest of prompts and ground truths."""

    @classmethod
    def of(cls, model: EvaluatedModel, prompts: Sequence[Prompt]) -> Subject:
        files = [(path.name, path.stat()) for path in sorted(model.weights.glob("*.safetensors"))]
        return cls(
            str(model.weights.resolve()),
            _digest([[name, stat.st_size, stat.st_mtime_ns] for name, stat in files]),
            model.dtype,
            _digest([[prompt.messages, prompt.ground_truth] for prompt in prompts]),
        )


class BenchmarkDirectory(RunDirectory):
    """Files that an evaluation writes besides config.yaml, logs/ and, for a checkpoint, hf/."""

    @property
    def responses(self) -> Path:
        return self.root / "responses.jsonl"

    @property
    def results(self) -> Path:
        return self.root / "results.json"

    @property
    def subject(self) -> Path:
        return self.root / "subject.json"

    @property
    def kept(self) -> str:
        return f"{len(read_rows(self.responses)) if self.responses.exists() else 0} responses are kept"

    def rows(self, n: int) -> list[ResponseRow]:
        """Return the existing responses among the first `n` of each problem."""
        rows: list[Any] = read_rows(self.responses) if self.responses.exists() else []
        return [row for row in rows if row["sample"] < n]


def run_benchmark(config: EvalConfig, *, dry_run: bool = False, as_json: bool = False) -> int:
    """Start an evaluation or continue the one in `config.run_dir`; return the exit code, 130 after an interruption.

    Raises UserError and RunError, each with a complete message.
    """
    console = terminal(stderr=as_json)
    directory, n = BenchmarkDirectory(config.run_dir), config.evaluation.n
    model = _checked_model(config, directory)
    prompts = _checked_problems(config, model, console)
    subject = Subject.of(model, prompts)
    _check_continued(config, directory, subject)
    num, num_there = len(prompts) * n, len(directory.rows(n))
    console.print(
        f"{len(prompts)} problems x {n} = {num} responses of {model.weights}; {num_there} exist already", soft_wrap=True
    )
    if dry_run:
        return 0
    make_folder(directory.logs, f"run_dir={directory.root}")
    with directory.locked(), directory.reserved_space():
        replace_text(directory.config, dump_config(config))
        replace_text(directory.subject, json.dumps(asdict(subject), indent=2))
        model.convert(console)
        if num_there < num:
            display = ProgressDisplay(num, unit="response", line_every=max(1, num // _LINES), console=console)
            with Interrupts() as interrupts, display:
                num_failed = _generate(config, model.serving(config), len(prompts), directory, display, interrupts)
            if num_failed:
                raise RunError(
                    f"{num_failed} of {num} responses are missing because their requests failed; see the reasons in "
                    f"{directory.quarantined}. The same command retries them"
                )
        rows = directory.rows(n)
        if len(rows) < num:
            console.print(f"Stopped after {len(rows)} of {num} responses; continue with the same command.")
            return INTERRUPTED
        _report(config, prompts, rows, directory, console, as_json=as_json)
    return 0


def _checked_model(config: EvalConfig, directory: RunDirectory) -> EvaluatedModel:
    """Return the model. Raises UserError that lists what is wrong with the model, the problems and the reward."""
    key, source = "data.validation", config.data.validation
    broken = [*prompt_source_problems(key, source, config.reward.type), *missing_prompt_file(key, source)]
    broken += missing_variables(config.reward)
    try:
        model = find_model(config.model, directory.export)
    except UserError as error:
        raise UserError("\n".join([str(error), *broken])) from None
    refuse([*model.problems(config), *broken])
    return model


def _checked_problems(config: EvalConfig, model: EvaluatedModel, console: Console) -> list[Prompt]:
    """Run the other cheap checks and return the prompts. Raises UserError."""
    serving = model.serving(config)
    check_this_machine(serving)
    check_writable(config.run_dir)
    check_functions(serving)
    found = load_prompts(config.data.validation, name="validation", system_prompt=config.data.system_prompt)
    if found.num_skipped:
        console.print(f"{found.num_skipped} malformed lines skipped, first: {found.skipped_reasons[0]}", soft_wrap=True)
    tokenizer = load_tokenizer(model.origin)
    check_replies(serving, tokenizer)
    tokenize(found.prompts, tokenizer, serving.data)
    check_ground_truths(config.reward, found.prompts)
    return found.prompts


def _check_continued(config: EvalConfig, directory: BenchmarkDirectory, subject: Subject) -> None:
    """Raise UserError if the directory contains another kind of run or another evaluation."""
    if directory.metrics.exists() or directory.is_rollout_only:
        raise UserError(f"{directory.root} contains a training run; choose run_dir=<another folder> for the evaluation")
    if (old_name := directory.root / "answers.jsonl").exists() and not directory.responses.exists():
        raise UserError(
            f"{old_name} has the responses of an earlier version, which are now in responses.jsonl; rename the file to "
            "continue that evaluation, or choose run_dir=<another folder>"
        )
    has_responses = directory.responses.exists()
    if not has_responses and not directory.export.exists():
        return  # there is nothing yet that could conflict
    if not directory.subject.exists():
        found = (directory.responses if has_responses else directory.export).name
        raise UserError(
            f"{directory.root} contains {found} but not {directory.subject.name}, so it is not of an evaluation; "
            "choose run_dir=<another folder>"
        )
    old, new = read_json_object(directory.subject), asdict(subject)
    if not has_responses:  # only a checkpoint has been converted
        del new["problems"]
    conflicts = [
        f"{name}: {old.get(name)} in the run directory, {now} now" for name, now in new.items() if old.get(name) != now
    ]
    if has_responses:
        conflicts += differences(load_section(EvalConfig, directory.config), config, FREE_ON_RESUME)
    if conflicts:
        listed = "\n".join(f"  {conflict}" for conflict in conflicts)
        raise UserError(
            f"{directory.root} contains another evaluation:\n{listed}\n"
            "Choose run_dir=<another folder>, delete that folder, or use its settings"
        )


def _generate(
    config: EvalConfig,
    serving: Config,
    num_problems: int,
    directory: BenchmarkDirectory,
    display: ProgressDisplay,
    interrupts: Interrupts,
) -> int:
    """Generate and write the missing responses until an interrupt requests a stop; return the number of failed ones."""
    n, rows = config.evaluation.n, directory.rows(config.evaluation.n)
    existing = {(row["problem"], row["sample"]) for row in rows}
    missing = deque(key for p in range(num_problems) for s in range(n) if (key := (p, s)) not in existing)
    total, num_done, num_failed, start = sum(row["reward"] for row in rows), len(rows), 0, time.monotonic()
    in_flight: dict[tuple[int, int], Any] = {}
    display.phase("starting Ray and the engines")
    with closing(WeightStore.create()) as store, rollout_plane(serving, directory, store):
        client = RolloutClient(serving)
        client.wait_for_engines()
        display.phase("generating responses")
        end, latest = client.failed(), time.monotonic()
        with JsonlSink(directory.responses) as sink:
            while (missing or in_flight) and not interrupts.requested:
                while missing and len(in_flight) < config.num_in_flight:
                    key = missing.popleft()
                    in_flight[key] = client.request_response(*key)
                time.sleep(POLL_S)
                arrived = finished(in_flight)
                for key in arrived:
                    scored: ScoredGroups | None = get_result(in_flight.pop(key), SERVICE, _QUICK_S)
                    latest = time.monotonic()
                    if scored is None:
                        num_failed += 1
                        continue
                    row = _row(key, scored)
                    sink.write(row)
                    total, num_done = total + row["reward"], num_done + 1
                if arrived and num_done:
                    metrics = {"critic/score/mean": total / num_done}
                    time_s = time.monotonic() - start
                    display.update({"step": num_done, "phase": "train", "time_s": time_s, "metrics": metrics})
                _check_alive(config, end, latest)
    return num_failed


def _row(key: tuple[int, int], scored: ScoredGroups) -> ResponseRow:
    (group,) = scored.groups
    (trajectory,) = group.trajectories
    return ResponseRow(
        problem=key[0],
        sample=key[1],
        data_source=group.prompt.data_source,
        reward=trajectory.reward,
        answer=trajectory.answer,
        finish_reason=trajectory.finish_reason,
        num_tokens=len(trajectory.response_token_ids),
        timed_out=scored.num_reward_timeouts > 0,
        text=trajectory.text,
    )


def _check_alive(config: EvalConfig, end: Any, latest: float) -> None:
    """Raise RunError if generation has ended, or if no response arrived for longer than one may take."""
    if finished({SERVICE: end}):
        get_result(end, SERVICE, _QUICK_S)
    limit_s = config.rollout.idle_limit_s
    if time.monotonic() - latest > limit_s:
        raise RunError(
            f"the engines returned no response for {limit_s:.0f} s ({IDLE_LIMIT}); see the run directory's logs"
        )


def _report(
    config: EvalConfig,
    prompts: Sequence[Prompt],
    rows: Sequence[ResponseRow],
    directory: BenchmarkDirectory,
    console: Console,
    *,
    as_json: bool,
) -> None:
    found = results(problems_of(prompts, rows, config.evaluation.n), config.evaluation.sizes)
    subject = read_json_object(directory.subject)
    found = {"subject": subject, "config": config.model_dump(mode="json"), **found}
    text = json.dumps(found, indent=2, ensure_ascii=False)
    replace_text(directory.results, text + "\n")
    if as_json:
        print(text)
    else:
        print_results(console, found)
    console.print(f"results are in {directory.results}, responses in {directory.responses}", soft_wrap=True)


def _digest(value: Any) -> str:
    return hashlib.blake2b(json.dumps(value).encode(), digest_size=8).hexdigest()
