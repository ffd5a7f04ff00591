"""Run directories with sampled rollouts, written by the code that writes those of a run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from megatron_bapo.data.rollout_files import rollout_files
from megatron_bapo.data.rollout_samples import (
    TOKENIZER_FILE,
    SampledGroup,
    SampledResponse,
    SampleHeader,
    write_samples,
)
from megatron_bapo.records import Group, Prompt, Trajectory, VersionSpan
from megatron_bapo.run_directory import RunDirectory

HOSTILE = "<img src=x onerror=alert(1)><script>document.title='owned'</script>\u202edne\u202c\x00\x1b[31m\u2028end"
"""Text that would run as markup, that turns the direction around, and that has control characters."""
LOW, HIGH = 0.8, 1.2


def tokenizer() -> Tokenizer:
    """A tokenizer with a token for each byte, so that a character may have several."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE(vocab={letter: number for number, letter in enumerate(alphabet)}, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(["<|end|>"])
    return made


def sampled(
    text: str,
    *,
    reward: float,
    advantage: float,
    versions: Sequence[int] = (3,),
    reply: tuple[int, int] | None = None,
    seed: int = 0,
    finish: str = "stop",
    trained: bool = True,
    rejected: bool = False,
) -> SampledResponse:
    """Return a response whose ratios are exp of a wave, clipped at `LOW` and `HIGH`;

    `reply` are the tokens of a tool.
    """
    token_ids = np.array(tokenizer().encode(text, add_special_tokens=False).ids, np.int32)
    if finish == "stop":
        token_ids = np.append(token_ids, tokenizer().token_to_id("<|end|>")).astype(np.int32)
    mask = np.ones(len(token_ids), bool)
    if reply is not None:
        mask[slice(*reply)] = False
    size = int(mask.sum())
    rng = np.random.default_rng(seed)
    log_ratio = 0.4 * np.sin(np.arange(size) / 3 + seed)
    rollout = -np.abs(rng.normal(0.5, 0.4, size)).astype(np.float32)
    marks = np.zeros(size, np.int64)
    marks[(advantage > 0) & (np.exp(log_ratio) > HIGH)] |= 1
    marks[(advantage < 0) & (np.exp(log_ratio) < LOW)] |= 2
    marks[(advantage < 0) & (np.exp(log_ratio) > 1.45)] |= 4
    if rejected:
        marks[:2] = 8
    parts = np.array_split(np.arange(size), len(versions))
    trajectory = Trajectory(
        np.array(tokenizer().encode("prompt").ids, np.int32),
        token_ids,
        rollout,
        tuple(VersionSpan(version, len(part)) for version, part in zip(versions, parts, strict=True)),
        finish,  # pyright: ignore[reportArgumentType]
        text,
        reward,
        loss_mask=None if reply is None else mask,
    )
    figures = {
        "log_probs": (rollout + log_ratio).astype(np.float32),
        "entropy": np.abs(rng.normal(0.6, 0.5, size)).astype(np.float32),
        "ratio": np.exp(log_ratio).astype(np.float32),
        "correction": np.where(marks == 8, 0.0, 1.0).astype(np.float32),
        "marks": marks,
    }
    advantages = np.full(size, advantage)
    if not trained:
        return SampledResponse(trajectory, advantages)
    return SampledResponse(trajectory, advantages, None, 1, LOW, HIGH, figures)


def group(index: int, prompt: Prompt, responses: Sequence[SampledResponse]) -> SampledGroup:
    return SampledGroup(index, Group(prompt, tuple(r.trajectory for r in responses)), tuple(responses))


def write_step(root: Path, step: int, groups: Sequence[SampledGroup], *, num_groups: int = 8) -> None:
    folder = RunDirectory(root).sampled_rollouts
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer().save(str(folder / TOKENIZER_FILE))
    n = len(groups[0].responses)
    header = SampleHeader(step, policy_version=step + 6, num_groups=num_groups, n=n, objective="bapo", temperature=1.0)
    write_samples(folder, header, groups, lambda batch: [""] * len(batch))


def damage(root: Path, step: int, *columns: str) -> None:
    """Overwrite columns of a file of samples with zeros, by default all of them."""
    path = rollout_files(RunDirectory(root).sampled_rollouts)[step]
    data, metadata = bytearray(path.read_bytes()), pq.read_metadata(path)
    for group in map(metadata.row_group, range(metadata.num_row_groups)):
        for column in map(group.column, range(group.num_columns)):
            if not columns or column.path_in_schema in columns:
                start = column.dictionary_page_offset or column.data_page_offset
                data[start : start + column.total_compressed_size] = bytes(column.total_compressed_size)
    path.write_bytes(data)


def prompt(number: int, content: str, truth: str = "42") -> Prompt:
    return Prompt(f"task:{number}", ({"role": "user", "content": content},), truth, "task")


def small_run(root: Path) -> Path:
    """A run with two steps: several prompts, one of them hostile, one with a tool, one that both steps have."""
    for step in (1, 10):
        version = step + 6
        arithmetic = [
            sampled(
                f"Let me add the numbers.\n{a} + {b} = {a + b + wrong}\nThe answer is {a + b + wrong}.",
                reward=float(not wrong),
                advantage=1.0 if not wrong else -1.0,
                versions=(version - 2, version) if number == 1 else (version,),
                seed=step + number,
                rejected=number == 2,
            )
            for number, (a, b, wrong) in enumerate([(17, 25, 0), (17, 25, 1), (17, 25, 0), (17, 25, step == 1)])
        ]
        call = 'calc("3*7")\n'
        with_tool = [
            sampled(
                f"{call}tool: 21\nSo it is 21, né? 😀",
                reward=1.0,
                advantage=0.5,
                versions=(version,),
                reply=(len(call), len(call) + 9),
                seed=step,
            ),
            sampled("I guess 20", reward=0.0, advantage=-0.5, versions=(version - 5,), seed=2, finish="length"),
        ] * 2
        hostile = [
            sampled(HOSTILE, reward=0.5, advantage=0.0, versions=(version,), seed=3),
            sampled("needle in a haystack", reward=0.0, advantage=-1.0, versions=(version - 1,), seed=4, trained=False),
        ] * 2
        groups = [
            group(2, prompt(7, "What is 17 + 25?", "42"), arithmetic),
            group(4, prompt(step, f"What is 3 * 7? (asked in step {step})", "21"), with_tool),
            group(
                5, Prompt(f"<b>:{step}", ({"role": "user", "content": HOSTILE + "\ud800"},), HOSTILE, "task"), hostile
            ),
        ]
        write_step(root, step, groups)
    return root
