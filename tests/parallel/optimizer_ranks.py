"""Run by torchrun: every case of a JSON file, one after another in the same processes.

A case is {"name", "parallel", ...}. With "model" it trains a Hugging Face checkpoint for three updates and saves it;
without, it trains two small mixture-of-experts models, as the chunks of one optimizer. `out/NAME/facts.json` says what
the test cannot see in files: gradient norms, and what all ranks together saw.
"""

import json
import sys
import zlib
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from examples import make_config, make_examples
from safetensors.torch import save_file

from megatron_bapo.config.schema import OptimizerConfig, ParallelConfig
from megatron_bapo.metrics.values import scalars
from megatron_bapo.model.build import ddp_config, finish_param_gather
from megatron_bapo.model.hf_export import save_hugging_face
from megatron_bapo.model.layer_specs import PackedAttention, RMSNorm
from megatron_bapo.parallel.groups import ParallelGroups, create_groups
from megatron_bapo.parallel.megatron import (
    DistributedDataParallel,
    GPTModel,
    PackedSeqParams,
    TransformerBlockSubmodules,
    TransformerConfig,
    finalize_model_grads,
    get_gpt_layer_local_spec,
    parallel_state,
)
from megatron_bapo.parallel.platform import start_distributed
from megatron_bapo.trainer.checkpoint import checkpoints, load_checkpoint, save_checkpoint
from megatron_bapo.trainer.optimizer import STATES, Optimizer
from megatron_bapo.trainer.policy_update import reduce_metrics, update_policy
from megatron_bapo.trainer.worker import Worker, create_worker

LR = 1e-3
NUM_EXPERTS, VOCABULARY, LENGTH, NUM_SEQUENCES = 4, 64, 12, 4

Named = list[tuple[str, torch.nn.Parameter]]


def on_all_ranks(value: bool) -> bool:
    """True when it is true on every rank."""
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return all(found)


def everything(named: Named, optimizer: Optimizer) -> list[torch.Tensor | None]:
    """Copies of the model's parameters as this rank has them, and of their states where they can be read."""
    states = [optimizer.read(parameter, state) for _, parameter in named for state in STATES]
    return [None if tensor is None else tensor.detach().clone() for tensor in [*states, *(p for _, p in named)]]


def same_bits(ours: list[torch.Tensor | None], theirs: list[torch.Tensor | None]) -> bool:
    return all(
        (a is None and b is None) or (a is not None and b is not None and torch.equal(a, b))
        for a, b in zip(ours, theirs, strict=True)
    )


def replicas_agree(named: Named, optimizer: Optimizer) -> bool:
    """The ranks that share a parameter have the same one: the main parameter, rounded."""
    agree = True
    for _, parameter in named:
        axis = optimizer.sharing_axis(parameter)
        main = optimizer.read(parameter, "main")
        expected = torch.empty_like(parameter, requires_grad=False)
        if main is not None:
            expected.copy_(main)
        dist.broadcast(expected, axis.global_ranks[0], axis.group)
        agree &= torch.equal(expected, parameter)
    return on_all_ranks(agree)


class Poison:
    """One parameter's gradient is NaN on the last rank only."""

    def __init__(self, parameter: torch.nn.Parameter) -> None:
        self._parameter = parameter

    def __enter__(self) -> None:
        last = dist.get_rank() == dist.get_world_size() - 1
        self._hook = self._parameter.register_hook(lambda g: g * float("nan")) if last else None

    def __exit__(self, *_: object) -> None:
        if self._hook is not None:
            self._hook.remove()


