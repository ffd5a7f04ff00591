"""The run's batch sizes in one unit, trajectories, as they are printed before anything starts."""

from __future__ import annotations

from megatron_bapo.config.schema import Config


def batch_arithmetic(config: Config) -> list[tuple[str, str]]:
    """(quantity, how it comes about) pairs."""
    trainer, parallel, rollout = config.trainer, config.parallel, config.rollout
    rows = [
        (
            "layout",
            f"{parallel.world_size} trainer processes = TP {parallel.tensor_model_parallel_size} x PP "
            f"{parallel.pipeline_model_parallel_size} x DP {parallel.data_parallel_size}; {rollout.num_engines} "
            f"vLLM engine(s) x TP {rollout.tensor_parallel_size}",
        ),
        (
            "rollout batch",
            f"{config.prompts_per_step} prompts x {rollout.n} answers = {trainer.train_batch_size} trajectories",
        ),
        (
            "updates per batch",
            f"{trainer.ppo_epochs} pass(es) x {trainer.train_batch_size} / {trainer.ppo_mini_batch_size} = "
            f"{trainer.updates_per_step} updates of {trainer.ppo_mini_batch_size} trajectories",
        ),
        (
            "per rank and update",
            f"{trainer.ppo_mini_batch_size} / DP {parallel.data_parallel_size} = "
            f"{trainer.ppo_mini_batch_size // parallel.data_parallel_size} trajectories, in packed micro-batches of at "
            f"most {trainer.max_tokens_per_gpu} tokens",
        ),
        (
            "whole run",
            f"{trainer.total_steps} batches = {trainer.total_steps * trainer.train_batch_size} trajectories, "
            f"{trainer.total_steps * trainer.updates_per_step} updates",
        ),
    ]
    if config.warm_start is not None:
        start = config.warm_start
        rows.insert(1, ("warm start", f"{start.num_steps} supervised updates of {start.batch_size} worked examples"))
    return rows
