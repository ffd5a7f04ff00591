"""What unit tests in several folders share."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from megatron_bapo.parallel.groups import ParallelGroups


@pytest.fixture(scope="module")
def groups() -> Iterator[ParallelGroups]:
    """The mesh of one rank in this process."""
    # Here, for most tests do without torch and Megatron-Core.
    from bench import gpu
    from megatron_bapo.parallel.megatron import parallel_state

    with pytest.MonkeyPatch.context() as patch:
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
            patch.setenv(name, "0")  # `one_rank` sets them; this puts them back
        with gpu.one_rank() as (groups, _):
            yield groups
            parallel_state.destroy_model_parallel()
