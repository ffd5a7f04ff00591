from types import SimpleNamespace
from typing import Any

import pytest

from megatron_bapo.config.optimizer import OptimizerConfig
from megatron_bapo.parallel.megatron import OptimizerParamScheduler
from megatron_bapo.trainer.learning_rate import learning_rate


def rates(num_updates: int, *, of: int | None = None, **settings: Any) -> list[float]:
    config = OptimizerConfig.model_validate({"lr": 1.0, **settings})
    return [learning_rate(config, update, num_updates) for update in range(of or num_updates)]


def megatron_rates(num_updates: int, *, of: int, **settings: Any) -> list[float]:
    """Return the rates of Megatron's scheduler, whose second update corresponds to our first one."""
    config = OptimizerConfig.model_validate({"lr": 1.0, **settings})
    group: dict[str, Any] = {}
    scheduler = OptimizerParamScheduler(
        SimpleNamespace(param_groups=[group]),  # pyright: ignore[reportArgumentType]
        init_lr=0.0,
        max_lr=config.lr,
        min_lr=config.min_lr,
        lr_warmup_steps=config.lr_warmup_steps + 1,
        lr_decay_steps=(config.lr_decay_steps or num_updates) + 1,
        lr_decay_style=config.lr_decay_style,
        start_wd=0.0,
        end_wd=0.0,
        wd_incr_steps=1,
        wd_incr_style="constant",
        wsd_decay_steps=config.lr_wsd_decay_steps,
        lr_wsd_decay_style=config.lr_wsd_decay_style,
    )
    values = []
    for _ in range(of):
        scheduler.step(1)
        values.append(group["lr"])
    return values


@pytest.mark.parametrize("num_warmup", [0, 7])
@pytest.mark.parametrize("min_lr", [0.0, 0.1])
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"lr_decay_style": "linear"},
        {"lr_decay_style": "cosine"},
        {"lr_decay_style": "cosine", "lr_decay_steps": 30},
        {"lr_decay_style": "inverse-square-root"},
        *(
            {"lr_decay_style": "WSD", "lr_wsd_decay_steps": 15, "lr_wsd_decay_style": style}
            for style in ("linear", "cosine", "exponential", "minus_sqrt")
        ),
    ],
    ids=lambda settings: "-".join(map(str, settings.values())) or "constant",
)
def test_every_decay_style_matches_megatron(settings: dict[str, Any], min_lr: float, num_warmup: int) -> None:
    settings = {**settings, "min_lr": min_lr, "lr_warmup_steps": num_warmup}

    assert rates(40, of=60, **settings) == pytest.approx(megatron_rates(40, of=60, **settings), abs=1e-12)


def test_without_a_decay_the_rate_rises_linearly_and_then_stays() -> None:
    assert rates(7, lr_warmup_steps=4) == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0, 1.0, 1.0])


@pytest.mark.parametrize("style", ["constant", "linear", "cosine", "inverse-square-root"])
@pytest.mark.parametrize("num_updates", [1, 100])
def test_without_a_warm_up_the_first_update_has_the_full_rate(style: str, num_updates: int) -> None:
    assert rates(num_updates, lr=3e-4, lr_decay_style=style)[0] == 3e-4


def test_with_a_cosine_the_rate_peaks_after_the_warm_up_and_falls_to_zero() -> None:
    values = rates(100, of=151, lr_warmup_steps=10, lr_decay_style="cosine")

    assert values.index(max(values)) == 10
    assert values[:11] == sorted(values[:11])
    assert values[10:] == sorted(values[10:], reverse=True)
    assert [values[10], values[55], values[100], values[150]] == pytest.approx([1.0, 0.5, 0.0, 0.0])
    assert 0.0 < values[99] < 1e-3  # the last update still has an effect


@pytest.mark.parametrize("style", ["linear", "cosine"])
def test_a_warm_up_as_long_as_the_run_never_falls(style: str) -> None:
    values = rates(5, lr_warmup_steps=5, lr_decay_style=style)

    assert values == sorted(values)


def test_after_a_decay_shorter_than_the_run_the_rate_stays_at_the_minimum() -> None:
    values = rates(20, lr_decay_style="linear", lr_decay_steps=10, min_lr=0.2)

    assert values[5] == pytest.approx(0.6)
    assert values[10:] == pytest.approx([0.2] * 10)
