"""Brings the trainer's weights to the engines and proves that they arrived."""

from __future__ import annotations

from functools import partial

from megatron_bapo.controller.device_turns import DeviceTurns
from megatron_bapo.controller.rollout_client import RolloutClient
from megatron_bapo.metrics.values import Last, Max, Metric
from megatron_bapo.parallel.collectives import broadcast_object
from megatron_bapo.rollout.weight_probe import WeightProbe
from megatron_bapo.trainer.weight_publisher import WeightTransport
from megatron_bapo.trainer.worker import Worker, score_sequence


def refresh_weights(
    worker: Worker,
    rollouts: RolloutClient | None,
    transport: WeightTransport,
    turns: DeviceTurns,
    policy_version: int,
) -> dict[str, Metric]:
    """Bring the trainer's weights to every engine as `policy_version`, and probe."""
    turns.to_weight_sync()
    load = None if rollouts is None else partial(rollouts.load_weights, policy_version)
    relay_bytes = transport.deliver(policy_version, load)
    metrics = probe(worker, rollouts, turns, policy_version)
    if rollouts is not None:
        metrics["weight_sync/store_bytes"] = Last(transport.plan.total_bytes)
        metrics["weight_sync/relay_bytes"] = Last(relay_bytes)
    return metrics


def probe(worker: Worker, rollouts: RolloutClient | None, turns: DeviceTurns, policy_version: int) -> dict[str, Metric]:
    """Compare engine and trainer log-probs on the probe sequence, then it is the engines' turn.

    `rollouts` is None on all ranks but the main one. Raises ProbeFailed for an engine that does not pass.
    """
    token_ids = broadcast_object(rollouts.probe_token_ids if rollouts else None, worker.groups)
    ours = score_sequence(worker, token_ids)
    turns.to_engines()
    if rollouts is None:
        return {}
    differences = rollouts.probe(WeightProbe(policy_version, token_ids, ours, worker.config.probe_tolerance))
    return {"weight_sync/probe_diff_max": Max(max(differences))} if differences else {}
