"""Run by `launch`: loads a Hugging Face folder into a layout, and saves it with Megatron-Core's `dist_checkpointing`.

A case is {"name", "model", "parallel", "metadata"}; "metadata" tells Megatron-Core which names to use. The folder of
the case gets `iter_0000007` with the weights and Adam's state, as Megatron-LM names and fills it.
"""

from pathlib import Path
from typing import Any

from examples import make_config
from megatron.core import dist_checkpointing
from running import run_cases

from megatron_bapo.parallel.groups import ParallelGroups
from megatron_bapo.trainer.worker import create_worker

OPTIMIZER_METADATA = {"distrib_optim_sharding_type": "fully_reshardable"}
"""Adam's state has the names of the weights behind `optimizer.state.`."""


def run_case(case: dict, out: Path, groups: ParallelGroups) -> None:
    source = Path(case["model"])
    worker = create_worker(make_config(source, out, case["parallel"], "bfloat16", packing=True), source, groups)
    folder = out / "iter_0000007"
    if groups.is_main:
        folder.mkdir(parents=True)
    chunks: dict[str, Any] = {
        f"model{number}": chunk.gpt.sharded_state_dict(metadata=case["metadata"])
        for number, chunk in enumerate(worker.model.chunks)
    }
    megatron_optimizer: Any = worker.optimizer._chain
    optimizer = megatron_optimizer.sharded_state_dict(chunks, is_loading=True, metadata=OPTIMIZER_METADATA)
    dist_checkpointing.save(chunks | {"optimizer": optimizer, "checkpoint_version": 3.0}, str(folder))


if __name__ == "__main__":
    run_cases(run_case)
