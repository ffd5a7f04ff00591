"""State of one trainer rank (model shard and optimizer), micro-batch construction, and forward-only scoring."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import chain
from pathlib import Path

import numpy as np
import torch

from megatron_bapo.config.architecture import read_architecture
from megatron_bapo.config.schema import Config
from megatron_bapo.data.packing import Plan, Sharing, pack
from megatron_bapo.model.build import PolicyModel, build_policy
from megatron_bapo.model.hf_import import load_hugging_face
from megatron_bapo.model.peft_folder import load_adapters
from megatron_bapo.model.vocab_parallel import OutputLayer, log_probs_and_entropy
from megatron_bapo.parallel.collectives import broadcast_from_last_stage, sum_over
from megatron_bapo.parallel.groups import ParallelGroups
from megatron_bapo.parallel.megatron import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from megatron_bapo.parallel.platform import local_device
from megatron_bapo.planning.trainer_memory import attention_share
from megatron_bapo.records import Trajectory, VersionSpan
from megatron_bapo.trainer.fused_paths import kernels_work
from megatron_bapo.trainer.micro_batches import Example, MicroBatch, to_micro_batch
from megatron_bapo.trainer.optimizer import Optimizer
from megatron_bapo.trainer.schedule import run_micro_batches
from megatron_bapo.trainer.speculation import Speculation
from megatron_bapo.trainer.token_values import for_own_trajectories
from megatron_bapo.trainer.trajectory_values import indices_with_tokens

packed = lru_cache(maxsize=16)(pack)
"""`pack`, which takes seconds for thousands of trajectories, and gets the same lengths from each pass over a batch."""


@dataclass(frozen=True)
class Worker:
    config: Config
    groups: ParallelGroups
    model: PolicyModel
    optimizer: Optimizer
    fused_kernels: bool = False
    """Whether Triton kernels compute log-probs, entropy and loss."""
    speculation: Speculation = field(default_factory=Speculation)

    def micro_batches(self, examples: Sequence[Example]) -> list[MicroBatch]:
        """Return this rank's micro-batches of a minibatch. Every rank gets the same number of micro-batches."""
        return self.lay_out(examples, self.plan(examples))

    def plan(self, examples: Sequence[Example]) -> list[list[int]]:
        """Return the example indices of each micro-batch of this rank, longest example first.

        Sorted sequences of similar length are adjacent, which attention processes as one batch.
        """
        plan = self.plans(examples)[self.groups.data.rank]
        return [sorted(indices, key=lambda index: -examples[index].num_input_tokens) for indices in plan]

    def plans(self, examples: Sequence[Example]) -> Plan:
        """Return the example indices of each micro-batch of every data-parallel rank."""
        sharing = None
        if self.config.shares_prompts:
            sharing = Sharing(
                tuple(example.group for example in examples),
                tuple(example.num_shared_tokens for example in examples),
                attention_share(self.config, self.model.architecture),
            )
        return packed(
            tuple(example.num_input_tokens for example in examples),
            self.config.max_micro_batch_tokens,
            self.groups.data.size,
            sharing=sharing,
            rule=self.config.padding_rule,
            num_multiple_of=self.config.parallel.num_micro_batches_multiple,
            attention_length=6 * self.model.architecture.hidden_size,
        )

    def lay_out(self, examples: Sequence[Example], plan: list[list[int]]) -> list[MicroBatch]:
        """Build the micro-batches of a plan on this rank's device."""
        settings = self.config.padding_rule, self.groups.context, local_device(), self.config.shares_prompts
        return [to_micro_batch([examples[i] for i in indices], *settings) for indices in plan]


