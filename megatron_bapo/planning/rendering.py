"""A plan as tables for people and as plain data for programs.

A section is a title and its rows; a new one is one more function in `SECTIONS`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from megatron_bapo.config.arithmetic import batch_arithmetic
from megatron_bapo.planning.activations import ATTENTION, Kernels
from megatron_bapo.planning.hardware import GIB, Assumptions
from megatron_bapo.planning.parameters import num_active_parameters, num_parameters
from megatron_bapo.planning.plan import STORED_VERSIONS, Plan, gib
from megatron_bapo.planning.search import changes
from megatron_bapo.planning.timing import sync_bytes
from megatron_bapo.planning.trainer_memory import largest_micro_batch, num_micro_batches, stage_memory

PYTORCH_ATTENTION = Kernels(fused_norms=True, flash_attention=False)
"""Of `model/packed_attention.py` on a GPU."""
NUM_SHOWN = 8
"""Layouts of a search."""


@dataclass(frozen=True)
class Section:
    title: str
    rows: Sequence[tuple[str, str]]


def print_plan(console: Console, plan: Plan, where: str, overrides: Iterable[str]) -> None:
    """Every section, the stages' table, then whether it fits; `overrides` are those with which it would."""
    print_section(console, model_section(plan, where))
    print_section(console, Section("batch", batch_arithmetic(plan.config)))
    console.print(_stage_table(plan))
    for section in (function(plan) for function in SECTIONS):
        print_section(console, section)
    print_section(console, assumption_section(plan.assumptions))
    _print_verdict(console, plan, list(overrides))


def print_section(console: Console, section: Section) -> None:
    console.print(Text(section.title, "bold"))
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in section.rows:
        table.add_row(f"  {name}", Text(value))
    console.print(table)


def print_search(console: Console, plan: Plan, found: Sequence[Plan], num_gpus: int) -> None:
    """The fastest layouts, and the overrides for the first."""
    if not found:
        console.print(f"No layout that is searched fits on {num_gpus} {plan.gpu_name}; take more or larger GPUs.")
        return
    table = Table(title=f"{len(found)} layouts fit on {num_gpus} {plan.gpu_name}; the fastest", title_justify="left")
    for name in ("s/step", "generate", "train", "MFU", "TP", "PP", "VPP", "CP", "EP", "DP", "recompute"):
        table.add_column(name, justify="right", no_wrap=True)
    for name in ("tokens/GPU", "GiB", "engines"):
        table.add_column(name, justify="right", no_wrap=True)
    for candidate in found[:NUM_SHOWN]:
        table.add_row(*_search_row(candidate))
    console.print(table)
    console.print("the first one's overrides:")
    console.print("  " + " ".join(changes(plan.config, found[0].config)), soft_wrap=True, highlight=False, markup=False)


def as_data(plan: Plan, overrides: Sequence[str]) -> dict[str, Any]:
    """For programs: bytes, seconds and counts."""
    stages = [
        {
            "stage": stage.stage,
            **asdict(stage.state),
            "activations": dict(stage.activations),
            "in_flight": stage.in_flight,
            "backward": stage.backward,
            "output_layer": stage.output_layer,
            "reserved": stage.reserved,
            "peak_while_training": plan.while_training(stage),
            "peak_while_generating": plan.while_generating(stage),
        }
        for stage in plan.stages
    ]
    engine, time = plan.engine, plan.time
    return {
        "gpu": plan.gpu_name,
        "num_gpus": plan.num_gpus,
        "placement": plan.placement,
        "fits": plan.fits,
        "problems": plan.problems,
        "overrides_that_fit": list(overrides),
        "parameters": num_parameters(plan.architecture),
        "stages": stages,
        "worst_stage": plan.worst_stage.stage,
        "engine": {**asdict(engine), "kv_tokens": engine.kv_tokens, "num_concurrent": engine.num_concurrent},
        "host_bytes": plan.host_bytes,
        "weight_sync_bytes": sync_bytes(plan.config, plan.architecture),
        "seconds": {**asdict(time), "training": time.training, "total": time.total},
        "mfu": time.mfu,
        "tokens_per_s": time.tokens_per_s,
        "assumptions": asdict(plan.assumptions),
    }


