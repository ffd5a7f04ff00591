"""What a run writes beside its checkpoints, and when it warns."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, PositiveFloat, PositiveInt

from megatron_bapo.config.section import NonNegativeInt, Section


class MismatchAlarmsConfig(Section):
    """How far the engines' log-probs may be from the trainer's under the same weights before the run warns.

    In NeMo-RL's names, measured at updates on tokens that the current weights sampled."""

    token_mult_prob_error: Annotated[float, Field(ge=1.0)] = 1.05
    """Mean of exp |trainer's log-prob - engine's|."""
    gen_kl_error: PositiveFloat = 1e-3
    """k3 estimate of the KL divergence in nats per token."""
    sampling_importance_ratio: PositiveFloat = 0.05
    """How far the mean of trainer's / engine's probability may be from 1."""


class WandbConfig(Section):
    """Send metrics to Weights & Biases as well, with the package wandb.

    It takes the key from WANDB_API_KEY or its own login, on the machine of trainer rank 0. A resumed run continues its
    wandb run.
    """

    project: Annotated[str, Field(min_length=1)]
    entity: str | None = None
    """User or team; by default wandb's own choice."""
    name: str | None = None
    """By default the name of run_dir."""
    group: str | None = None
    tags: tuple[str, ...] = ()
    mode: Literal["online", "offline"] = "online"
    """`offline` writes to wandb/ in the run directory, for `wandb sync` later."""


class LoggingConfig(Section):
    tensorboard: bool = True
    wandb: WandbConfig | None = None
    memory_snapshot_step: PositiveInt | None = None
    """Record this step's GPU allocations, with their stacks, to memory/rank-*.pickle for pytorch.org/memory_viz. Steps
    are slower while torch records."""
    profile_steps: tuple[PositiveInt, ...] = ()
    """Record what CPU and GPU do in these steps, to profile/step-*-rank-*.json.gz, Chrome traces for ui.perfetto.dev.
    Steps are slower while torch records."""
    profile_ranks: tuple[NonNegativeInt, ...] = (0,)
    """Trainer ranks that do."""
    num_sample_answers: NonNegativeInt = 8
    """Answers kept per step for the report."""
    entropy_clip_rule: bool = False
    """Compare the Entropy-Clip Rule's prediction with each update's change of entropy; costs a forward pass."""
    num_reservoir_tokens: NonNegativeInt = 64
    """Tokens sampled at each update, with log-ratio, probability, entropy and sign of the advantage, for tokens/."""
    mismatch_alarms: MismatchAlarmsConfig = MismatchAlarmsConfig()
    dump_rollouts: bool = False
    """Write every trained trajectory to rollouts/, a Parquet file a step, from which `train --rollouts-from` trains."""
