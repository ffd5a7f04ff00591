"""The section `logging`: what a run writes beside its checkpoints, and when it warns."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Annotated, Final, Literal

from pydantic import Field, PositiveFloat, PositiveInt, field_validator

from megatron_bapo.config.section import NonNegativeInt, Section
from megatron_bapo.run_directory import RunDirectory

MLFLOW_SCHEMES: Final = ("http", "https", "databricks", "sqlite", "postgresql", "mysql", "mssql")
"""Kinds of tracking servers and databases that MLflow writes to."""


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
    rollouts: bool = False
    """Send the responses of `logging.rollouts`, too, as tables of at most 128 responses a step and 4,000 characters a
    text. Prompts and responses then leave the machine."""


class MlflowConfig(Section):
    """Metrics and configuration to MLflow, in addition to the run directory; needs the package mlflow-skinny or mlflow.

    Credentials come from the environment variables MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD, or
    MLFLOW_TRACKING_TOKEN, where `train` runs. A resumed run continues its MLflow run.
    """

    experiment: Annotated[str, Field(min_length=1)]
    """Name of the MLflow experiment, which is created if it is missing."""
    tracking_uri: str | None = None
    """URI of the tracking server (http:// or https://), `databricks`, or a database such as sqlite:////folder/file.db,
    without credentials; null: the environment variable MLFLOW_TRACKING_URI, else mlflow.db in the run directory."""
    run_name: str | None = None
    """Name of the MLflow run; null: the name of the run directory."""
    tags: dict[Annotated[str, Field(pattern=r"^[\w.\- :]+$", max_length=250)], str] = Field(default_factory=dict)
    """MLflow tags of the run, by name."""

    @field_validator("tracking_uri")
    @classmethod
    def _has_no_credentials(cls, uri: str | None) -> str | None:
        if uri is None:
            return None
        if re.match(rf"({'|'.join(MLFLOW_SCHEMES)})\b", uri) is None:
            raise ValueError(
                f"logging.mlflow.tracking_uri must start with one of {', '.join(MLFLOW_SCHEMES)}. MLflow has given up "
                "folders of files: use sqlite:////folder/file.db"
            )
        if "@" in uri or "?" in uri:
            raise ValueError(
                "logging.mlflow.tracking_uri has a user or a query, which config.yaml and logs would show; set "
                "MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD, or give the whole URI as MLFLOW_TRACKING_URI"
            )
        return uri

    def resolved_uri(self, run_dir: Path) -> str:
        """Return the URI of the tracking server or database, which has credentials if the environment's has."""
        database = RunDirectory(run_dir).mlflow_database
        return self.tracking_uri or os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{database}"


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
    mlflow: MlflowConfig | None = None
    memory_snapshot_step: PositiveInt | None = None
    """Step in which the GPU allocations are recorded with their stacks, to `memory/rank-*.pickle` for
    pytorch.org/memory_viz; null: none. Recording slows the step down."""
    profile_steps: tuple[PositiveInt, ...] = ()
    """Steps that the PyTorch profiler records, to `profile/step-*-rank-*.json.gz`, Chrome traces for ui.perfetto.dev.
    Recording slows the steps down."""
    profile_ranks: tuple[NonNegativeInt, ...] = (0,)
    """Trainer ranks on which `profile_steps` are recorded."""
    num_sample_responses: NonNegativeInt = 8
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
    dump_validation: bool = False
    """Write every response to held-out prompts to validation_rollouts/, one Parquet file per evaluation."""