def model_section(plan: Plan, where: str) -> Section:
    arch, gpu = plan.architecture, plan.gpu
    count, active = num_parameters(arch), num_active_parameters(arch)
    shape = f"{arch.num_hidden_layers} layers of {arch.hidden_size:,}, {arch.num_attention_heads} heads"
    return Section(
        f"{plan.num_gpus} x {plan.gpu_name}, engines {plan.placement}",
        [
            ("model", f"{count / 1e9:.2f}B parameters, {active / 1e9:.2f}B multiplied with each token ({where})"),
            ("shape", f"{shape}, {arch.num_key_value_heads} key/value heads, vocabulary {arch.vocab_size:,}"),
            (
                "each GPU",
                f"{gpu.memory_gib} GiB, {gpu.bf16_tflops} dense bf16 TFLOP/s, {gpu.memory_tb_s} TB/s, NVLink "
                f"{gpu.nvlink_gb_s} and network {gpu.network_gb_s} GB/s each way ({gpu.source})",
            ),
        ],
    )


def activation_section(plan: Plan) -> Section:
    worst, config = plan.worst_stage, plan.config
    batch = largest_micro_batch(config, plan.assumptions)
    pytorch = stage_memory(config, plan.architecture, plan.assumptions, PYTORCH_ATTENTION)[worst.stage]
    ours, theirs = (stage.activations[ATTENTION] + stage.backward for stage in (worst, pytorch))
    rows = [
        (name, gib(num_bytes)) for name, num_bytes in worst.activations.most_common() if num_bytes > 0.05 * GIB
    ]
    rows += [
        ("held at once", _in_flight(worst.in_flight, len(batch.lengths), sum(batch.lengths))),
        (
            "attention kernel",
            f"counted as FlashAttention's, {gib(ours)} with its backward pass; PyTorch's attention, which repeats keys "
            f"and values for every head and gathers them over context ranks, takes {gib(theirs)}",
        ),
    ]
    return Section(f"activations of stage {worst.stage}, the worst", rows)


def engine_section(plan: Plan) -> Section:
    engine, rollout = plan.engine, plan.config.rollout
    return Section(
        f"engines: {rollout.num_engines} of {rollout.tensor_parallel_size} GPUs",
        [
            ("weights", f"{gib(engine.weights)} on each GPU, and {gib(engine.workspace)} of workspace"),
            (
                "keys, values",
                f"{gib(engine.kv_cache)} = {engine.kv_tokens:,} tokens of {engine.kv_per_token / 1024:.0f} KiB; the "
                f"longest prompt and answer have {engine.max_model_len:,}",
            ),
            (
                "at once",
                f"{engine.num_concurrent} answers of mean length (rollout.max_num_seqs={engine.max_num_seqs})",
            ),
        ],
    )


def host_section(plan: Plan) -> Section:
    offloaded = max(stage.state.offloaded for stage in plan.stages)
    moved = sync_bytes(plan.config, plan.architecture)
    return Section(
        "host memory and weight sync",
        [
            ("a node", f"{gib(plan.host_bytes)} of {plan.assumptions.host_memory_gib:,.0f} GiB"),
            ("optimizer", f"{gib(offloaded)} of each rank in host memory" if offloaded else "on the GPUs"),
            ("weight store", f"{STORED_VERSIONS} versions of {gib(moved)} in shared memory"),
            ("each sync", f"{gib(moved)}, {plan.time.weight_sync:.1f} s"),
        ],
    )


def time_section(plan: Plan) -> Section:
    time = plan.time
    parts = {
        "compute": time.compute,
        "pipeline bubble": time.bubble,
        "tensor": time.tensor,
        "context": time.context,
        "expert": time.expert,
        "pipeline": time.pipeline,
        "data": time.data,
        "optimizer": time.optimizer,
    }
    shown = ", ".join(f"{name} {seconds:.0f}" for name, seconds in parts.items() if seconds >= 0.5)
    return Section(
        "one step, estimated",
        [
            ("seconds", f"{time.total:,.0f} = generation {time.generation:,.0f} + training {time.training:,.0f} + sync "
             f"{time.weight_sync:,.0f}"),
            ("training", shown),
            ("FLOPs", f"{time.model_flops:.2e} of the model; MFU {time.mfu:.0%} while training"),
            ("tokens/s", f"{time.tokens_per_s:,.0f}, {time.tokens_per_s / plan.num_gpus:,.0f} on each GPU"),
            ("micro-batches", f"{num_micro_batches(plan.config, plan.assumptions)} in an update of mean lengths"),
        ],
    )  # fmt: skip


