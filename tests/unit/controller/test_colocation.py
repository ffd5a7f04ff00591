"""Order of memory on colocated GPUs: what the trainer holds, and has released, each time that engines wake."""

from dataclasses import dataclass, field
from pathlib import Path

import pytest
from transformers import Qwen2Config

from bench import gpu_train_step
from megatron_bapo.config.schema import Config
from megatron_bapo.controller import colocation
from megatron_bapo.controller.colocation import ColocationManager
from megatron_bapo.parallel.groups import ParallelGroups
from megatron_bapo.trainer import offload
from megatron_bapo.trainer.offload import Storages
from megatron_bapo.trainer.policy_update import update_policy
from megatron_bapo.trainer.worker import create_worker, score_sequence

# Megatron-Core warns about its own defaults and calls.
pytestmark = pytest.mark.filterwarnings("ignore")


@dataclass
class RecordingEngines:
    """Engines that write down when they sleep and wake, and what the trainer then holds."""

    events: list[str]
    held: dict[str, Storages] = field(default_factory=dict)

    def wait_for_engines(self) -> None:
        self.events.append("started")

    def sleep(self, level: int) -> None:
        self.events.append(f"sleep {level}")

    def wake(self, tags: tuple[str, ...]) -> None:
        held = [name for name, storages in self.held.items() if not storages.is_offloaded]
        self.events.append(f"wake {'+'.join(tags)} beside {'+'.join(held) or 'nothing'}")


def config_of(folder: Path, *, trainer_offload: bool) -> Config:
    Qwen2Config(
        vocab_size=96, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=128,
    ).save_pretrained(folder)  # fmt: skip
    config = gpu_train_step.make_config(folder, 64, 4, {}, dtype="bfloat16")
    rollout = config.rollout.model_copy(update={"colocate": True, "sleep_level": 2})
    trainer = config.trainer.model_copy(update={"offload": trainer_offload})
    return config.model_copy(update={"rollout": rollout, "trainer": trainer})


@pytest.mark.parametrize("trainer_offload", [False, True])
def test_the_trainer_releases_its_memory_before_engines_wake(
    trainer_offload: bool, tmp_path: Path, groups: ParallelGroups, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[str] = []
    for module in colocation, offload:
        monkeypatch.setattr(module, "release_cached_memory", lambda: events.append("release"))
    config, engines = config_of(tmp_path, trainer_offload=trainer_offload), RecordingEngines(events)
    turns = ColocationManager(config, groups, engines)  # pyright: ignore[reportArgumentType]
    assert events == ["started", "sleep 1"]
    worker = create_worker(config, tmp_path, groups, load=False)
    turns.manage(worker, [])
    if trainer_offload:
        assert turns._memory is not None
        engines.held = {name: getattr(turns._memory, name) for name in ("parameters", "gradients", "optimizer")}
    examples = gpu_train_step.make_batch(64, 1, vocab_size=96)
    turns.to_engines()
    for _ in range(2):
        turns.to_trainer()
        update_policy(worker, examples, lr=1e-2, on_policy=True)
        events.append("updated")
        turns.to_weight_sync()
        score_sequence(worker, examples[0].trajectory.response_token_ids[:8])
        events.append("scored")
        turns.to_engines()
    with turns.trainer_turn():
        events.append("evaluated")

    wakes = [index for index, event in enumerate(events) if event.startswith("wake")]
    assert len(wakes) == 6
    assert all(events[index - 1] == "release" for index in wakes)
    parameters = "parameters" if trainer_offload else "nothing"
    assert [events[index] for index in wakes[1:3]] == [
        f"wake weights beside {parameters}",
        "wake weights+kv_cache beside nothing",
    ]
    sleeps = [index for index, event in enumerate(events) if event.startswith("sleep")]
    assert [events[index] for index in sleeps] == ["sleep 1", "sleep 2", "sleep 2", "sleep 1"]
    # Engines sleep before the trainer uses its memory, and wake after it.
    uses = [index for index, event in enumerate(events) if event in ("updated", "evaluated")]
    assert all(sleep < use < wake for sleep, use, wake in zip(sleeps[1:], uses, wakes[1::2], strict=True))
