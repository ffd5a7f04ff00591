"""One trainer rank: its part of the model, its optimizer, and what it does with them between updates."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from megatron_bapo.config.schema import Config
from megatron_bapo.model.build import PolicyModel, build_policy
from megatron_bapo.model.hf_export import stream_tensors
from megatron_bapo.model.hf_import import load_hugging_face
from megatron_bapo.model.vocab_parallel import log_probs_and_entropy
from megatron_bapo.parallel.collectives import barrier, broadcast_from_last_stage
from megatron_bapo.parallel.groups import ParallelGroups
from megatron_bapo.parallel.megatron import finalize_model_grads
from megatron_bapo.parallel.platform import local_device
from megatron_bapo.records import Trajectory, VersionSpan
from megatron_bapo.trainer.micro_batches import Example, MicroBatch, to_micro_batch, to_micro_batches
from megatron_bapo.trainer.optimizer import Optimizer
from megatron_bapo.trainer.schedule import run_micro_batches
from megatron_bapo.weight_sync.transport import WeightStore


@dataclass(frozen=True)
class Worker:
    config: Config
    groups: ParallelGroups
    model: PolicyModel
    optimizer: Optimizer

    @property
    def token_multiple(self) -> int:
        """Sequence parallelism splits a micro-batch's tokens evenly over the tensor axis."""
        return self.groups.tensor.size if self.config.parallel.sequence_parallel else 1

    def micro_batches(self, examples: Sequence[Example]) -> list[MicroBatch]:
        """This rank's micro-batches of a minibatch."""
        return to_micro_batches(
            examples,
            max_tokens=self.config.trainer.max_tokens_per_gpu,
            data_rank=self.groups.data.rank,
            data_size=self.groups.data.size,
            multiple_of=self.token_multiple,
            device=local_device(),
        )


def create_worker(config: Config, model_path: Path, groups: ParallelGroups) -> Worker:
    """Build this rank's part of the policy and load the Hugging Face weights of `model_path`."""
    model = build_policy(config, model_path, groups)
    load_hugging_face(model, model_path, groups.tensor)
    optimizer = Optimizer([model.ddp], groups, config.optimizer)
    # Losses carry their own global denominator, so there is no token count to divide by.
    model.config.finalize_model_grads_func = lambda chunks, *_, **__: finalize_model_grads(chunks)
    return Worker(config, groups, model, optimizer)


@dataclass(frozen=True)
class Scores:
    """Of one micro-batch's response tokens."""

    log_probs_N: torch.Tensor
    entropy_N: torch.Tensor


def score_tokens(worker: Worker, micro_batch: MicroBatch, logits_TV: torch.Tensor, temperature: float) -> Scores:
    """Log-prob and entropy of the response tokens from a micro-batch's logits."""
    positions_N = micro_batch.response_positions_N
    return Scores(
        *log_probs_and_entropy(
            logits_TV.index_select(0, positions_N),
            micro_batch.labels_T.index_select(0, positions_N),
            temperature=temperature,
            tensor_axis=worker.groups.tensor,
        )
    )


@torch.no_grad()
def score(worker: Worker, micro_batches: Sequence[MicroBatch], temperature: float) -> list[Scores]:
    """A forward-only pass; one entry per micro-batch on the last pipeline stage, none on the others."""

    def head(micro_batch: MicroBatch, logits_TV: torch.Tensor) -> tuple[torch.Tensor, Scores]:
        scores = score_tokens(worker, micro_batch, logits_TV, temperature)
        return scores.log_probs_N.sum(), scores

    return run_micro_batches(worker.model, micro_batches, head, forward_only=True)


def score_sequence(worker: Worker, token_ids: np.ndarray) -> np.ndarray:
    """Log-prob at temperature 1 of each token but the first, float32 [len - 1], on every rank."""
    size = len(token_ids) - 1
    probe = Trajectory(
        prompt_token_ids=token_ids[:1],
        response_token_ids=token_ids[1:],
        behaviour_log_probs=np.zeros(size, np.float32),
        version_spans=(VersionSpan(0, size),),
        finish_reason="length",
        text="",
    )
    micro_batch = to_micro_batch([Example(probe, 0.0, 0.0)], worker.token_multiple, local_device())
    scores = score(worker, [micro_batch], temperature=1.0)
    log_probs = scores[0].log_probs_N if scores else torch.zeros(size, device=local_device())
    return broadcast_from_last_stage(log_probs, worker.groups).cpu().numpy()


def publish_weights(worker: Worker, store: WeightStore, policy_version: int) -> None:
    """Write this version to the weight store: each pipeline stage's leader its part, then rank 0 commits."""
    groups = worker.groups
    tensors = stream_tensors(worker.model, groups)
    if groups.is_stage_leader:
        store.write(policy_version, _writer(groups.pipeline.rank), tensors, worker.config.weight_sync.bucket_mib << 20)
    else:
        for _ in tensors:
            pass
    barrier(groups)
    if groups.is_main:
        store.commit(policy_version, [_writer(stage) for stage in range(groups.pipeline.size)])


def _writer(stage: int) -> str:
    return f"stage-{stage}"
