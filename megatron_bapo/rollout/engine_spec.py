"""What an engine is started with."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from megatron_bapo.config.architecture import read_architecture
from megatron_bapo.config.lora import LoraConfig
from megatron_bapo.config.lora_transfer import sent_adapters
from megatron_bapo.config.rollout import RolloutConfig
from megatron_bapo.config.schema import Config


@dataclass(frozen=True)
class EngineSpec:
    """What all ranks of an engine are started with, on every node of it."""

    model_path: Path
    """Folder of the Hugging Face checkpoint that the engine serves as policy version 0."""
    settings: RolloutConfig
    dtype: str
    max_model_len: int
    """Maximum number of tokens of prompt and response together."""
    seed: int = 0
    return_routes: bool = False
    """Whether completions have the experts that a mixture-of-experts model chose for their tokens."""
    return_kept_tokens: bool = False
    """Whether completions have the tokens that each of theirs was sampled from. Every request that samples must then
    have a `top_k`."""
    adapters: LoraConfig | None = None
    """Adapters of the checkpoint's layers of which policy versions consist; None: versions have all weights."""
    scoring_temperature: float | None = None
    """Temperature of the log-probs of a request's context, for an engine that only scores: all of its logits are
    divided by it. None: the engine samples, and scores at temperature 1."""

    @classmethod
    def of(cls, config: Config) -> EngineSpec:
        """Return the spec of a run's engines. Raises UserError if the architecture of adapters cannot be read."""
        has_adapters, path = config.model.lora is not None, config.model_path.absolute()
        return cls(
            path,
            config.rollout,
            config.model.dtype,
            config.max_model_len,
            config.seed,
            config.algorithm.routing_replay == "rollout",
            config.algorithm.keep_sampling_mask,
            sent_adapters(config, read_architecture(path)) if has_adapters else None,
        )
