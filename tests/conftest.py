"""Where there is no GPU, Triton's kernels run in its interpreter, which it takes up only before its first import."""

import os

import pytest

from megatron_bapo.parallel.platform import has_gpu

if not has_gpu():
    os.environ["TRITON_INTERPRET"] = "1"


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> object:
    from tests.scheduling import OneRunAtATime

    return OneRunAtATime(config, log)
