"""Chooses prompts whose responses are stored with what the update did with each token, and writes them.

main rank                           all ranks                              a thread of the main rank
---------                           ---------                              -------------------------
choose prompts of the batch ──────► trace their tokens in the updates
                                    gather the figures after the updates ─► decode texts, write Parquet
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path

from tokenizers import Tokenizer

from megatron_bapo.config.schema import Config
from megatron_bapo.controller.run_state import RunState
from megatron_bapo.data.rollout_samples import (
    TOKENIZER_FILE,
    SampledGroup,
    SampledResponse,
    SampleHeader,
    write_samples,
)
from megatron_bapo.parallel.collectives import broadcast_object
from megatron_bapo.parallel.groups import ParallelGroups
from megatron_bapo.records import Group, Trajectory
from megatron_bapo.rollout.generation import ScoredGroups
from megatron_bapo.rollout.tokenization import load_tokenizer, text_of
from megatron_bapo.trainer.micro_batches import Example
from megatron_bapo.trainer.token_trace import TokenTrace


@dataclass
class RolloutSampler:
    """Samples rollouts on every rank of the trainer; the main rank writes them."""

    config: Config
    folder: Path
    groups: ParallelGroups
    _chosen: dict[int, Group] = field(default_factory=dict)
    """Groups of the current step by their index in the batch, on the main rank."""
    _writer: ThreadPoolExecutor | None = None
    _written: Future[None] | None = None
    _decode: Callable[[list[list[int]]], list[str]] | None = None

    def choose(self, step: int, scored: ScoredGroups | None) -> None:
        """Choose the prompts of a batch. `scored` is None on all ranks but the main one, where it has all tokens."""
        self._chosen = {}
        if scored is None or not self._is_due(step):
            return
        # A prompt that was chosen once is chosen again in a later epoch, so that its responses can be compared.
        order = sorted(range(len(scored.groups)), key=lambda i: self._rank_of(scored.groups[i]))
        chosen = sorted(order[: self.config.logging.rollouts.num_prompts])
        # Copies, because views would keep whole parts of the batch in Ray's object store.
        self._chosen = {index: _copied(scored.groups[index]) for index in chosen}

    def trace(self, step: int, trajectories: Sequence[Trajectory]) -> TokenTrace:
        """Return an empty trace of the chosen prompts' trajectories in the batch. Collective in a step that is due."""
        n = self.config.rollout.n
        chosen = broadcast_object([*self._chosen], self.groups) if self._is_due(step) else []
        return TokenTrace.of(trajectories, [n * group + number for group in chosen for number in range(n)])

    def write(self, state: RunState, trace: TokenTrace, examples: Sequence[Example]) -> None:
        """Gather the figures and have the main rank's thread write them as those of the next step. Collective."""
        if not trace.starts:
            return
        traced = trace.gather(self.groups)
        if not self.groups.is_main:
            return
        n, config = self.config.rollout.n, self.config
        sampled = []
        for index, group in self._chosen.items():
            responses = []
            for number, trajectory in enumerate(group.trajectories):
                example, found = examples[n * index + number], traced[n * index + number]
                own = SampledResponse(trajectory, example.token_advantages, example.proximal_log_probs)
                if found.update:
                    bounds = {"clip_low": found.clip_low, "clip_high": found.clip_high}
                    own = replace(own, update=found.update, figures=found.figures, **bounds)
                responses.append(own)
            sampled.append(SampledGroup(index, group, tuple(responses)))
        header = SampleHeader(
            step=state.step + 1,
            policy_version=state.policy_version,
            num_groups=len(examples) // n,
            n=n,
            objective=config.algorithm.objective,
            temperature=config.rollout.temperature,
        )
        self.flush()
        if self._writer is None:
            self._writer = ThreadPoolExecutor(1, "sampled-rollouts")
        self._written = self._writer.submit(self._write, header, sampled)
        self._chosen = {}

    def flush(self) -> None:
        """Return when the last file is complete; raises the error that its thread met."""
        written, self._written = self._written, None
        if written is not None:
            written.result()

    def close(self) -> None:
        """End the thread after its file."""
        if self._writer is not None:
            self._writer.shutdown()

    def _write(self, header: SampleHeader, sampled: Sequence[SampledGroup]) -> None:
        if self._decode is None:
            self._decode = _decoder(self.config.model_path, self.folder)
        write_samples(self.folder, header, sampled, self._decode)

    def _is_due(self, step: int) -> bool:
        every = self.config.logging.rollouts.every_steps
        return every > 0 and (step == 1 or step % every == 0)

    def _rank_of(self, group: Group) -> bytes:
        """Return a random number that depends on the prompt and the seed only."""
        return hashlib.sha256(f"{self.config.seed} {group.prompt.prompt_id!a}".encode()).digest()


def _copied(group: Group) -> Group:
    """Return the group with arrays of its own."""

    def copied(trajectory: Trajectory) -> Trajectory:
        return replace(
            trajectory,
            prompt_token_ids=trajectory.prompt_token_ids.copy(),
            response_token_ids=trajectory.response_token_ids.copy(),
            behaviour_log_probs=trajectory.behaviour_log_probs.copy(),
            loss_mask=None if trajectory.loss_mask is None else trajectory.loss_mask.copy(),
        )

    return Group(group.prompt, tuple(map(copied, group.trajectories)))


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
        shutil.copyfile(model_path / TOKENIZER_FILE, folder / TOKENIZER_FILE)
    backend = Tokenizer.from_file(str(folder / TOKENIZER_FILE))
    return lambda batch: backend.decode_batch(batch, skip_special_tokens=True)
