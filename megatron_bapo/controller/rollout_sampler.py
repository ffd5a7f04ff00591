"""Chooses prompts whose responses are stored with what the update did with each token, and writes them.

main rank                           all ranks                              a thread of the main rank
---------                           ---------                              -------------------------
choose prompts of the batch ──────► trace their tokens in the updates
                                    gather the figures after the updates ─► decode texts, write Parquet

In between the main rank keeps them in unnamed files, because they may take as much memory as its share of the batch.
"""

from __future__ import annotations

import hashlib
import shutil
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

import numpy as np
from tokenizers import Tokenizer

from megatron_bapo.config.schema import Config
from megatron_bapo.controller.run_state import RunState
from megatron_bapo.data.in_flight_files import read_groups, write_groups
from megatron_bapo.data.rollout_samples import (
    TOKENIZER_FILE,
    SampledGroup,
    SampledResponse,
    SampleHeader,
    write_samples,
)
from megatron_bapo.parallel.collectives import broadcast_object
from megatron_bapo.parallel.groups import ParallelGroups
from megatron_bapo.records import BufferedGroup, Group, Trajectory
from megatron_bapo.rollout.generation import ScoredGroups
from megatron_bapo.rollout.tokenization import load_tokenizer, text_of
from megatron_bapo.trainer.batch_advantages import advantages_on_main
from megatron_bapo.trainer.micro_batches import Example
from megatron_bapo.trainer.token_trace import TokenTrace, TracedTrajectory


