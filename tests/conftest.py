"""What must hold before the first test: how Triton's kernels run, that Ctrl-C counts, and who runs what."""

import os
import signal

import hypothesis
import pytest

from megatron_bapo import ray_variables  # noqa: F401
from megatron_bapo.parallel.platform import has_gpu

if not has_gpu():
    os.environ["TRITON_INTERPRET"] = "1"  # read once, at Triton's first import
# Shells have what they start in the background ignore it, and so would the runs that tests start and interrupt.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # `nohup` has it ignored
# The first example of a test, or any example on a loaded machine, may take long.
hypothesis.settings.register_profile("without-deadline", deadline=None)
hypothesis.settings.load_profile("without-deadline")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> object:
    from tests.scheduling import OneRunAtATime

    return OneRunAtATime(config, log)
