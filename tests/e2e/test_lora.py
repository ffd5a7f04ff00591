"""Whole runs that train adapters, with real engines."""

from pathlib import Path

import pytest

from megatron_bapo.config.lora import LoraConfig
from megatron_bapo.metrics.sinks import read_rows
from megatron_bapo.model.hf_import import SafetensorsFolder
from megatron_bapo.model.peft_folder import MergedTensors, read_adapter_config
from megatron_bapo.run_directory import RunDirectory
from tests.e2e.test_training import finish, start
from tests.parallel.tensors import load_folder
from tests.tolerances import ENGINE_LOG_PROB

ADAPTERS = ("model.lora.rank=4", "model.lora.alpha=8", "algorithm.kl_loss_coef=0.1")
STAGES = ("tensor_model_parallel_size=1", "sequence_parallel=false", "pipeline_model_parallel_size=2")


def run(folder: Path, *overrides: str) -> dict[int, dict[str, float]]:
    """Return the metrics of the training steps of a run."""
    code, output, errors = finish(start(folder, *ADAPTERS, *overrides))
    assert code == 0, output + errors
    return {row["step"]: row["metrics"] for row in read_rows(folder / "metrics.jsonl") if row["phase"] == "train"}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[RunDirectory, dict[int, dict[str, float]]]:
    """Return a run with a warm start that was continued with other parallelism, and its metrics.

    Its engines receive adapters in the first two steps, and then merged weights.
    """
    folder = tmp_path_factory.mktemp("lora") / "run"
    run(folder, "trainer.total_steps=2", "weight_sync.lora=adapters")
    metrics = run(folder, "trainer.total_steps=3", *(f"parallel.{setting}" for setting in STAGES))
    return RunDirectory(folder), metrics


def test_engines_serve_the_policy_after_every_update_from_adapters_and_from_merged_weights(
    trained: tuple[RunDirectory, dict[int, dict[str, float]]],
) -> None:
    directory, metrics = trained
    assert sorted(metrics) == [1, 2, 3]
    assert max(step["weight_sync/probe_diff_max"] for step in metrics.values()) < ENGINE_LOG_PROB
    sizes = [sum(x.nbytes for x in load_folder(f).values()) for f in (directory.adapter, directory.export)]
    assert [metrics[step]["weight_sync/store_bytes"] for step in (1, 2, 3)] == [sizes[0], sizes[0], sizes[1]]


def test_the_exports_are_the_model_and_its_adapters(
    trained: tuple[RunDirectory, dict[int, dict[str, float]]],
) -> None:
    directory, _ = trained
    lora = read_adapter_config(directory.adapter)
    assert (lora.rank, lora.alpha) == (4, 8)
    assert set(lora.target_modules) == set(LoraConfig().target_modules)
    assert directory.newest_checkpoint is not None
    adapters = directory.newest_checkpoint / "weights"
    assert len(load_folder(adapters)) == len(load_folder(directory.adapter)) == 2 * 2 * 7
    exported = load_folder(directory.export)
    with SafetensorsFolder(directory.root / "initial_model") as base, SafetensorsFolder(adapters) as saved:
        merged = MergedTensors(base, saved, lora)
        for name, tensor in exported.items():
            assert (merged.slice(name) - tensor).abs().max() < 1e-6
            assert name.endswith("_proj.weight") == bool((base.slice(name)[:] != tensor).any())


def test_without_a_warm_start_the_policy_without_adapters_is_the_reference(tmp_path: Path) -> None:
    metrics = run(tmp_path / "run", "trainer.total_steps=1", "warm_start=null")
    assert not RunDirectory(tmp_path / "run").reference.exists()
    assert 0 <= metrics[1]["actor/kl_loss"] < 1e-3
