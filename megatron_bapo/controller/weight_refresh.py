"""Brings the trainer's weights to the engines and proves that they arrived."""

from __future__ import annotations

import numpy as np

from megatron_bapo.controller.rollout_client import RolloutClient
from megatron_bapo.errors import RunError
from megatron_bapo.metrics.values import Last, Max, Metric
from megatron_bapo.parallel.collectives import broadcast_object
from megatron_bapo.trainer.weight_publisher import WeightPublisher
from megatron_bapo.trainer.worker import Worker, score_sequence


def refresh_weights(
    worker: Worker, rollouts: RolloutClient | None, publisher: WeightPublisher, policy_version: int
) -> dict[str, Metric]:
    """Publish the trainer's weights as `policy_version`, load them into every engine, and probe."""
    publisher.publish(policy_version)
    if rollouts is None:
        return probe(worker, rollouts, policy_version)
    relay_bytes = rollouts.load_weights(policy_version)
    publisher.store.discard_before(policy_version)
    return {
        **probe(worker, rollouts, policy_version),
        "weight_sync/store_bytes": Last(publisher.plan.total_bytes),
        "weight_sync/relay_bytes": Last(relay_bytes),
    }


def probe(worker: Worker, rollouts: RolloutClient | None, policy_version: int) -> dict[str, Metric]:
    """Compare engine and trainer log-probs on the probe sequence. `rollouts` is None on all ranks but the main one.

    Raises RunError with both numbers when an engine serves another version or differs by more than
    `weight_sync.probe_tolerance` nats.
    """
    token_ids = broadcast_object(rollouts.probe_token_ids if rollouts else None, worker.groups)
    ours = score_sequence(worker, token_ids)
    if rollouts is None:
        return {}
    largest = 0.0
    for name, answer in rollouts.score_probe().items():
        if answer.policy_version != policy_version:
            raise RunError(
                f"{name} serves policy version {answer.policy_version}; the trainer published {policy_version}"
            )
        largest = max(largest, _check(name, answer.log_probs, ours, worker.config.weight_sync.probe_tolerance))
    return {"weight_sync/probe_diff_max": Max(largest)}


def _check(name: str, theirs: np.ndarray, ours: np.ndarray, tolerance: float) -> float:
    difference = np.abs(theirs.astype(np.float64) - ours)
    worst = int(difference.argmax())
    if not difference[worst] <= tolerance:
        raise RunError(
            f"after the weight sync {name} gives token {worst + 1} of the probe a log-prob of {theirs[worst]:.6f}, the "
            f"trainer {ours[worst]:.6f}; weight_sync.probe_tolerance is {tolerance}. The engine does not serve the "
            "trainer's weights, or computes in another precision: set model.dtype=float32, or raise the tolerance if "
            "the difference is rounding"
        )
    return float(difference[worst])
