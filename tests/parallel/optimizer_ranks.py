"""Run by `launch`: trains a checkpoint for two updates, one that is skipped for a NaN, and a third.

A case is {"name", "model", "parallel", "dtype", "optimizer"}, with "resume_from" where it has it.
`out/NAME/` gets the checkpoint of the second update and the parameters after the third; then another case's checkpoint
is loaded, saved again and continued. `facts.json` says what files do not show.
"""

import json
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from examples import LEARNING_RATE, make_config, make_examples
from running import run_cases

from megatron_bapo.metrics.values import scalars
from megatron_bapo.model.build import finish_param_gather
from megatron_bapo.model.hf_export import save_hugging_face
from megatron_bapo.parallel.groups import ParallelGroups
from megatron_bapo.parallel.platform import local_device
from megatron_bapo.trainer.checkpoint import checkpoints, load_checkpoint, save_checkpoint
from megatron_bapo.trainer.offload import TrainerMemory
from megatron_bapo.trainer.optimizer import STATES
from megatron_bapo.trainer.policy_update import reduce_metrics, reduce_updates, update_policy
from megatron_bapo.trainer.token_reservoir import TokenReservoir
from megatron_bapo.trainer.worker import Worker, create_worker

NUM_TOKENS = 20
"""Number of tokens of each update in the reservoir."""


def on_all_ranks(value: bool) -> bool:
    """Return whether the value is true on every rank."""
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return all(found)


def update(worker: Worker, reservoir: TokenReservoir | None = None) -> dict[str, float]:
    examples = make_examples(worker.model.architecture.vocab_size, in_groups=False)
    metrics = update_policy(worker, examples, lr=LEARNING_RATE, on_policy=False, reservoir=reservoir)
    return scalars(reduce_metrics(metrics, worker.groups))


def everything(worker: Worker) -> list[torch.Tensor | None]:
    """Return copies of this rank's model parameters and of their states where they can be read."""
    parameters = [parameter for _, parameter in worker.model.named_parameters()]
    states = [worker.optimizer.read(parameter, state) for parameter in parameters for state in STATES]
    return [None if tensor is None else tensor.detach().clone() for tensor in [*states, *parameters]]


def same_bits(ours: list[torch.Tensor | None], theirs: list[torch.Tensor | None]) -> bool:
    return all(
        (a is None and b is None) or (a is not None and b is not None and torch.equal(a, b))
        for a, b in zip(ours, theirs, strict=True)
    )


def replicas_agree(worker: Worker) -> bool:
    """Whether the ranks that share a parameter have equal values: the rounded main parameter."""
    finish_param_gather([chunk.ddp for chunk in worker.model.chunks])
    agree = True
    for _, parameter in worker.model.named_parameters():
        axis = worker.optimizer.sharing_axis(parameter)
        main = worker.optimizer.read(parameter, "main")
        expected = torch.empty_like(parameter, requires_grad=False)
        if main is not None:
            expected.copy_(main)
        dist.broadcast(expected, axis.global_ranks[0], axis.group)
        agree &= torch.equal(expected, parameter)
    return on_all_ranks(agree)


def poisoned_update(worker: Worker) -> dict[str, bool]:
    """Run an update with one NaN gradient on the last rank: of an expert, or of a norm, which TP ranks replicate."""
    before, num_steps = everything(worker), worker.optimizer.num_steps
    kind = ".experts." if worker.model.architecture.moe_layers else "final_layernorm."
    hook = None
    if dist.get_rank() == dist.get_world_size() - 1:
        *_, parameter = (parameter for name, parameter in worker.model.named_parameters() if kind in name)
        hook = parameter.register_hook(lambda gradient: gradient * float("nan"))
    skipped = update(worker)["actor/skipped_updates"]
    if hook is not None:
        hook.remove()
    finish_param_gather([chunk.ddp for chunk in worker.model.chunks])
    return {
        "skipped": skipped == 1.0,
        "unchanged": on_all_ranks(same_bits(before, everything(worker)) and worker.optimizer.num_steps == num_steps),
        "empty_is_skipped": empty_update(worker),
    }


def empty_update(worker: Worker) -> bool:
    """Whether an update on an empty minibatch changes nothing, takes no step and is reported."""
    before, num_steps = everything(worker), worker.optimizer.num_steps
    updated = reduce_updates([update_policy(worker, [], lr=LEARNING_RATE, on_policy=False)] * 2, worker.groups)
    found = {"actor/skipped_updates": 1.0, "actor/empty_minibatches": 1.0, "actor/lr": LEARNING_RATE}
    found["perf/model_flops"] = 0.0
    unchanged = same_bits(before, everything(worker)) and worker.optimizer.num_steps == num_steps
    return on_all_ranks(unchanged and [scalars(metrics) for metrics in updated] == [found] * 2)


def offloaded(worker: Worker) -> dict[str, bool]:
    """Whether offloading to host memory empties the device, and loading restores every bit."""
    finish_param_gather([chunk.ddp for chunk in worker.model.chunks])
    memory, before = TrainerMemory(worker), everything(worker)
    tensors = [*(p for _, p in worker.model.named_parameters()), *worker.optimizer.states()]
    on_device = [tensor for tensor in tensors if tensor.device == local_device()]
    memory.offload()
    empty = all(tensor.untyped_storage().size() == 0 for tensor in on_device)
    memory.onload()
    complete = memory.parameters.num_bytes > 0 and memory.gradients.num_bytes > 0
    return {
        "offload_empties": on_all_ranks(empty and complete),
        "offload_returns": on_all_ranks(same_bits(before, everything(worker))),
    }


def run_case(case: dict, out: Path, groups: ParallelGroups) -> None:
    config = make_config(Path(case["model"]), out / "run", case["parallel"], case["dtype"], packing=True)
    config = config.model_copy(update={"optimizer": config.optimizer.model_copy(update=case["optimizer"])})
    worker = create_worker(config, config.model_path, groups)
    reservoir = TokenReservoir(NUM_TOKENS, seed=(0,))
    updates = [update(worker, reservoir) for _ in range(2)]
    tokens = {name: column.tolist() for name, column in reservoir.gather(groups).items()}
    save_checkpoint(worker, out / "checkpoints", 2, {}, keep=1)
    # The third update runs after the round trip to host memory.
    facts = {"replicas_agree": replicas_agree(worker), **poisoned_update(worker), **offloaded(worker)}
    updates.append(update(worker))
    save_hugging_face(worker.model, groups, config.model_path, out / "continued")
    if "resume_from" in case:
        load_checkpoint(worker, checkpoints(out.parent / case["resume_from"] / "checkpoints")[-1])
        facts["replicas_agree_after_load"] = replicas_agree(worker)
        save_checkpoint(worker, out / "reloaded", 2, {}, keep=1)
        update(worker)
        save_hugging_face(worker.model, groups, config.model_path, out / "resumed")
    ddps: list[Any] = [chunk.ddp for chunk in worker.model.chunks]
    facts |= {
        "updates": updates,
        "tokens": tokens,
        "gradient_dtypes": sorted({str(buffer.grad_data.dtype) for ddp in ddps for buffer in ddp.buffers}),
        "num_steps": worker.optimizer.num_steps,
        "num_optimizers": len(worker.optimizer._members),
        "num_buckets": sum(len(buffer.buckets) for ddp in ddps for buffer in ddp.buffers),
    }
    if groups.is_main:
        (out / "facts.json").write_text(json.dumps(facts))


if __name__ == "__main__":
    run_cases(run_case)