def assumption_section(assumptions: Assumptions) -> Section:
    """What the estimate takes for granted; each is explained in planning/hardware.py."""
    shown = ", ".join(f"{field.name}={getattr(assumptions, field.name):.4g}" for field in fields(assumptions))
    return Section("assumed", [("values", shown)])


SECTIONS: tuple[Callable[[Plan], Section], ...] = (activation_section, engine_section, host_section, time_section)


def _stage_table(plan: Plan) -> Table:
    table = Table(title="GiB on the fullest GPU of each pipeline stage", title_justify="left")
    table.add_column("stage", no_wrap=True)
    for name in ("parameters", "gradients", "optimizer", "activations", "backward", "output", "other"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("training", justify="right", no_wrap=True)
    table.add_column("generating", justify="right", no_wrap=True)
    for row in _stage_rows(plan):
        table.add_row(*row)
    return table


def _stage_rows(plan: Plan) -> Iterator[list[str]]:
    for stage in plan.stages:
        training, generating = plan.while_training(stage), plan.while_generating(stage)
        parts = (
            stage.state.parameters,
            stage.state.gradients,
            stage.state.optimizer,
            sum(stage.activations.values()),
            stage.backward,
            stage.output_layer,
            training - stage.peak + stage.reserved,
        )
        worst = " worst" if stage is plan.worst_stage else ""
        totals = (f"{num / GIB:.1f} of {plan.gpu.memory_gib}" for num in (training, generating))
        yield [f"{stage.stage}{worst}", *(f"{num / GIB:.1f}" for num in parts), *totals]


def _in_flight(counts: tuple[int, ...], num_sequences: int, num_tokens: int) -> str:
    chunks = f" of {len(counts)} model chunks" if len(counts) > 1 else ""
    return (
        f"{' + '.join(map(str, counts))} micro-batches{chunks}; the largest has {num_tokens:,} tokens in {num_sequences} "
        "sequences on all context-parallel ranks"
    )


def _search_row(plan: Plan) -> list[str]:
    parallel, time = plan.config.parallel, plan.time
    sizes = (
        parallel.tensor_model_parallel_size,
        parallel.pipeline_model_parallel_size,
        parallel.virtual_pipeline_model_parallel_size,
        parallel.context_parallel_size,
        parallel.expert_model_parallel_size,
        parallel.data_parallel_size,
    )
    rollout = plan.config.rollout
    return [
        f"{time.total:,.0f}", f"{time.generation:,.0f}", f"{time.training:,.0f}", f"{time.mfu:.0%}", *map(str, sizes),
        parallel.recompute_granularity or "none", f"{plan.config.trainer.max_tokens_per_gpu:,}",
        f"{plan.while_training(plan.worst_stage) / GIB:.0f}",
        f"{rollout.num_engines} x {rollout.tensor_parallel_size}",
    ]  # fmt: skip


def _print_verdict(console: Console, plan: Plan, overrides: list[str]) -> None:
    if plan.fits:
        console.print(Text(f"fits on {plan.num_gpus} {plan.gpu_name}", "bold green"))
        return
    console.print(Text(f"does not fit on {plan.num_gpus} {plan.gpu_name}:", "bold red"))
    for problem in plan.problems:
        console.print(f"  {problem}", soft_wrap=True, highlight=False, markup=False)
    if overrides:
        console.print("this would fit:", style="bold")
        console.print("  " + " ".join(overrides), soft_wrap=True, highlight=False, markup=False)
    else:
        console.print("No layout that is searched fits on so many; take more or larger GPUs, or shorter answers.")
