from megatron_bapo.trainer.speculation import MIN_MEASURED, RECENT_UPDATES, SCORE_EVERY, Speculation


def after(*updates: tuple[bool, float | None]) -> Speculation:
    """Return a Speculation after these updates: (missed, scoring cost)."""
    speculation = Speculation()
    for missed, scoring_cost in updates:
        speculation.record(missed=missed, scoring_cost=scoring_cost)
    return speculation


def test_nothing_is_predicted_before_the_cost_of_scoring_is_known() -> None:
    for number in range(MIN_MEASURED):
        assert not after(*[(False, 0.3)] * number).pays
    assert after(*[(False, 0.3)] * MIN_MEASURED).pays


def test_predicting_pays_while_the_miss_rate_is_below_the_cost_of_scoring() -> None:
    assert after(*[(True, 0.3), (False, 0.3), (False, 0.3), (False, 0.3)]).pays
    assert not after(*[(True, 0.2), (False, 0.2), (False, 0.2), (False, 0.2)]).pays


def test_misses_lead_to_scoring_and_hits_lead_back_to_speculation() -> None:
    speculation = after(*[(False, 0.3)] * RECENT_UPDATES)
    num_speculated = 0
    while speculation.pays:
        speculation.record(missed=True)
        num_speculated += 1
    assert num_speculated == 10  # 10 of 32 is more than 0.3
    for _ in range(RECENT_UPDATES):
        speculation.record(missed=False, scoring_cost=0.3)
    assert speculation.pays


def test_an_update_is_scored_periodically_because_costs_change() -> None:
    speculation = after(*[(False, 0.3)] * MIN_MEASURED)
    for _ in range(SCORE_EVERY):
        assert speculation.pays
        speculation.record(missed=False)
    assert not speculation.pays
    speculation.record(missed=False, scoring_cost=0.3)
    assert speculation.pays


def test_a_single_slow_scoring_pass_does_not_change_the_decision() -> None:
    assert not after((True, 0.3), (True, 30.0), (False, 0.3)).pays
