"""Translation of what other projects spread over several keys: GPUs, engines, lengths and batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from megatron_bapo.config.foreign_values import whole

DEFAULT_PROMPT_LENGTH = 1024
"""Prompt length for a file that bounds only prompt and response together."""


class Derived(NamedTuple):
    key: str
    value: Any
    how: str
    is_choice: bool = False
    """Whether the source leaves the value open, so that the user has to check it."""


class Absent(NamedTuple):
    """A setting of the source that several keys leave without a counterpart."""

    key: str
    value: Any
    reason: str


Get = Callable[[str], Any]


def verl_layout(theirs: Get, ours: Get) -> Iterator[Derived]:
    """Yield verl's layout. Engines share the trainer's GPUs unless rollouts have their own nodes."""
    nodes, gpus = whole(theirs("trainer.nnodes")), whole(theirs("trainer.n_gpus_per_node"))
    if nodes and gpus:
        yield Derived("parallel.world_size", nodes * gpus, _gpus(nodes, gpus))
    own_nodes, own_gpus = (
        (whole(theirs("rollout.nnodes")), whole(theirs("rollout.n_gpus_per_node")))
        if whole(theirs("rollout.nnodes"))
        else (
            whole(theirs("actor_rollout_ref.rollout.nnodes")),
            whole(theirs("actor_rollout_ref.rollout.n_gpus_per_node")),
        )
    )
    has_own = own_nodes * own_gpus > 0
    yield Derived("rollout.colocate", not has_own and theirs("actor_rollout_ref.hybrid_engine") is not False, "")
    if has_own or nodes * gpus:
        yield from _engines(*((own_nodes, own_gpus) if has_own else (nodes, gpus)), ours)
    yield from _layers(theirs("actor_rollout_ref.actor.strategy") == "megatron", ours)
    yield from _mode(theirs)
    yield from _fully_asynchronous(theirs, ours)


def _layers(are_fused: bool, ours: Get) -> Iterator[Derived]:
    """Yield Transformer Engine where the project's layers are its own, or where the sequence is spread over GPUs."""
    key, without_gpus = "model.transformer_impl", "on a machine without GPUs set model.transformer_impl=local"
    if ours("model.dtype") == "float32":
        return
    if are_fused:
        yield Derived(key, "transformer_engine", f"Megatron's layers there are Transformer Engine's; {without_gpus}")
    elif whole(ours("parallel.context_parallel_size")) > 1:
        how = f"local layers would gather the keys of all ranks; {without_gpus}"
        yield Derived(key, "transformer_engine", how, is_choice=True)


def _mode(theirs: Get) -> Iterator[Derived]:
    """Yield the mode of verl's asynchronous trainers, whose files have a section `rollout` with the engines' nodes."""
    if theirs("async_training.require_batches"):
        yield Derived("rollout.mode", "async", "")
    elif whole(theirs("rollout.nnodes")):
        how = "verl's one-step-off trainer generates the next batch while it trains on one"
        yield Derived("rollout.mode", "async", how)
        yield Derived("rollout.max_staleness", 1, "")


