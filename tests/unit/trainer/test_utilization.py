from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode
from transformers import Qwen2Config

from bench.gpu_train_step import make_config
from bench.train_step import make_examples
from megatron_bapo.metrics.values import Sum, scalars
from megatron_bapo.parallel.groups import ParallelGroups
from megatron_bapo.trainer.policy_update import reduce_metrics, update_policy
from megatron_bapo.trainer.utilization import utilization_metrics
from megatron_bapo.trainer.worker import create_worker

# Megatron-Core warns about its own defaults and calls.
pytestmark = pytest.mark.filterwarnings("ignore")


LENGTHS = [400, 96, 24, 8]
LAYERS, WIDTH = 4, 256


def counted(folder: Path, groups: ParallelGroups, algorithm: dict) -> tuple[float, int]:
    """Return the metric of an update on sequences of LENGTHS, and the FLOPs that torch counted during the update."""
    Qwen2Config(
        vocab_size=64, hidden_size=WIDTH, intermediate_size=512, num_hidden_layers=LAYERS, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=512, tie_word_embeddings=True,
    ).save_pretrained(folder)  # fmt: skip
    config = make_config(folder, 512, len(LENGTHS), {"algorithm": algorithm}, dtype="float32")
    worker = create_worker(config, folder, groups, load=False)
    examples = [
        replace(example, advantage=float(2 * (index % 2) - 1))
        for index, example in enumerate(make_examples(np.array(LENGTHS) + 1, 64))
    ]
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        metrics = update_policy(worker, examples, lr=1e-6, on_policy=False)
    return scalars(reduce_metrics(metrics, groups))["perf/model_flops"], counter.get_total_flops()


@pytest.mark.parametrize(
    ("objective", "passes"), [("ppo", 3), ("bapo", 4)], ids=["training pass", "scoring and training pass"]
)
def test_the_flops_of_an_update_equal_the_count_of_pytorch(
    tmp_path: Path, groups: ParallelGroups, objective: str, passes: int
) -> None:
    """Subtract the products with future tokens, which torch's plain attention also computes, before comparing."""
    ours, theirs = counted(tmp_path, groups, {"objective": objective})
    future = passes * LAYERS * 2 * WIDTH * sum(length**2 for length in LENGTHS)
    assert ours == pytest.approx(theirs - future, rel=0.01)


def test_the_rate_is_per_rank_and_the_utilization_refers_to_the_peak_of_a_known_gpu() -> None:
    values = scalars(utilization_metrics(Sum(8e15), 4.0, 8, "NVIDIA H100 80GB HBM3"))
    assert values == {"perf/tflops_per_gpu": 250.0, "perf/mfu": pytest.approx(250 / 989)}


@pytest.mark.parametrize("device", [None, "NVIDIA H100 PCIe"])
def test_without_a_known_gpu_there_is_a_rate_but_no_utilization(device: str | None) -> None:
    assert scalars(utilization_metrics(Sum(8e15), 4.0, 8, device)) == {"perf/tflops_per_gpu": 250.0}
