import os
import signal
from collections.abc import Iterator

import pytest

from megatron_bapo.cluster.interrupts import Interrupts

HANDLED = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)


@pytest.fixture(params=HANDLED, ids=lambda number: number.name)
def number(request: pytest.FixtureRequest) -> Iterator[signal.Signals]:
    """A signal that this process ignores during the test."""
    previous = signal.signal(request.param, signal.SIG_IGN)
    yield request.param
    signal.signal(request.param, previous)


def test_a_signal_that_was_ignored_at_the_start_stays_ignored(number: signal.Signals) -> None:
    with Interrupts() as interrupts:
        for _ in range(2):
            os.kill(os.getpid(), number)
        assert not interrupts.requested
        other = next(each for each in HANDLED if each != number)
        os.kill(os.getpid(), other)
        assert interrupts.requested
    assert signal.getsignal(number) == signal.SIG_IGN


def test_a_first_signal_asks_for_a_stop_and_a_second_one_interrupts() -> None:
    before = [signal.getsignal(each) for each in HANDLED]
    with Interrupts() as interrupts:
        os.kill(os.getpid(), signal.SIGHUP)
        assert interrupts.requested
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    assert [signal.getsignal(each) for each in HANDLED] == before