def create_worker(config: Config, model_path: Path, groups: ParallelGroups, *, load: bool = True) -> Worker:
    """Build this rank's shard of the policy and load the Hugging Face weights of `model_path`.

    With `model.lora`, the adapters get their initial values. Without `load` the weights are randomly initialized, and
    `model_path` needs only a config.json.
    """
    model = build_policy(config, read_architecture(model_path), groups)
    optimizer = Optimizer([chunk.ddp for chunk in model.chunks], groups, config.optimizer)
    if load:
        # Load through the optimizer, so its fp32 values are those of the file rather than the model's rounded ones.
        load_hugging_face(model, model_path, groups, write=optimizer.write_weights)
        load_adapters(model, config, groups, write=optimizer.write_weights)
    fused_kernels = config.trainer.fused_kernels and kernels_work(groups, model.config.params_dtype)
    return Worker(config, groups, model, optimizer, fused_kernels)


def create_reference(config: Config, model_path: Path, groups: ParallelGroups) -> PolicyModel:
    """Build this rank's shard of the frozen reference model, with the weights of `model_path` and no optimizer."""
    model = build_policy(config, read_architecture(model_path), groups, frozen=True)
    load_hugging_face(model, model_path, groups)
    return model


def create_teacher(config: Config, groups: ParallelGroups) -> PolicyModel | None:
    """Build this rank's shard of the frozen teacher, if the trainer holds one.

    Its size and family may differ from the policy's. It has the policy's parallel layout, with its own layers divided
    by FLOPs.
    """
    if config.algorithm.distillation is None or not config.algorithm.trainer_holds_teacher:
        return None
    taught = config.model_copy(update={"parallel": config.parallel.for_teacher})
    return create_reference(taught, config.algorithm.distillation.teacher, groups)


@dataclass(frozen=True)
class Scores:
    """Log-probs and entropy of this rank's response tokens of one micro-batch."""

    log_probs_N: torch.Tensor
    entropy_N: torch.Tensor


def response_outputs(
    worker: Worker, micro_batch: MicroBatch, hidden_TH: torch.Tensor, model: PolicyModel | None = None
) -> tuple[torch.Tensor, OutputLayer, torch.Tensor]:
    """Return the inputs of the log-probs of the response tokens: hidden states [N, H], output layer and labels [N].

    The output layer is that of the policy, or of another `model` with the same parallel layout.
    """
    model = model or worker.model
    weight_VH, tensor = model.output_weight(), worker.groups.tensor
    # Every tensor-parallel rank's rows of the output weight contribute to a token's gradient; both mappings sum them.
    if worker.config.parallel.sequence_parallel:
        hidden_TH = gather_from_sequence_parallel_region(hidden_TH, group=tensor.group)
    else:
        hidden_TH = copy_to_tensor_model_parallel_region(hidden_TH, group=tensor.group)
    positions_N = micro_batch.response_positions_N
    vocab_size, chunk_size = model.architecture.vocab_size, worker.config.trainer.logprob_chunk_size
    layer = OutputLayer(weight_VH, vocab_size, tensor, chunk_size, worker.fused_kernels, micro_batch.kept)
    return hidden_TH.index_select(0, positions_N), layer, micro_batch.labels_T.index_select(0, positions_N)


@torch.no_grad()
def score(
    worker: Worker,
    micro_batches: Sequence[MicroBatch],
    temperature: float,
    model: PolicyModel | None = None,
    *,
    recorded: Sequence[torch.Tensor] | None = None,
) -> list[Scores]:
    """Run a forward-only pass of the policy, or of another `model` with the same parallel layout.

    Returns one entry per micro-batch on the last pipeline stage and an empty list on the others. `recorded` receives
    the routes, as in `run_micro_batches`.
    """

    def head(micro_batch: MicroBatch, hidden_TH: torch.Tensor) -> tuple[torch.Tensor, Scores]:
        outputs = response_outputs(worker, micro_batch, hidden_TH, model)
        scores = Scores(*log_probs_and_entropy(*outputs, temperature=temperature))
        return scores.log_probs_N.sum(), scores

    return run_micro_batches(model or worker.model, micro_batches, head, forward_only=True, recorded=recorded)


