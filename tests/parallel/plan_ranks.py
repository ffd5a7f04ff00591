"""Run by `launch`: measures the memory of ranks, to compare it with the estimates of the planner.

A case is {"name", "model", "parallel", "dtype", "offload_and_frozen_models"}. `out/NAME/RANK.json` gets the
rank's place and its bytes: parameters, gradients and optimizer state after one update, and the tensors that one
micro-batch's forward pass saves in every model chunk, without parameters and each storage once.
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from examples import LEARNING_RATE, make_config, make_examples, with_adapters, with_offload_and_frozen_models
from running import run_cases

from megatron_bapo.model.vocab_parallel import token_loss
from megatron_bapo.parallel.groups import ParallelGroups
from megatron_bapo.parallel.megatron import HybridDeviceOptimizer
from megatron_bapo.records import Trajectory, VersionSpan
from megatron_bapo.trainer.micro_batches import Example, MicroBatch
from megatron_bapo.trainer.policy_update import supervised_update
from megatron_bapo.trainer.worker import Worker, create_reference, create_teacher, create_worker, response_outputs

LENGTHS = (24, 24, 8)
"""Lengths of the sequences in the micro-batch, which attention on a CPU does not pad to each other."""
Storages = dict[int, int]
"""Address -> bytes."""


def make_example(length: int, num_shared: int = 0, group: int | None = None) -> Example:
    """Return an example with this number of input tokens, of which its group shares some."""
    trajectory = Trajectory(
        prompt_token_ids=np.ones(num_shared + 1, np.int32),
        response_token_ids=np.arange(length - num_shared, dtype=np.int32),
        behaviour_log_probs=np.zeros(length - num_shared, np.float32),
        version_spans=(VersionSpan(0, length - num_shared),),
        finish_reason="stop",
        text="",
    )
    return Example(trajectory, advantage=1.0, weight=1.0, group=group)


def storages(tensors: Any) -> Storages:
    return {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors if t is not None}


def total(*parts: Storages, without: Storages | None = None) -> int:
    together = {key: size for part in parts for key, size in part.items()}
    return sum(size for key, size in together.items() if key not in (without or {}))


def parameters_of(worker: Worker) -> Iterator[torch.nn.Parameter]:
    return chain.from_iterable(chunk.gpt.parameters() for chunk in worker.model.chunks)


@contextmanager
def saved_tensors(worker: Worker) -> Iterator[Storages]:
    parameters = storages(parameters_of(worker))
    found: Storages = {}
    held = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        held.append(tensor)
        found.update((k, v) for k, v in storages([tensor]).items() if k not in parameters)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield found


def state_bytes(worker: Worker) -> dict[str, int]:
    ddps: list[Any] = [chunk.ddp for chunk in worker.model.chunks]
    gradients = storages(b.grad_data for ddp in ddps for b in ddp.buffers + ddp.expert_parallel_buffers)
    parameters = storages(parameters_of(worker))
    main, moments, host, num_updated = {}, {}, {}, 0
    for member in worker.optimizer._members:
        hybrid = isinstance(member.optimizer, HybridDeviceOptimizer)
        for adam in member.optimizer.sub_optimizers if hybrid else [member.optimizer]:
            held = list(chain.from_iterable(group["params"] for group in adam.param_groups))
            num_updated += sum(p.numel() for p in held)
            of_state = storages(adam.state[p][name] for p in held for name in ("exp_avg", "exp_avg_sq"))
            of_main = storages(chain(held, (p.grad for p in held)))
            if hybrid:
                host |= of_state | of_main
            else:
                moments |= of_state
                main |= of_main
    kept = parameters | gradients
    return {
        "parameters": total(parameters),
        "gradients": total(gradients),
        "main_parameters": total(main, without=kept),
        "moments": total(moments),
        "offloaded": total(host, without=kept),
        "updated": num_updated,
        "quantised": 0,  # FP8 parameters exist only on GPUs
    }


def reference_bytes(worker: Worker) -> int:
    if not worker.config.has_reference_copy:
        return 0
    reference = create_reference(worker.config, worker.config.model_path, worker.groups)
    return total(storages(p for _, p in reference.named_parameters()))


def teacher_bytes(worker: Worker) -> int:
    teacher = create_teacher(worker.config, worker.groups)
    return 0 if teacher is None else total(storages(p for _, p in teacher.named_parameters()))


def activation_bytes(worker: Worker, batch: MicroBatch) -> tuple[list[int], int]:
    """Return the bytes of each chunk, and of the output layer with its loss."""
    config, output, by_chunk = worker.model.config, 0, []
    split = len(batch.tokens_T) // (config.tensor_model_parallel_size if config.sequence_parallel else 1)
    for chunk in worker.model.chunks:
        hidden = torch.randn(split, 1, config.hidden_size, dtype=config.params_dtype, requires_grad=True)
        chunk.gpt.set_input_tensor(hidden)
        with saved_tensors(worker) as found:
            out = chunk.ddp(
                input_ids=batch.tokens_T[None],
                position_ids=batch.packed.positions_T[None],
                attention_mask=None,
                packed_seq_params=batch.packed,
                **({"fp32_output": False} if config.bf16 else {}),  # as trainer/schedule.py
            )
        by_chunk.append(total(found))
        if chunk.gpt.post_process:
            outputs = response_outputs(worker, batch, out.squeeze(0))
            with saved_tensors(worker) as found:
                token_loss(*outputs, lambda log_probs, _, __: log_probs.sum(), temperature=1.0)
            output = total(found)
    return by_chunk, output


def shared_prompt_bytes(worker: Worker) -> int:
    """Return the most that a micro-batch with many short responses to one prompt saves in this rank's only chunk."""
    batches = worker.micro_batches([make_example(21, num_shared=19, group=0) for _ in range(32)])
    assert any(batch.packed.shared is not None for batch in batches)
    return max(sum(activation_bytes(worker, batch)[0]) for batch in batches)


def run_case(case: dict, out: Path, groups: ParallelGroups) -> None:
    config = make_config(Path(case["model"]), out / "run", case["parallel"], case["dtype"], packing=True)
    if case["offload_and_frozen_models"]:
        config = with_offload_and_frozen_models(config)
    config = with_adapters(config, case["lora"])
    worker = create_worker(config, config.model_path, groups)
    examples = make_examples(worker.model.architecture.vocab_size)
    supervised_update(worker, examples, LEARNING_RATE)
    examples = [make_example(length) for length in LENGTHS]
    by_chunk, output = activation_bytes(worker, worker.lay_out(examples, [[*range(len(examples))]])[0])
    facts = {
        "stage": groups.pipeline.rank,
        "data_rank": groups.data_context.rank,
        "expert_data_rank": groups.expert_data.rank,
        "state": state_bytes(worker) | {"reference": reference_bytes(worker), "teacher": teacher_bytes(worker)},
        "activations": by_chunk,
        "output": output,
        "shared_prompt": shared_prompt_bytes(worker) if config.parallel.world_size == 1 else 0,
        "names": [[name for name, _ in chunk.gpt.named_parameters()] for chunk in worker.model.chunks],
        "numel": [[p.numel() for p in chunk.gpt.parameters()] for chunk in worker.model.chunks],
    }
    (out / f"{dist.get_rank()}.json").write_text(json.dumps(facts))


if __name__ == "__main__":
    run_cases(run_case)