@dataclass
class RolloutSampler:
    """Samples rollouts on every rank of the trainer; the main rank writes them."""

    config: Config
    folder: Path
    groups: ParallelGroups
    on_written: Callable[[Path], None] | None = None
    """Called in the thread with each complete file, on the main rank."""
    _chosen: list[int] = field(default_factory=list)
    """Indices of the current step's groups in the batch, on the main rank."""
    _groups_file: BinaryIO | None = None
    """These groups, with their indices as serial numbers, on the main rank in a step that is due."""
    _writer: ThreadPoolExecutor | None = None
    _written: Future[None] | None = None
    _decode: Callable[[list[list[int]]], list[str]] | None = None

    def choose(self, step: int, scored: ScoredGroups | None) -> None:
        """Choose the prompts of a batch. `scored` is None on all ranks but the main one, where it has all tokens."""
        self._chosen = []
        if scored is None or not self._is_due(step):
            return
        # A prompt that was chosen once is chosen again in a later epoch, so that its responses can be compared.
        order = sorted(range(len(scored.groups)), key=lambda i: self._rank_of(scored.groups[i]))
        self._chosen = sorted(order[: self.config.logging.rollouts.num_prompts])
        self._groups_file = self._file()
        write_groups(self._groups_file, (BufferedGroup(index, scored.groups[index]) for index in self._chosen))

    def trace(self, step: int, trajectories: Sequence[Trajectory]) -> TokenTrace:
        """Return an empty trace of the chosen prompts' trajectories in the batch. Collective in a step that is due."""
        n = self.config.rollout.n
        chosen = broadcast_object(self._chosen, self.groups) if self._is_due(step) else []
        return TokenTrace.of(trajectories, [n * group + number for group in chosen for number in range(n)])

    def write(self, state: RunState, trace: TokenTrace, examples: Sequence[Example]) -> None:
        """Gather the figures and have the main rank's thread write them as those of the next step. Collective."""
        if not trace.starts:
            return
        figures_file = self._file() if self.groups.is_main else None
        for index in trace.starts:
            traced = trace.gather(index, self.groups)
            advantages = advantages_on_main([examples[index]], self.groups)
            if traced is not None and figures_file is not None:
                for array in (traced.columns, *advantages):
                    np.save(figures_file, array, allow_pickle=False)
        if figures_file is None:
            return
        groups_file, config = self._groups_file, self.config
        assert groups_file is not None, "the main rank has chosen groups"
        header = SampleHeader(
            step=state.step + 1,
            policy_version=state.policy_version,
            num_groups=len(examples) // config.rollout.n,
            n=config.rollout.n,
            objective=config.algorithm.function or config.algorithm.objective,
            temperature=config.rollout.temperature,
        )
        self.flush()
        if self._writer is None:
            self._writer = ThreadPoolExecutor(1, "sampled-rollouts")
        self._written = self._writer.submit(self._write, header, groups_file, figures_file)
        self._chosen, self._groups_file = [], None

    def _file(self) -> BinaryIO:
        """Return an unnamed file in the run directory."""
        self.folder.mkdir(parents=True, exist_ok=True)
        return tempfile.TemporaryFile(dir=self.folder)

    def flush(self) -> None:
        """Return when the last file is complete; raises the error that its thread met."""
        written, self._written = self._written, None
        if written is not None:
            written.result()

    def close(self) -> None:
        """End the thread after its file."""
        if self._writer is not None:
            self._writer.shutdown()

    def _write(self, header: SampleHeader, groups_file: BinaryIO, figures_file: BinaryIO) -> None:
        if self._decode is None:
            self._decode = _decoder(self.config.model_path, self.folder)
        with groups_file, figures_file:
            groups_file.seek(0)
            figures_file.seek(0)
            groups = (
                self._sampled(group, figures_file)
                for group in read_groups(groups_file)
                if isinstance(group, BufferedGroup)
            )
            written = write_samples(self.folder, header, groups, self._decode)
        if self.on_written is not None:
            self.on_written(written)

    def _sampled(self, saved: BufferedGroup, figures_file: BinaryIO) -> SampledGroup:
        """Return the group with the figures of its responses, which come next in the file."""
        recomputed = self.config.algorithm.behaviour_policy == "recomputed"

        def response(trajectory: Trajectory) -> SampledResponse:
            traced = TracedTrajectory(np.load(figures_file, allow_pickle=False))
            advantages = np.load(figures_file, allow_pickle=False)
            if not traced.update:
                return SampledResponse(trajectory, advantages)
            figures, (low, high) = traced.figures, traced.clip_bounds
            log_probs = figures["ratio_log_probs"] if recomputed else None
            return SampledResponse(trajectory, advantages, log_probs, traced.update, low, high, figures)

        return SampledGroup(saved.serial, saved.group, tuple(map(response, saved.group.trajectories)))

    def _is_due(self, step: int) -> bool:
        every = self.config.logging.rollouts.every_steps
        return every > 0 and (step == 1 or step % every == 0)

    def _rank_of(self, group: Group) -> bytes:
        """Return a random number that depends on the prompt and the seed only."""
        return hashlib.sha256(f"{self.config.seed} {group.prompt.prompt_id!a}".encode()).digest()


def _decoder(model_path: Path, folder: Path) -> Callable[[list[list[int]]], list[str]]:
    """Return a function that decodes responses without special tokens, and copy the tokenizer to `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    if not (model_path / TOKENIZER_FILE).is_file():
        from transformers import PreTrainedTokenizerFast  # this import takes seconds

        tokenizer = load_tokenizer(model_path)
        if not isinstance(tokenizer, PreTrainedTokenizerFast):
            return lambda batch: [text_of(token_ids, tokenizer) for token_ids in batch]
        tokenizer.backend_tokenizer.save(str(folder / TOKENIZER_FILE))
    elif not (folder / TOKENIZER_FILE).exists():
        partial = folder / f"{TOKENIZER_FILE}.partial"
        shutil.copyfile(model_path / TOKENIZER_FILE, partial)
        partial.replace(folder / TOKENIZER_FILE)
    backend = Tokenizer.from_file(str(folder / TOKENIZER_FILE))
    return lambda batch: backend.decode_batch(batch, skip_special_tokens=True)