def _fully_asynchronous(theirs: Get, ours: Get) -> Iterator[Derived]:
    """Yield the batches of the fully asynchronous trainer: a rollout batch is trained between two weight updates."""
    n, num_epochs = whole(ours("rollout.n")), whole(ours("trainer.ppo_epochs"))
    mini_batch = whole(theirs("actor_rollout_ref.actor.ppo_mini_batch_size"))
    batches = whole(theirs("async_training.require_batches"))
    per_sync = whole(theirs("async_training.trigger_parameter_sync_step")) or 1
    if not (batches and mini_batch and n and num_epochs):
        return
    prompts = mini_batch * batches * per_sync
    how = f"{mini_batch} prompts x {batches} x {per_sync} until the weights change x rollout.n={n}"
    yield Derived("trainer.train_batch_size", prompts * n, how)
    warmup, per_step = whole(theirs("actor_rollout_ref.actor.optim.lr_warmup_steps")), batches * num_epochs
    if warmup:
        yield Derived("optimizer.lr_warmup_steps", warmup * per_step, f"{warmup} trainer steps x {per_step} updates")
    total = whole(theirs("rollout.total_rollout_steps"))
    if total:
        yield Derived("trainer.total_steps", max(1, total // prompts), f"{total} prompts / {prompts} of a batch")


def nemo_rl_layout(theirs: Get, ours: Get) -> Iterator[Derived]:
    """Yield NeMo-RL's layout, layers and lengths."""
    yield from _nemo_rl_gpus(theirs, ours)
    is_megatron, layers = (theirs(f"policy.megatron_cfg.{key}") for key in ("enabled", "transformer_impl"))
    if not is_megatron or layers == "transformer_engine":
        yield from _layers(bool(is_megatron), ours)
    yield from _nemo_rl_lengths(theirs)


def _nemo_rl_gpus(theirs: Get, ours: Get) -> Iterator[Derived]:
    nodes, gpus = whole(theirs("cluster.num_nodes")), whole(theirs("cluster.gpus_per_node"))
    if not (nodes and gpus):
        return
    if theirs("policy.generation.colocated.enabled") is not False:
        yield Derived("parallel.world_size", nodes * gpus, _gpus(nodes, gpus))
        yield from _engines(nodes, gpus, ours)
        return
    own_nodes = whole(theirs("policy.generation.colocated.resources.num_nodes")) or 1
    own_gpus = whole(theirs("policy.generation.colocated.resources.gpus_per_node")) or gpus
    of_engines, in_all = own_nodes * own_gpus, nodes * gpus
    how = f"{_gpus(nodes, gpus)}, less {of_engines} of the engines"
    yield Derived("parallel.world_size", max(1, in_all - of_engines), how)
    yield from _engines(own_nodes, own_gpus, ours)


def _nemo_rl_lengths(theirs: Get) -> Iterator[Derived]:
    """Yield bounds for prompts and responses, which share policy.max_total_sequence_length tokens in NeMo-RL."""
    total = whole(theirs("policy.max_total_sequence_length"))
    prompt, response = whole(theirs("data.max_input_seq_length")), whole(theirs("policy.generation.max_new_tokens"))
    if not total:
        yield from (Derived("data.max_prompt_length", prompt, "") for _ in range(bool(prompt)))
        yield from (Derived("rollout.max_response_length", response, "") for _ in range(bool(response)))
        return
    prompt, response = prompt or total, response or total
    together = f"NeMo-RL bounds prompt and response together, at {total} tokens"
    if prompt + response <= total:
        together = ""
    elif prompt < total:
        response = total - prompt
    elif response < total:
        prompt = total - response
    else:
        prompt = min(DEFAULT_PROMPT_LENGTH, total // 2)
        response, together = total - prompt, f"choose how to split: {together}"
    is_choice = together.startswith("choose")
    yield Derived("data.max_prompt_length", prompt, together, is_choice)
    yield Derived("rollout.max_response_length", response, together, is_choice)


def _engines(nodes: int, gpus: int, ours: Get) -> Iterator[Derived]:
    per_engine = whole(ours("rollout.tensor_parallel_size")) * whole(ours("rollout.pipeline_parallel_size"))
    if not per_engine:
        return
    how = f"{nodes * gpus} GPUs / {per_engine} of an engine"
    yield Derived("rollout.num_engines", max(1, nodes * gpus // per_engine), how)
    if per_engine > gpus:
        yield Derived("rollout.nodes_per_engine", -(-per_engine // gpus), f"{per_engine} GPUs of an engine / {gpus}")


def _gpus(nodes: int, gpus: int) -> str:
    return f"{nodes} node{'s' if nodes > 1 else ''} x {gpus} GPUs"
