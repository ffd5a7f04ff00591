"""Tests of the GPU benchmarks at toy size on the available device, and of their message without a GPU."""

import asyncio
import json
import subprocess
import sys
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from transformers import Qwen2Config

from bench import gpu, gpu_bapo_step, gpu_generation, gpu_kernels, gpu_train_step, gpu_weight_handover, results
from megatron_bapo.config.architecture import read_architecture
from megatron_bapo.parallel.groups import ParallelGroups
from megatron_bapo.parallel.platform import has_gpu
from megatron_bapo.planning.flops import forward_pass_flops
from megatron_bapo.planning.hardware import Assumptions
from megatron_bapo.planning.known_models import FOLDER
from megatron_bapo.planning.parameters import num_parameters
from megatron_bapo.rollout.engine import engine_environment

# Megatron-Core warns of its own defaults and of its own calls.
pytestmark = pytest.mark.filterwarnings("ignore")

BENCHES = ("gpu_train_step", "gpu_kernels", "gpu_weight_handover", "gpu_bapo_step", "gpu_generation")
STEP = {"max_tokens": 64, "step_tokens": 128, "dtype": "float32"}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a config.json and no weights."""
    folder = tmp_path_factory.mktemp("model")
    Qwen2Config(
        vocab_size=300, hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=128, tie_word_embeddings=True,
    ).save_pretrained(folder)  # fmt: skip
    return folder


@pytest.mark.skipif(has_gpu(), reason="there is a GPU, on which the benches would start")
@pytest.mark.parametrize("name", BENCHES)
def test_without_a_gpu_a_bench_ends_with_the_reason(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module = sys.modules[f"bench.{name}"]
    with pytest.raises(SystemExit) as ended:
        module.main()
    assert "needs a GPU, and none is found" in str(ended.value)


def test_every_gpu_bench_is_run_by_make_gpu_bench() -> None:
    root = Path(__file__).parents[3]
    printed = subprocess.run(
        ["make", "--dry-run", "--old-file=setup", "gpu-bench"], cwd=root, capture_output=True, text=True, check=True
    ).stdout
    assert {f.stem for f in (root / "bench").glob("gpu_*.py")} == set(BENCHES)
    assert all(name in printed for name in BENCHES)


def test_results_are_saved_with_package_versions(tmp_path: Path) -> None:
    results.save("some_bench", {"ratios": {"of_copy": 0.5}}, tmp_path / "gpu")
    left = json.loads((tmp_path / "gpu" / "some_bench.json").read_text())
    assert left["ratios"] == {"of_copy": 0.5}
    assert left["versions"]["torch"] == version("torch")
    assert set(results.PACKAGES) <= set(left["versions"])
    assert (left["versions"]["gpu"] == "none") == (not has_gpu())


def test_ceilings_are_measured() -> None:
    assert gpu.matrix_flops(size=64) > 1e6
    assert gpu.copy_bytes_per_s(num_bytes=1 << 20) > 1e6


def test_the_train_steps_flops_are_those_of_the_planner(model: Path, groups: ParallelGroups) -> None:
    found = gpu_train_step.measure(model, groups, gpu_train_step.layers()["local bf16"], **STEP)
    lengths, architecture = [18, 17, 15, 14] * 2, read_architecture(model)
    per_step = 3 * forward_pass_flops(architecture, lengths)
    assert found.flops / found.tokens_per_s == pytest.approx(per_step / 128, rel=1e-9)


FP8 = gpu_train_step.TRANSFORMER_ENGINE | {"fp8": {"recipe": "tensorwise"}}
# Tokens per second and the peak of torch's tensors in GiB, as `tests/gpu/test_train_step.py` measured them on an H200
# with torch 2.11, Transformer Engine 2.20.2 and Megatron-Core 0.19.2.
ON_H200: dict[tuple[str, str], tuple[dict[str, Any], float, float]] = {
    ("Qwen2.5-1.5B", "local bf16"): ({}, 42_540, 47.38),
    ("Qwen2.5-1.5B", "TE bf16"): (gpu_train_step.TRANSFORMER_ENGINE, 39_830, 43.38),
    ("Qwen2.5-1.5B", "TE FP8"): (FP8, 33_500, 43.3),
    ("Qwen2.5-3B", "local bf16"): ({}, 20_810, 85.79),
    ("Qwen2.5-3B", "TE bf16"): (gpu_train_step.TRANSFORMER_ENGINE, 22_390, 79.18),
    ("Qwen2.5-3B", "TE FP8"): (FP8, 24_400, 80.2),
}
HOST_LAYER_MS = {"TE FP8": 8.2}
"""A profile of both models on that machine: in FP8 the GPU waits for the host, which takes this for a layer."""


@pytest.mark.parametrize(("model_name", "layers"), ON_H200)
def test_the_plan_of_a_train_step_agrees_with_an_h200(model_name: str, layers: str) -> None:
    settings, tokens_per_s, peak_gib = ON_H200[model_name, layers]
    host_ms = HOST_LAYER_MS.get(layers, Assumptions().host_layer_ms)
    plan = gpu_train_step.planned(
        FOLDER / model_name, settings, "H200", max_tokens=8192, step_tokens=16384, host_layer_ms=host_ms
    )
    time, peak = tokens_per_s / plan.tokens_per_s, plan.peak_bytes / 2**30 / peak_gib
    print(f"planned over measured: time {time:.3f}, peak {peak:.3f}")
    assert time == pytest.approx(1.0, rel=0.10)
    assert peak == pytest.approx(1.0, rel=0.04)


# Milliseconds of a decoding step, as `bench.gpu_generation` measured them on an H200 with vLLM 0.26.
DECODING_ON_H200 = {
    ("Qwen2.5-1.5B", 8): 2.65,
    ("Qwen2.5-1.5B", 64): 5.55,
    ("Qwen2.5-1.5B", 256): 14.26,
    ("Qwen2.5-7B", 8): 5.34,
    ("Qwen2.5-7B", 64): 6.39,
    ("Qwen2.5-7B", 256): 14.36,
}


@pytest.mark.parametrize(("model_name", "num_responses"), DECODING_ON_H200)
def test_the_plan_of_generation_agrees_with_an_h200(model_name: str, num_responses: int) -> None:
    num_tokens = gpu_generation.NUM_TOKENS
    seconds = gpu_generation.planned_seconds(FOLDER / model_name, "H200", num_responses, num_tokens)
    ratio = 1e3 * seconds / num_tokens / DECODING_ON_H200[model_name, num_responses]
    print(f"planned over measured: {ratio:.3f}")
    assert ratio == pytest.approx(1.0, rel=0.15)


@pytest.mark.parametrize(("free_gib", "tokens"), [(139, 8192), (78, 4096), (60, 1024)])
def test_micro_batches_are_halved_until_they_fit(free_gib: int, tokens: int) -> None:
    assert gpu_train_step.fitting_tokens(FOLDER / "Qwen2.5-3B", 8192, free_gib << 30) == tokens


def test_the_hosts_time_of_a_layer_is_measured(model: Path, groups: ParallelGroups) -> None:
    assert 0 < gpu_train_step.measure_host_layer_ms(model, groups, {}, dtype="float32") < 1e4


def test_long_micro_batches_recompute_their_activations() -> None:
    for length, recomputed in (("8k", None), ("32k", "full")):
        config = gpu_train_step.make_config(FOLDER / "Qwen2.5-3B", gpu_train_step.TOKENS[length], 4, {})
        assert config.parallel.recompute_granularity == recomputed
        assert config.trainer.max_tokens_per_gpu == gpu_train_step.TOKENS[length]


def test_the_parts_of_a_bapo_update_add_up_to_the_whole(model: Path, groups: ParallelGroups) -> None:
    seconds = gpu_bapo_step.measure(model, groups, {}, **STEP)
    whole = seconds.pop("whole update")
    assert sum(seconds.values()) == pytest.approx(whole)
    assert set(seconds) == {"scoring", "bound search", "training pass", "optimizer", "rest"}
    assert min(value for name, value in seconds.items() if name not in ("rest", "training pass")) > 0


def test_kernels_and_losses_are_timed_by_both_paths() -> None:
    size = replace(gpu_kernels.FULL, num_tokens=8, chunk_size=4, vocab_size=32, hidden_size=16, num_loss_tokens=64)
    assert set(gpu_kernels.kernel_bytes_per_s(size)) == {"sums", "gradient"}
    seconds, peaks = gpu_kernels.token_losses(size)
    assert set(seconds) == set(peaks) == {"Triton", "torch"}
    assert set(gpu_kernels.losses(size)) == {"loss alone", "whole loss"}


@pytest.mark.slow
def test_an_engines_process_receives_every_parameter(model: Path) -> None:
    num_bytes, seconds = gpu_weight_handover.measure(model)
    parameters = gpu_weight_handover.make_parameters(gpu_weight_handover.make_plan(model))
    assert num_bytes == sum(tensor.nbytes for tensor in parameters.values())
    assert num_bytes == 2 * num_parameters(read_architecture(model))
    assert seconds > 0


@pytest.mark.slow
def test_an_engines_tokens_are_counted_and_timed(model: Path, tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as environment:
        for name, value in engine_environment().items():
            environment.setenv(name, value)
        gpu_generation.create_model(model, tmp_path, "float32")
        found = asyncio.run(gpu_generation.measure(tmp_path, (8, 16), 16, dtype="float32"))
    for number, measured in found.items():
        assert measured.num_tokens == pytest.approx(16 * number, rel=0.5)  # some end early
        assert measured.seconds > 0