def run_dense(case: dict, out: Path) -> dict:
    config = make_config(Path(case["model"]), out / "run", case["parallel"])
    config = config.model_copy(
        update={
            "optimizer": config.optimizer.model_copy(update=case.get("optimizer", {})),
            "model": config.model.model_copy(update={"dtype": case.get("dtype", "float32")}),
        }
    )
    groups = create_groups(config.parallel, seed=0, timeout_s=120)
    worker = create_worker(config, config.model_path, groups)
    named, optimizer = list(worker.model.named_parameters()), worker.optimizer
    examples = make_examples(worker.model.architecture.vocab_size)

    def update() -> dict[str, float]:
        return scalars(reduce_metrics(update_policy(worker, examples, lr=LR, on_policy=False), groups))

    facts: dict[str, Any] = {"grad_norms": [update()["actor/grad_norm"] for _ in range(3)]}
    save_hugging_face(worker.model, groups, config.model_path, out / "final")
    save_checkpoint(worker, out / "checkpoints", 3, {}, keep=1)
    facts["replicas_agree"] = replicas_agree(named, optimizer)
    facts |= _poisoned(worker, named, update)
    facts["grad_norms"].append(update()["actor/grad_norm"])
    save_hugging_face(worker.model, groups, config.model_path, out / "continued")
    if "resume_from" in case:
        load_checkpoint(worker, checkpoints(out.parent / case["resume_from"] / "checkpoints")[-1])
        facts["replicas_agree_after_load"] = replicas_agree(named, optimizer)
        save_checkpoint(worker, out / "reloaded", 3, {}, keep=1)
        update()
        save_hugging_face(worker.model, groups, config.model_path, out / "resumed")
    facts["num_steps"] = optimizer.num_steps
    return facts


def _poisoned(worker: Worker, named: Named, update: Any) -> dict:
    before, num_steps = everything(named, worker.optimizer), worker.optimizer.num_steps
    with Poison(named[-1][1]):
        skipped = update()["actor/skipped_updates"]
    finish_param_gather([worker.model.ddp])
    return {
        "skipped": skipped == 1.0 and on_all_ranks(worker.optimizer.num_skipped == 1),
        "unchanged": on_all_ranks(
            same_bits(before, everything(named, worker.optimizer)) and worker.optimizer.num_steps == num_steps
        ),
    }


def expert_config(parallel: ParallelConfig) -> TransformerConfig:
    return TransformerConfig(
        num_layers=1,
        hidden_size=32,
        num_attention_heads=4,
        num_query_groups=2,
        kv_channels=8,
        ffn_hidden_size=48,
        normalization="RMSNorm",
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=False,
        qk_layernorm=True,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        tensor_model_parallel_size=parallel.tensor_model_parallel_size,
        sequence_parallel=parallel.sequence_parallel,
        expert_model_parallel_size=parallel.expert_model_parallel_size,
        expert_tensor_parallel_size=parallel.expert_tensor_parallel_size,
        num_moe_experts=NUM_EXPERTS,
        moe_ffn_hidden_size=24,
        moe_router_topk=2,
        moe_router_load_balancing_type="none",
        moe_aux_loss_coeff=0.0,
        moe_token_dispatcher_type="alltoall",
        use_cpu_initialization=True,
        calculate_per_token_loss=True,
        variable_seq_lengths=True,
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
        persist_layer_norm=False,
    )


def global_name(name: str, groups: ParallelGroups) -> str:
    """The parameter's name with its expert's number among all experts."""
    before, marker, after = name.partition("local_experts.")
    if not marker:
        return name
    local, rest = after.split(".", 1)
    return f"{before}expert.{int(local) + groups.expert.rank * NUM_EXPERTS // groups.expert.size}.{rest}"


def expert_chunk(config: TransformerConfig, parallel: ParallelConfig) -> DistributedDataParallel:
    spec: Any = get_gpt_layer_local_spec(
        num_experts=NUM_EXPERTS, moe_grouped_gemm=False, qk_layernorm=True, normalization="RMSNorm"
    )
    layer = spec.submodules
    layer.input_layernorm = layer.pre_mlp_layernorm = RMSNorm
    attention = layer.self_attention.submodules
    attention.core_attention, attention.q_layernorm, attention.k_layernorm = PackedAttention, RMSNorm, RMSNorm
    norm: Any = RMSNorm
    gpt = GPTModel(
        config,
        TransformerBlockSubmodules(layer_specs=[spec], layer_norm=norm),  # pyright: ignore[reportArgumentType]
        VOCABULARY,
        LENGTH,
        share_embeddings_and_output_weights=False,
        position_embedding_type="rope",
    )
    return DistributedDataParallel(config, ddp_config(parallel), gpt)


