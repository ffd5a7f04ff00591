"""The configuration of `eval`. Keys that a run's configuration also has mean the same in both."""

from __future__ import annotations

from pathlib import Path
from typing import Literal, Self

from pydantic import PositiveInt, model_validator

from megatron_bapo.config.data import DataConfig, PromptConfig, PromptSourceConfig
from megatron_bapo.config.model import ModelConfig
from megatron_bapo.config.reward import FREE_FUNCTION_KEYS, EnvironmentConfig, RewardConfig
from megatron_bapo.config.rollout import EngineConfig, EvaluationConfig, RolloutConfig, SamplingConfig
from megatron_bapo.config.schema import Config, TrainerConfig
from megatron_bapo.config.section import Section, Seed

RESPONSE_KEYS = ("max_response_length", "quantization", "kv_cache_dtype")
"""Keys of the engines that change responses, not only where and how fast they are generated."""
FREE_ON_RESUME = (
    *("run_dir", "model.path", "model.origin", "model.dtype", "evaluation.n", "evaluation.k"),
    *FREE_FUNCTION_KEYS,
    *(f"rollout.{name}" for name in EngineConfig.model_fields if name not in RESPONSE_KEYS),
)
"""Keys that a continued evaluation may change: the number of responses and the machine that generates them. The model
must be the same one, which is checked by its contents."""


class EvaluatedModelConfig(Section):
    """The model to evaluate."""

    path: Path
    """Hugging Face folder, checkpoint, or run directory, whose newest checkpoint is evaluated."""
    origin: Path | None = None
    """Folder with config.json and tokenizer, for a checkpoint that is not in a run directory."""
    dtype: Literal["float32", "bfloat16"] | None = None
    """Data type of the weights; null: that of the run or of the folder's config.json."""


class BenchmarkConfig(PromptConfig):
    """The problems (`validation`). Several data sources are reported both together and separately."""

    validation: PromptSourceConfig


class BenchmarkSamplingConfig(SamplingConfig):
    """Number of responses per problem and sampling parameters."""

    n: PositiveInt = 16
    """Number of responses per problem (mean@n). A continued evaluation may raise it."""
    k: tuple[PositiveInt, ...] | None = None
    """Values of k for pass@k and maj@k, at most n; null: the powers of two below n, and n."""

    @model_validator(mode="after")
    def _k_within_n(self) -> Self:
        if self.k is not None and max(self.k, default=0) > self.n:
            raise ValueError(
                f"k={max(self.k)} must not exceed n={self.n}, the responses per problem; raise n or lower k"
            )
        return self

    @property
    def sizes(self) -> tuple[int, ...]:
        """All values of k in ascending order."""
        powers = [2**power for power in range(self.n.bit_length())]
        return tuple(sorted({*(self.k if self.k is not None else (*powers, self.n))}))


class EvalConfig(Section):
    """An evaluation of one model on problems with known answers."""

    run_dir: Path
    """Folder for everything that the evaluation writes. An evaluation that was interrupted there is continued."""
    seed: Seed = 0
    """Seed of sampling."""
    model: EvaluatedModelConfig
    data: BenchmarkConfig
    reward: RewardConfig = RewardConfig()
    environment: EnvironmentConfig | None = None
    evaluation: BenchmarkSamplingConfig = BenchmarkSamplingConfig()
    rollout: EngineConfig = EngineConfig()

    @property
    def num_in_flight(self) -> int:
        """Number of responses that are requested at a time to keep the engines busy."""
        return 2 * self.rollout.num_engines * self.rollout.max_num_seqs

    def serving(self, model: Path, dtype: str) -> Config:
        """Return the configuration of a run whose engines serve a Hugging Face folder, with the problems as prompts."""
        prompts = self.data.model_dump(include=set(PromptConfig.model_fields))
        sampling = self.evaluation.model_dump(include=set(SamplingConfig.model_fields))
        return Config(
            run_dir=self.run_dir,
            seed=self.seed,
            model=ModelConfig.model_validate({"path": model, "dtype": dtype}),
            data=DataConfig(train=self.data.validation, **prompts),
            reward=self.reward,
            environment=self.environment,
            # There is no trainer, so the engines start at the first GPU.
            rollout=RolloutConfig(n=1, colocate=True, **self.rollout.model_dump()),
            trainer=TrainerConfig(total_steps=0, train_batch_size=1, ppo_mini_batch_size=1),
            evaluation=EvaluationConfig(n=1, **sampling),
        )
