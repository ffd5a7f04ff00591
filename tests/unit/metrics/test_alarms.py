import pytest

from megatron_bapo.config.logging import MismatchAlarmsConfig
from megatron_bapo.metrics.alarms import mismatch_alarms

LIMITS = MismatchAlarmsConfig()
WITHIN = {
    "training/token_mult_prob_error": 1.05,
    "training/gen_kl_error": 1e-3,
    "training/sampling_importance_ratio": 0.96,
}


def test_metrics_within_their_limits_or_absent_raise_no_alarm() -> None:
    assert mismatch_alarms(WITHIN, LIMITS) == []
    assert mismatch_alarms({"actor/loss": 1.0, "training/gen_kl_error": None}, LIMITS) == []


@pytest.mark.parametrize(
    ("name", "value", "allowed"),
    [
        ("token_mult_prob_error", 1.0501, "allows at most 1.05"),
        ("gen_kl_error", 0.002, "allows at most 0.001"),
        ("sampling_importance_ratio", 1.06, "allows 1 - 0.05 to 1 + 0.05"),
        ("sampling_importance_ratio", 0.94, "allows 1 - 0.05 to 1 + 0.05"),
        ("gen_kl_error", float("nan"), "allows at most 0.001"),
    ],
)
def test_an_alarm_names_value_limit_and_remedy(name: str, value: float, allowed: str) -> None:
    (alarm,) = mismatch_alarms({**WITHIN, f"training/{name}": value}, LIMITS)
    assert alarm.startswith(f"training/{name} is {value:.5g}, logging.mismatch_alarms.{name} {allowed}")
    assert "rollout_correction" in alarm


def test_limits_are_configurable() -> None:
    limits = MismatchAlarmsConfig(token_mult_prob_error=1.2)
    assert mismatch_alarms({"training/token_mult_prob_error": 1.19}, limits) == []
    assert len(mismatch_alarms({"training/token_mult_prob_error": 1.21}, limits)) == 1
