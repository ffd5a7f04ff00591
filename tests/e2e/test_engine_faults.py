"""Runs whose engines, rewards, trainer and weight store fail complete without losing a prompt."""

import json
from pathlib import Path

from tests.e2e.faulted_run import Fault, FaultedRun


def test_faults_of_all_parts_at_different_moments_lose_no_prompt(tmp_path: Path) -> None:
    script = [Fault("kill", "trainer"), Fault("kill"), Fault("kill", "start"), Fault("stop", "sync")]
    script += [Fault("kill", "core"), Fault("kill", "update"), Fault("raise"), Fault("hang")]
    with FaultedRun(tmp_path, len(script), "checkpoint.every_s=2") as run:
        run.inject(script)
        run.finish()
    print(run.table())
    for one in run.injected:
        assert one.detected_s is not None
        assert one.recovered_s is not None


def test_weight_updates_and_batches_survive_a_killed_relay_and_a_full_object_store(tmp_path: Path) -> None:
    """Each batch is larger than the object store: 8 prompts of 10 MB each."""
    prompts = tmp_path / "prompts.jsonl"
    with prompts.open("w") as file:
        for index in range(8):
            row = {"prompt": f"{index} + 1 =", "answer": str(index + 1), "extra_info": {"blob": "x" * 10_000_000}}
            file.write(json.dumps(row) + "\n")
    script = [Fault("kill", "relay"), Fault("kill", "source"), Fault("kill")]
    overrides = (
        *("weight_sync.engine_store=own", "rollout.object_store_mib=75", "logging.dump_rollouts=false"),
        *("data.train.reasoning_gym=null", "data.train.size=null", f"data.train.path={prompts}"),
        "rollout.num_engines=1",
    )
    with FaultedRun(tmp_path, len(script), *overrides) as run:
        run.inject(script)
        run.finish()
    print(run.table())


def test_engines_that_get_their_weights_from_trainer_ranks_are_replaced_without_a_restart(tmp_path: Path) -> None:
    """The two engines pass weights on to each other. One is killed while it generates, and others during updates."""
    script = [Fault("kill"), Fault("kill", "sync"), Fault("kill", "update"), Fault("stop", "sync")]
    with FaultedRun(tmp_path, len(script), "weight_sync.transport=nccl", "logging.dump_rollouts=false") as run:
        run.inject(script)
        run.finish()
    print(run.table())
    for one in run.injected:
        assert one.recovered_s is not None