def score_trajectories(
    worker: Worker,
    trajectories: Sequence[Trajectory],
    temperature: float,
    model: PolicyModel | None = None,
    *,
    groups: Sequence[int] | None = None,
) -> list[np.ndarray]:
    """Return the log-probs of each trajectory's sampled tokens, float32 [S] each, NaN if this rank has no tokens of it.

    They are computed with the policy, which replays the engines' routes if the trajectories have any, or with another
    `model` of the same parallel layout, which does not. `groups` are the numbers of their groups, if they are in any.
    Collective: data-parallel ranks share the work.
    """
    examples = [
        Example(trajectory, 0.0, 0.0, routes=trajectory.routes if model is None else None, group=group)
        for trajectory, group in zip(trajectories, groups or [None] * len(trajectories), strict=True)
    ]
    plan = worker.plan(examples)
    micro_batches = worker.lay_out(examples, plan)
    return gather_log_probs(worker, examples, plan, micro_batches, score(worker, micro_batches, temperature, model))


def gather_log_probs(
    worker: Worker,
    examples: Sequence[Example],
    plan: list[list[int]],
    micro_batches: Sequence[MicroBatch],
    scores: Sequence[Scores],
) -> list[np.ndarray]:
    """Return the log-probs as `score_trajectories` does, from the scores of `worker.plan(examples)`. Collective."""
    groups, trajectories = worker.groups, [example.trajectory for example in examples]
    lengths, own = [trajectory.num_sampled for trajectory in trajectories], indices_with_tokens(trajectories)
    log_probs_T = torch.empty(sum(lengths[i] for i in own), device=local_device())
    if groups.is_last_stage:
        response_index = [micro_batch.response_index_N for micro_batch in micro_batches]
        found_T = _in_order([each.log_probs_N for each in scores], plan, response_index, lengths)
        sum_over(groups.context)(found_T)
        scored_by = [sorted(chain.from_iterable(each)) for each in worker.plans(examples)]
        log_probs_T = for_own_trajectories(found_T, scored_by, own, lengths, groups.data)
    values = broadcast_from_last_stage(log_probs_T, groups).cpu().numpy()
    ends = np.cumsum([lengths[i] for i in own])
    found = {index: values[end - lengths[index] : end] for index, end in zip(own, ends.tolist(), strict=True)}
    return [found.get(index, np.broadcast_to(np.float32(np.nan), length)) for index, length in enumerate(lengths)]


def _in_order(
    values: Sequence[torch.Tensor], plan: list[list[int]], response_index: Sequence[torch.Tensor], lengths: list[int]
) -> torch.Tensor:
    """Return values of the micro-batches [N] of a plan as one tensor [T], in ascending order of the trajectories.

    Tokens of other context-parallel ranks are 0.
    """
    indices = sorted(chain.from_iterable(plan))
    ends = np.cumsum([0, *(lengths[i] for i in indices)]).tolist()
    starts = dict(zip(indices, ends, strict=False))
    ordered_T = torch.zeros(ends[-1], device=local_device())
    for members, values_N, response_index_N in zip(plan, values, response_index, strict=True):
        places = [np.zeros(0, np.int64), *(np.arange(starts[i], starts[i] + lengths[i]) for i in members)]
        ordered_T[torch.from_numpy(np.concatenate(places)).to(ordered_T.device)[response_index_N]] = values_N
    return ordered_T


def score_sequence(worker: Worker, token_ids: np.ndarray) -> np.ndarray:
    """Return the log-prob at temperature 1 of each token except the first, float32 [len - 1], on every rank."""
    size = len(token_ids) - 1
    probe = Trajectory(
        prompt_token_ids=token_ids[:1],
        response_token_ids=token_ids[1:],
        behaviour_log_probs=np.zeros(size, np.float32),
        version_spans=(VersionSpan(0, size),),
        finish_reason="length",
        text="",
    )
    return score_trajectories(worker, [probe], temperature=1.0)[0]
