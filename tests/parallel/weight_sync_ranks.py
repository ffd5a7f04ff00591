"""Run by `launch`: trains a little and publishes every version, for engines of several layouts.

A case is {"name", "model", "parallel", "store", "engines", "first_version"}, and may have a "dtype"; "engines" are
`rollout` sections. Each of three times it publishes the same weights once for every engine layout, under successive
versions, and trains on. Its folder gets the trainer's log-probs of the sequences by version and the bytes that each
rank wrote.
"""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from examples import LEARNING_RATE, make_config, make_examples
from running import run_cases
from safetensors.torch import save_file

from megatron_bapo.config.rollout import RolloutConfig
from megatron_bapo.parallel.collectives import barrier
from megatron_bapo.parallel.groups import ParallelGroups
from megatron_bapo.trainer.policy_update import update_policy
from megatron_bapo.trainer.weight_publisher import WeightPublisher
from megatron_bapo.trainer.worker import create_worker, score_sequence
from megatron_bapo.weight_sync.transport import WeightStore

NUM_SYNCS = 3


def run_case(case: dict, out: Path, groups: ParallelGroups) -> None:
    config = make_config(Path(case["model"]), out / "run", case["parallel"], case.get("dtype", "float32"), packing=True)
    worker = create_worker(config, config.model_path, groups)
    publishers = [
        WeightPublisher(
            replace(worker, config=config.model_copy(update={"rollout": RolloutConfig(**engine)})),
            WeightStore(Path(case["store"])),
        )
        for engine in case["engines"]
    ]
    examples = make_examples(worker.model.architecture.vocab_size)
    trajectory = max((example.trajectory for example in examples), key=lambda t: len(t.response_token_ids))
    sequence = np.concatenate([trajectory.prompt_token_ids, trajectory.response_token_ids])
    version, log_probs, num_bytes = case["first_version"], {}, {}
    for _ in range(NUM_SYNCS):
        update_policy(worker, examples, lr=LEARNING_RATE, on_policy=False)
        # The log-probs of the engines depend on what the optimizer has just written, wherever it is stored.
        for publisher in publishers:
            num_bytes[version] = publisher.publish(version)
            version += 1
        scores = torch.from_numpy(score_sequence(worker, sequence).copy())
        log_probs |= {str(version - 1 - index): scores.clone() for index in range(len(publishers))}
    (out / f"bytes-{groups.global_rank}.json").write_text(json.dumps(num_bytes))
    if groups.is_main:
        save_file(log_probs | {"sequence": torch.from_numpy(sequence.astype(np.int32))}, out / "scores.safetensors")
    barrier(groups)


if __name__ == "__main__":
    run_cases(run_case)