@torch.no_grad()
def fill(named: Named) -> None:
    for name, parameter in named:
        generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
        parameter.copy_(0.2 * torch.randn(parameter.shape, generator=generator) + (parameter.dim() == 1))


def backward(chunk: DistributedDataParallel, groups: ParallelGroups) -> None:
    """Cross-entropy of this rank's part of the sequences, one micro-batch each."""
    tokens = torch.randint(0, VOCABULARY, (NUM_SEQUENCES, LENGTH + 1), generator=torch.Generator().manual_seed(0))
    own = tokens[groups.data.rank :: groups.data.size]
    ends = torch.tensor([0, LENGTH], dtype=torch.int32)
    packed = PackedSeqParams(
        qkv_format="thd",  # pyright: ignore[reportArgumentType]
        cu_seqlens_q=ends,
        cu_seqlens_kv=ends,
        max_seqlen_q=LENGTH,
        max_seqlen_kv=LENGTH,
    )
    for index, sequence in enumerate(own):
        with nullcontext() if index == len(own) - 1 else chunk.no_sync():
            logits = chunk(
                input_ids=sequence[None, :-1],
                position_ids=torch.arange(LENGTH)[None],
                attention_mask=None,
                packed_seq_params=packed,
            )
            (F.cross_entropy(logits[0], sequence[1:], reduction="sum") / (NUM_SEQUENCES * LENGTH)).backward()


def run_experts(case: dict, out: Path) -> dict:
    parallel = ParallelConfig(expert_tensor_parallel_size=1, **case["parallel"])
    groups = create_groups(parallel, seed=0, timeout_s=120)
    config = expert_config(parallel)
    chunks = [expert_chunk(config, parallel) for _ in range(2)]
    named = [
        (f"{index}.{global_name(name, groups)}", parameter)
        for index, chunk in enumerate(chunks)
        for name, parameter in chunk.module.named_parameters()
    ]
    fill(named)
    optimizer = Optimizer(chunks, groups, OptimizerConfig(lr=LR, adam_eps=1e-5, **case.get("optimizer", {})))

    def update() -> float:
        optimizer.zero_grad()
        for chunk in chunks:
            backward(chunk, groups)
        finalize_model_grads(chunks)
        return optimizer.step(LR).grad_norm

    def states() -> dict[str, torch.Tensor]:
        found = {f"{name}|{s}": optimizer.read(parameter, s) for name, parameter in named for s in STATES}
        return {key: tensor.clone() for key, tensor in found.items() if tensor is not None}

    facts: dict[str, Any] = {"grad_norms": [update() for _ in range(3)], "num_optimizers": len(optimizer._members)}
    finish_param_gather(chunks)
    facts["replicas_agree"] = replicas_agree(named, optimizer)
    save_file(states(), out / f"rank-{dist.get_rank()}.safetensors")
    before = everything(named, optimizer)
    with Poison([parameter for name, parameter in named if ".expert." in name][-1]):
        update()
    finish_param_gather(chunks)
    facts["skipped"] = on_all_ranks(optimizer.num_skipped == 1)
    facts["unchanged"] = on_all_ranks(same_bits(before, everything(named, optimizer)))
    update()
    written = {
        (name, s): torch.randn(p.shape, generator=torch.Generator().manual_seed(zlib.crc32(f"{name}|{s}".encode())))
        for name, p in named
        for s in STATES
    }
    for name, parameter in named:
        for s in STATES:
            optimizer.write(parameter, s, written[name, s])
    facts["written_is_read"] = on_all_ranks(
        all(torch.equal(tensor, written[tuple(key.split("|"))]) for key, tensor in states().items())
    )
    facts["replicas_agree_after_load"] = replicas_agree(named, optimizer)
    return facts


def main() -> None:
    cases, out = json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2])
    start_distributed(timeout_s=120)
    for case in cases:
        folder = out / case["name"]
        folder.mkdir(exist_ok=True)
        facts = run_dense(case, folder) if "model" in case else run_experts(case, folder)
        if dist.get_rank() == 0:
            (folder / "facts.json").write_text(json.dumps(facts))
        parallel_state.destroy_model_parallel()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
