import pytest

from megatron_bapo.errors import UserError
from megatron_bapo.metrics.values import scalars
from megatron_bapo.rollout.accounting import Ledger


class Stream:
    num_taken = 0

    def ledger(self) -> Ledger:
        return Ledger(lambda: self.num_taken)


def test_every_prompt_is_in_one_place_and_the_counts_add_up_to_the_streams():
    stream = Stream()
    ledger = stream.ledger()
    for prompt_id in "abcdef":
        stream.num_taken += 1
        ledger.open(prompt_id)
    ledger.move(1, "buffered")
    for serial, outcome in [(1, "trained"), (2, "dropped_uniform"), (3, "dropped_stale"), (4, "quarantined")]:
        ledger.close(serial, outcome)
    ledger.move(5, "buffered")
    stream.num_taken += 3 + 2
    ledger.skip(2)
    ledger.add_warm_start(3)
    assert scalars(ledger.metrics()) == {
        "rollout/accounting/taken": 11,
        "rollout/accounting/in_flight": 1,
        "rollout/accounting/buffered": 1,
        "rollout/accounting/returned": 0,
        "rollout/accounting/trained": 1,
        "rollout/accounting/warm_start": 3,
        "rollout/accounting/dropped_uniform": 1,
        "rollout/accounting/dropped_stale": 1,
        "rollout/accounting/quarantined": 1,
        "rollout/accounting/skipped": 2,
    }


def test_a_prompt_that_is_lost_or_closed_twice_is_detected_at_the_next_transition():
    stream = Stream()
    ledger = stream.ledger()
    stream.num_taken = 2
    with pytest.raises(AssertionError, match="the stream has given out 2 prompts, the ledger has 1"):
        ledger.open("a")
    stream.num_taken = 1
    ledger.close(0, "trained")
    with pytest.raises(KeyError):
        ledger.close(0, "trained")


def test_open_prompts_are_returned_in_order_with_their_serial_numbers():
    stream = Stream()
    ledger = stream.ledger()
    for prompt_id in "abcd":
        stream.num_taken += 1
        ledger.open(prompt_id)
    ledger.move(2, "buffered")
    ledger.close(1, "trained")
    again = stream.ledger()
    again.load_state_dict(ledger.state_dict())
    assert again.returned() == [(0, "a"), (2, "c"), (3, "d")]
    again.restore(2, "c", "in_flight")
    assert again.returned() == [(0, "a"), (3, "d")]
    for serial, prompt_id in ((0, "b"), (1, "b"), (2, "c")):
        with pytest.raises(UserError, match=f"prompt {prompt_id} with serial number {serial}, which is not open"):
            again.restore(serial, prompt_id, "buffered")
    stream.num_taken += 1
    assert again.open("e") == 4
