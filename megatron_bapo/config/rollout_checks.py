"""Rules of the section `rollout` that span keys."""

from __future__ import annotations

from collections.abc import Iterator

from megatron_bapo.config.schema import Config


def rollout_problems(config: Config) -> Iterator[str]:
    rollout = config.rollout
    partial, length = rollout.partial_rollout, rollout.max_response_length
    if partial.token_budget is not None and partial.token_budget >= length:
        yield (
            f"rollout.partial_rollout.token_budget={partial.token_budget} must be less than rollout.max_response_length"
            f"={length}, or no answer is ever cut; lower it, or leave it out"
        )
    if partial.over_sampling > 1.0 and rollout.mode == "async":
        yield (
            f"rollout.partial_rollout.over_sampling={partial.over_sampling} with rollout.mode=async, where "
            "max_staleness says how many prompts are in flight; set over_sampling=1, or mode=sync"
        )
    if partial.over_sampling > 1.0 and rollout.max_staleness == 0:
        yield (
            f"rollout.partial_rollout.over_sampling={partial.over_sampling} with rollout.max_staleness=0: what is left "
            "of a step would be too old for the next; set max_staleness=1 or more, or over_sampling=1"
        )
    if rollout.max_reuse > rollout.max_staleness + 1:
        yield (
            f"rollout.max_reuse={rollout.max_reuse} needs rollout.max_staleness >= {rollout.max_reuse - 1}: a group's "
            f"tokens age by one policy version with each batch; raise max_staleness={rollout.max_staleness} or lower "
            "max_reuse"
        )
    turns = rollout.sleep_level > 0 or config.trainer.offload
    if turns and (rollout.mode == "async" or partial.over_sampling > 1.0):
        yield (
            f"rollout.sleep_level={rollout.sleep_level} and trainer.offload={str(config.trainer.offload).lower()} make "
            f"trainer and engines take turns; rollout.mode={rollout.mode} with partial_rollout.over_sampling="
            f"{partial.over_sampling} has both at work; set mode=sync and over_sampling=1, or sleep_level=0 and "
            "offload=false"
        )
    if rollout.max_reuse > 1 and config.trainer.ppo_epochs > 1:
        yield (
            f"rollout.max_reuse={rollout.max_reuse} with trainer.ppo_epochs={config.trainer.ppo_epochs}: both train on "
            "a group again, the first in later batches, the second in its own; set one of them to 1"
        )


def rollout_warnings(config: Config) -> Iterator[str]:
    rollout, partial = config.rollout, config.rollout.partial_rollout
    cut = partial.token_budget is not None or rollout.on_refresh != "drain"
    if not cut and (rollout.mode == "async" or partial.over_sampling > 1.0):
        yield (
            "rollout.on_refresh=drain without rollout.partial_rollout.token_budget: new weights wait until the longest "
            "answer in flight is finished; set token_budget, or on_refresh=abort_and_resume"
        )
    if rollout.mode == "async" and rollout.max_staleness == 0:
        yield (
            "rollout.mode=async with rollout.max_staleness=0: nothing can be generated while the trainer trains; raise "
            "max_staleness to let the two overlap"
        )
