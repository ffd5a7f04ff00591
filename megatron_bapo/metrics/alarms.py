"""Warnings of metrics that have left their limits."""

from __future__ import annotations

from collections.abc import Mapping

from megatron_bapo.config.logging import MismatchAlarmsConfig

WAY_OUT = (
    "correct for it (algorithm.behaviour_policy=recomputed with algorithm.rollout_correction.rollout_is=token), lower "
    "it (rollout.quantization, rollout.kv_cache_dtype, fp8, model.dtype), or raise the limit"
)


def mismatch_alarms(metrics: Mapping[str, float | None], limits: MismatchAlarmsConfig) -> list[str]:
    """One line for each measure of the train/rollout mismatch that is over its limit; a metric may be absent.

    A value that is not a number is over every limit.
    """
    found = []
    for name, limit in limits.model_dump().items():
        value = metrics.get(f"training/{name}")
        distance = value if value is None or name != "sampling_importance_ratio" else abs(value - 1.0)
        if distance is not None and not distance <= limit:
            between = f"1 - {limit} to 1 + {limit}" if distance is not value else f"at most {limit}"
            found.append(
                f"training/{name} is {value:.5g}, logging.mismatch_alarms.{name} allows {between}: the engines' "
                f"log-probs are not the trainer's; {WAY_OUT}"
            )
    return found
