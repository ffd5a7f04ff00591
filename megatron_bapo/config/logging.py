"""The section `logging`: what a run writes beside its checkpoints, and when it warns."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, PositiveFloat, PositiveInt

from megatron_bapo.config.section import NonNegativeInt, Section


class MismatchAlarmsConfig(Section):
    """Thresholds of the difference between trainer and engine log-probs above which the run warns.

    The difference is measured at updates on tokens that the current weights sampled. The keys have NeMo-RL's names."""

    token_mult_prob_error: Annotated[float, Field(ge=1.0)] = 1.05
    """Threshold for the mean of exp |trainer log-prob - engine log-prob|."""
    gen_kl_error: PositiveFloat = 1e-3
    """Threshold for the k3 estimate of the KL divergence, in nats per token."""
    sampling_importance_ratio: PositiveFloat = 0.05
    """Threshold for the distance from 1 of the mean ratio of trainer to engine probability."""


class WandbConfig(Section):
    """Metrics to Weights & Biases, in addition to the run directory; needs the package wandb.

    The API key comes from WANDB_API_KEY or wandb's login on the machine of trainer rank 0. A resumed run continues its
    wandb run.
    """

    project: Annotated[str, Field(min_length=1)]
    """Name of the wandb project."""
    entity: str | None = None
    """wandb user or team; null: wandb's default."""
    name: str | None = None
    """Name of the wandb run; null: the name of the run directory."""
    group: str | None = None
    """wandb group of the run; null: none."""
    tags: tuple[str, ...] = ()
    """wandb tags of the run."""
    mode: Literal["online", "offline"] | None = None
    """`online` uploads metrics during the run; `offline` writes them to wandb/ in the run directory for a later
    `wandb sync`; null: the environment variable WANDB_MODE, else `online`."""


class RolloutSamplesConfig(Section):
    """Responses that are stored in sampled_rollouts/ with what the update did with each token.

    `megatron-bapo view` shows them."""

    every_steps: NonNegativeInt = 10
    """Store responses of the first step and of every step that this number divides; 0: never."""
    num_prompts: PositiveInt = 8
    """Number of prompts of such a step whose responses are stored; all of them if the step has no more. The choice
    depends on the prompts and the seed, so that a prompt is chosen again in later epochs."""


class LoggingConfig(Section):
    """Metrics, samples and profiles that a run writes to its run directory."""

    tensorboard: bool = True
    """Write metrics for TensorBoard to tensorboard/."""
    wandb: WandbConfig | None = None
    memory_snapshot_step: PositiveInt | None = None
    """Step in which the GPU allocations are recorded with their stacks, to `memory/rank-*.pickle` for
    pytorch.org/memory_viz; null: none. Recording slows the step down."""
    profile_steps: tuple[PositiveInt, ...] = ()
    """Steps that the PyTorch profiler records, to `profile/step-*-rank-*.json.gz`, Chrome traces for ui.perfetto.dev.
    Recording slows the steps down."""
    profile_ranks: tuple[NonNegativeInt, ...] = (0,)
    """Trainer ranks on which `profile_steps` are recorded."""
    num_sample_answers: NonNegativeInt = 8
    """Number of responses per step that are kept in samples.jsonl for the report."""
    entropy_clip_rule: bool = False
    """Compare the change of entropy in each update with the prediction of the Entropy-Clip Rule (arXiv 2510.18927);
    costs an additional forward pass."""
    num_reservoir_tokens: NonNegativeInt = 64
    """Number of tokens per update that are sampled to tokens/ with log-ratio, probability, entropy and sign of the
    advantage."""
    rollouts: RolloutSamplesConfig = RolloutSamplesConfig()
    mismatch_alarms: MismatchAlarmsConfig = MismatchAlarmsConfig()
    dump_rollouts: bool = False
    """Write every trained trajectory to rollouts/, one Parquet file per step, which `train --rollouts-from` can
    read."""
