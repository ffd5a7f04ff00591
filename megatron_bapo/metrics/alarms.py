"""Warnings for metrics that exceed their limits."""

from __future__ import annotations

from collections.abc import Mapping

from megatron_bapo.config.logging import MismatchAlarmsConfig

REMEDY = (
    "correct for it (algorithm.behaviour_policy=recomputed with algorithm.rollout_correction.rollout_is=token), lower "
    "it (rollout.quantization, rollout.kv_cache_dtype, fp8, model.dtype), or raise the limit"
)


def mismatch_alarms(metrics: Mapping[str, float | None], limits: MismatchAlarmsConfig) -> list[str]:
    """Return a warning for each measure of the train/rollout mismatch that exceeds its limit.

    Absent metrics raise no warning; NaN exceeds every limit.
    """
    found = []
    for name, limit in limits.model_dump().items():
        value = metrics.get(f"training/{name}")
        distance = value if value is None or name != "sampling_importance_ratio" else abs(value - 1.0)
        if distance is not None and not distance <= limit:
            allowed = f"1 - {limit} to 1 + {limit}" if distance is not value else f"at most {limit}"
            found.append(
                f"training/{name} is {value:.5g}, logging.mismatch_alarms.{name} allows {allowed}: the engines' "
                f"log-probs differ from the trainer's; {REMEDY}"
            )
    return found
