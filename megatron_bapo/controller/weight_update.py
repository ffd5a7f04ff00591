"""Weight updates: send the trainer's weights to the engines and verify that they arrived."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import numpy as np

from megatron_bapo.controller.colocation import ColocationManager
from megatron_bapo.controller.rollout_client import RolloutClient
from megatron_bapo.metrics.values import Last, Max, Metric
from megatron_bapo.parallel.collectives import broadcast_object, on_main
from megatron_bapo.rollout.weight_probe import WeightProbe
from megatron_bapo.trainer.weight_publisher import WeightTransport
from megatron_bapo.trainer.worker import Worker, score_sequence

T = TypeVar("T")


def update_weights(
    worker: Worker,
    rollouts: RolloutClient | None,
    transport: WeightTransport,
    colocation: ColocationManager,
    policy_version: int,
) -> dict[str, Metric]:
    """Send the trainer's weights to every engine as `policy_version`, and verify them with the weight probe."""
    scored = score_probe(worker, rollouts)  # first, because engines on GPUs of their own generate until `deliver`
    colocation.to_weight_sync()
    relay_bytes = transport.deliver(policy_version, rollouts)
    metrics = probe(worker, rollouts, colocation, policy_version, scored)
    if rollouts is not None:
        metrics["weight_sync/store_bytes"] = Last(transport.plan.total_bytes)
        metrics["weight_sync/relay_bytes"] = Last(relay_bytes)
    return metrics


def score_probe(worker: Worker, rollouts: RolloutClient | None) -> tuple[np.ndarray, np.ndarray]:
    """Return the tokens of the probe sequence and the trainer's log-probs of them, in the trainer's turn. Collective.

    `rollouts` is None on all ranks but the main one.
    """
    token_ids = broadcast_object(rollouts.probe_token_ids if rollouts else None, worker.groups)
    return token_ids, score_sequence(worker, token_ids)


def probe(
    worker: Worker,
    rollouts: RolloutClient | None,
    colocation: ColocationManager,
    policy_version: int,
    scored: tuple[np.ndarray, np.ndarray],
) -> dict[str, Metric]:
    """Give the GPUs to the engines, and compare their log-probs of the probe sequence with those of `score_probe`.

    The engines generate only after that. `rollouts` is None on all ranks but the main one. Raises ProbeFailed if an
    engine differs.
    """
    token_ids, log_probs = scored
    colocation.to_engines()
    if rollouts is None:
        return {}
    config = worker.config
    num_decoded = min(config.weight_sync.probe_decoded_tokens, config.max_sequence_length - 1 - len(token_ids))
    differences = rollouts.probe(WeightProbe(policy_version, token_ids, log_probs, config.probe_tolerance, num_decoded))
    if not differences:
        return {}
    largest, rms = (max(getattr(each, name) for each in differences) for name in ("largest", "rms"))
    return {"weight_sync/probe_diff_max": Max(largest), "weight_sync/probe_diff_rms": Max(rms)}


def answered(
    worker: Worker,
    engines: RolloutClient | None,
    transport: WeightTransport | None,
    policy_version: int,
    call: Callable[[], T | None] | None,
) -> T | None:
    """Return what `call` returns on the main rank; on all others it is None, and so is the result. Collective.

    With weight_sync.transport=nccl the call returns None when a replaced engine needs the current weights. Then they
    are sent, and the call is repeated.
    """
    while True:
        answer = on_main(call, worker.groups)
        if transport is None or worker.config.weight_sync.transport != "nccl":
            return answer
        if not broadcast_object(call is not None and answer is None, worker.groups):
            return answer
        transport.deliver(policy_version, engines)
