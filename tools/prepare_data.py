"""Check prompt files, drop unusable rows, and write one file that `data.train` reads.

python tools/prepare_data.py math.parquet more.jsonl --output data/train.parquet
python tools/prepare_data.py math.parquet --eval aime24.jsonl aime25.jsonl --tokenizer models/base \\
    --max-prompt-length 2048 --output data/train.parquet
python tools/prepare_data.py data/train.parquet --eval aime24.jsonl --check   # exit code 1 if rows would be dropped

The input formats are those of data.train: {"prompt", "answer"}, verl's columns, slime's keys. The tool drops rows that
- are malformed or have an empty answer,
- have the same messages as an earlier row (apart from white space),
- equal a prompt of an --eval file or share --ngram consecutive words with one (n-grams that more than a tenth of the
  --eval prompts share do not count),
- are longer than --max-prompt-length tokens in the tokenizer's chat template.
It writes verl's columns as Parquet or JSON lines, depending on the file's extension. The file appears once it is
complete and has been read back.

Exit codes: 0 done, 1 --check found rows to drop or the written file is damaged, 2 invalid input, 130 interrupted.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from megatron_bapo.config.data import PromptConfig, PromptSourceConfig
from megatron_bapo.controller.terminal import terminal
from megatron_bapo.data.contamination import NGRAM, EvaluationPrompts, index_evaluation_prompts
from megatron_bapo.data.preparation import (
    REASONS,
    Prepared,
    check_output,
    prepare,
    read_evaluation_prompts,
    write_prompts,
)
from megatron_bapo.errors import UserError, exit_code


def json_object(text: str) -> dict[str, Any]:
    if not isinstance(value := json.loads(text), dict):
        raise ValueError
    return value


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("inputs", type=Path, nargs="+", help="*.jsonl or *.parquet")
    result = parser.add_mutually_exclusive_group(required=True)
    result.add_argument("--output", type=Path, help="*.parquet or *.jsonl to write")
    result.add_argument("--check", action="store_true", help="write nothing; exit code 1 if a row would be dropped")
    parser.add_argument("--prompt-key", default="prompt", metavar="KEY", help="column of the prompt (default prompt)")
    parser.add_argument("--label-key", metavar="KEY", help="column of the answer (default: as data.train)")
    parser.add_argument(
        "--choices-key",
        nargs="+",
        default=[],
        metavar="KEY",
        help="column of the choices, or columns of one choice each, in any order",
    )
    parser.add_argument(
        "--eval",
        type=Path,
        nargs="+",
        default=[],
        metavar="FILE",
        help="evaluation files whose prompts must not be trained on",
    )
    parser.add_argument("--eval-prompt-key", default="prompt", metavar="KEY", help="(default prompt)")
    parser.add_argument("--eval-label-key", metavar="KEY", help="(default: as data.validation)")
    parser.add_argument("--ngram", type=int, default=NGRAM, metavar="N", help=f"consecutive words (default {NGRAM})")
    parser.add_argument("--tokenizer", type=Path, metavar="DIR", help="Hugging Face folder, to count tokens")
    parser.add_argument("--max-prompt-length", type=int, metavar="N", help="as data.max_prompt_length")
    parser.add_argument("--no-chat-template", action="store_true", help="as data.chat_template: false")
    parser.add_argument(
        "--chat-template-kwargs", type=json_object, default={}, metavar="JSON", help="as data.chat_template_kwargs"
    )
    parser.add_argument(
        "--empty-answers", action="store_true", help="keep rows with an empty answer, for a custom reward"
    )
    parser.add_argument("--ability", default="math", help="value of verl's ability column (default math)")
    parser.add_argument("--json", action="store_true", help="print one JSON object with every dropped row")
    arguments = parser.parse_args()
    if arguments.ngram < 1:
        parser.error(f"--ngram is {arguments.ngram}; give 1 or more")
    if arguments.max_prompt_length is not None and (arguments.tokenizer is None or arguments.max_prompt_length < 1):
        parser.error("--max-prompt-length is a number of tokens, 1 or more, and needs --tokenizer to count them")
    return arguments


def show(prepared: Prepared, evaluation: EvaluationPrompts | None, console: Console) -> None:
    table, counts = Table(box=None, header_style="dim"), prepared.counts()
    table.add_column("rows", justify="right")
    table.add_column()
    table.add_column("first", overflow="fold")
    table.add_row(f"{counts['rows']:,}", "read")
    for reason, words in REASONS.items():
        first = next((f"{row.where}: {row.detail}" for row in prepared.dropped if row.reason == reason), "")
        table.add_row(f"{counts[reason]:,}", words, first)
    table.add_row(f"{counts['kept']:,}", "kept")
    console.print(table)
    if evaluation is not None:
        compared = f"{len(evaluation.texts):,} evaluation prompts, {len(evaluation.ngrams):,} n-grams of {evaluation.n}"
        console.print(f"compared with {compared} words ({evaluation.num_template_ngrams:,} template n-grams ignored)")
    if tokens := prepared.token_counts():
        console.print("tokens per prompt: " + ", ".join(f"{name} {count:,}" for name, count in tokens.items()))


def _main(arguments: argparse.Namespace, console: Console) -> int:
    if not arguments.check:
        check_output(arguments.output)
        if arguments.output.resolve() in [path.resolve() for path in (*arguments.inputs, *arguments.eval)]:
            raise UserError(f"--output {arguments.output} is one of the files that are read; name another file")
    sources = _sources(arguments.inputs, arguments.prompt_key, arguments.label_key, arguments.choices_key)
    evaluation = None
    if arguments.eval:
        rows = read_evaluation_prompts(_sources(arguments.eval, arguments.eval_prompt_key, arguments.eval_label_key))
        evaluation = index_evaluation_prompts(rows, arguments.ngram)
    counter, limit = None, arguments.max_prompt_length
    if arguments.tokenizer is not None:
        # Deferred because importing transformers takes seconds, which --help does not need.
        from megatron_bapo.rollout.tokenization import token_counter

        data = PromptConfig(
            chat_template=not arguments.no_chat_template, chat_template_kwargs=arguments.chat_template_kwargs
        )
        counter = token_counter(arguments.tokenizer, data)
    prepared = prepare(
        sources,
        evaluation=evaluation,
        num_tokens=counter,
        max_prompt_length=limit,
        empty_answers=arguments.empty_answers,
    )
    if arguments.json:
        dropped = [asdict(row) for row in prepared.dropped]
        print(json.dumps({"counts": prepared.counts(), "tokens": prepared.token_counts(), "dropped": dropped}))
    else:
        show(prepared, evaluation, console)
    if arguments.check:
        return 1 if prepared.dropped else 0
    write_prompts(prepared.kept, arguments.output, ability=arguments.ability)
    if not arguments.json:
        console.print(f"{arguments.output}: written and verified", soft_wrap=True)
    return 0


def _sources(
    paths: Sequence[Path], prompt_key: str, label_key: str | None, choices_keys: Sequence[str] = ()
) -> list[PromptSourceConfig]:
    choices_key = choices_keys[0] if len(choices_keys) == 1 else tuple(choices_keys) or None
    keys = {"prompt_key": prompt_key, "label_key": label_key, "choices_key": choices_key}
    return [PromptSourceConfig.model_validate({"path": path, **keys}) for path in paths]


def main() -> int:
    arguments = parse()
    console = terminal(stderr=arguments.json)
    return exit_code(lambda: _main(arguments, console), after_stop="nothing was written")


if __name__ == "__main__":
    raise SystemExit(main())
