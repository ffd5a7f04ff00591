"""Rules of the section `rollout` that span keys or depend on other sections."""

from __future__ import annotations

from collections.abc import Iterator

from megatron_bapo.config.schema import Config


def rollout_problems(config: Config) -> Iterator[str]:
    """Yield the broken rules, one line each."""
    rollout = config.rollout
    partial, length = rollout.partial_rollout, rollout.max_response_length
    if config.trainer.collective_timeout_s <= rollout.start_timeout_s:
        yield (
            f"trainer.collective_timeout_s={config.trainer.collective_timeout_s:g} must exceed "
            f"rollout.start_timeout_s={rollout.start_timeout_s:g}, because ranks wait in collectives while rank 0 "
            "commits weights; raise collective_timeout_s, or lower start_timeout_s"
        )
    if rollout.ranks_per_engine % rollout.nodes_per_engine:
        yield (
            f"rollout.nodes_per_engine={rollout.nodes_per_engine} must divide the {rollout.ranks_per_engine} ranks of "
            "an engine (tensor_parallel_size x pipeline_parallel_size), because each node has the same number of them"
        )
    if rollout.quantization is not None and config.model.dtype != "bfloat16":
        yield (
            f"rollout.quantization={rollout.quantization} with model.dtype={config.model.dtype}: vLLM quantizes only "
            "weights in bfloat16; set model.dtype=bfloat16, or remove quantization"
        )
    if partial.token_budget is not None and partial.token_budget >= length:
        yield (
            f"rollout.partial_rollout.token_budget={partial.token_budget} must be less than rollout.max_response_length"
            f"={length}, or no response is ever interrupted; lower it, or remove it"
        )
    if partial.over_sampling > 1.0 and rollout.mode == "async":
        yield (
            f"rollout.partial_rollout.over_sampling={partial.over_sampling} with rollout.mode=async, where "
            "max_staleness limits the number of prompts in flight; set over_sampling=1, or mode=sync"
        )
    if partial.over_sampling > 1.0 and rollout.max_staleness == 0:
        yield (
            f"rollout.partial_rollout.over_sampling={partial.over_sampling} with rollout.max_staleness=0: the partial "
            "responses of a step would be too old for the next one; set max_staleness=1 or more, or over_sampling=1"
        )
    if rollout.max_reuse > rollout.max_staleness + 1:
        yield (
            f"rollout.max_reuse={rollout.max_reuse} needs rollout.max_staleness >= {rollout.max_reuse - 1}, because a "
            "group's tokens become one policy version older with each batch; raise max_staleness="
            f"{rollout.max_staleness} or lower max_reuse"
        )
    alternates = rollout.sleep_level > 0 or config.trainer.offload
    if alternates and (rollout.mode == "async" or partial.over_sampling > 1.0):
        yield (
            f"rollout.sleep_level={rollout.sleep_level} and trainer.offload={str(config.trainer.offload).lower()} make "
            f"trainer and engines take turns, but rollout.mode={rollout.mode} with partial_rollout.over_sampling="
            f"{partial.over_sampling} lets both work at the same time; set mode=sync and over_sampling=1, or "
            f"{'colocate=false, ' if rollout.colocate else ''}sleep_level=0 and offload=false, with engines on GPUs of "
            "their own"
        )
    if rollout.max_reuse > 1 and config.trainer.ppo_epochs > 1:
        yield (
            f"rollout.max_reuse={rollout.max_reuse} with trainer.ppo_epochs={config.trainer.ppo_epochs}: both train on "
            "a group repeatedly, the first in later batches, the second in its own; set one of them to 1"
        )


def rollout_warnings(config: Config) -> Iterator[str]:
    """Yield settings that are allowed but probably unintended, one line each."""
    rollout, partial = config.rollout, config.rollout.partial_rollout
    interrupts = partial.token_budget is not None or rollout.on_weight_update != "drain"
    if not interrupts and (rollout.mode == "async" or partial.over_sampling > 1.0):
        yield (
            "rollout.on_weight_update=drain without rollout.partial_rollout.token_budget: weight updates wait until "
            "the longest response in flight is finished; set token_budget, or on_weight_update=abort_and_resume"
        )
    if rollout.mode == "async" and rollout.max_staleness == 0:
        yield (
            "rollout.mode=async with rollout.max_staleness=0: nothing can be generated while the trainer trains; raise "
            "max_staleness to let the two overlap"
        )
