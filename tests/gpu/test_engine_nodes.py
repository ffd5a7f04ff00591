"""An engine with a tensor-parallel rank on each of two nodes: here processes with a GPU each that meet by network."""

from pathlib import Path

import pytest

from megatron_bapo.parallel.platform import visible_devices
from tests.e2e.test_engine_nodes import use_two_nodes
from tests.tolerances import BF16_ENGINE_LOG_PROB


@pytest.mark.skipif(len(visible_devices()) < 2, reason="needs two GPUs")
def test_an_engine_on_two_nodes_loads_each_nodes_weights_and_is_replaced_when_an_idle_rank_dies(tmp_path: Path) -> None:
    first, second = visible_devices()[:2]
    use_two_nodes(tmp_path, [(first,), (second,)], "bfloat16", BF16_ENGINE_LOG_PROB)
