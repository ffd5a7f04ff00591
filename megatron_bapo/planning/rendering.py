"""Print a plan for people, readable at 80 columns, and convert it to plain data for programs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from megatron_bapo.config.arithmetic import batch_arithmetic
from megatron_bapo.config.lora_transfer import reason_to_merge, sent_adapters
from megatron_bapo.config.rollout import RolloutConfig
from megatron_bapo.config.schema import Config
from megatron_bapo.planning.advice import obstacles
from megatron_bapo.planning.hardware import GIB
from megatron_bapo.planning.parameters import num_active_parameters, num_parameters, num_trained_parameters
from megatron_bapo.planning.plan import Plan, gib
from megatron_bapo.planning.rollout_memory import EngineMemory
from megatron_bapo.planning.search import NEAR_BEST
from megatron_bapo.planning.spread import step_range
from megatron_bapo.planning.trainer_memory import StageMemory, largest_micro_batch, num_micro_batches
from megatron_bapo.planning.weight_transfer import sync_bytes

NUM_SHOWN = 8
"""Number of a search's layouts that are printed."""
Rows = Sequence[tuple[str, str]]
_STAGE_NAME_WIDTH, _STAGE_WIDTH = 29, 8
"""Characters of the stage table's first column and of each further one, margins included."""
_SEARCH_WIDTH = 60
"""Width below which the table of layouts does not shrink."""
_SEARCH_CAPTION = (
    "GiB: the fullest GPU while training; tokens: trainer.max_tokens_per_gpu; engines: their number x the GPUs of "
    f"each. Layouts within {NEAR_BEST:.0%} of the best step time come first, ordered by free memory and then by fewer "
    "parallel dimensions above 1; the others follow by step time."
)


def print_plan(console: Console, plan: Plan, where: str, overrides: Sequence[str]) -> None:
    """Print all parts of the plan, then whether it fits, and the overrides with which a configuration fits."""
    _print_section(console, f"{plan.num_gpus} x {plan.gpu_name}, engines {plan.placement}", _model_rows(plan, where))
    _print_section(console, "batch", batch_arithmetic(plan.config))
    console.print(Text("GiB on the fullest GPU of each pipeline stage; * is the worst", "bold"))
    for stages in _blocks(plan.stages, console.width):
        _print_table(console, _stage_table(plan, stages), _STAGE_NAME_WIDTH + len(stages) * _STAGE_WIDTH)
    _print_section(console, f"activations of stage {plan.worst_stage.stage}", _activation_rows(plan))
    rows = [*_engine_rows(plan.engine), ("concurrent", _concurrent(plan))]
    _print_section(console, _engine_title(plan.config.rollout), rows)
    if (teacher := plan.config.serving_teacher) is not None and plan.teacher_engine is not None:
        rows = _engine_rows(plan.teacher_engine)
        _print_section(console, _engine_title(teacher.rollout, "the teacher's engines"), rows)
    _print_section(console, "host memory and weight sync", _host_rows(plan))
    _print_section(console, "one step, estimated", _time_rows(plan))
    _print_section(console, "assumed", _assumption_rows(plan))
    _print_verdict(console, plan, overrides)


def print_search(console: Console, plan: Plan, found: Sequence[Plan], num_gpus: int, overrides: Sequence[str]) -> None:
    """Print the best layouts of a search, and the overrides that select the first one."""
    if not found:
        _print_obstacles(console, plan, num_gpus)
        return
    console.print(
        Text(f"{len(found)} layouts fit on {num_gpus} {plan.gpu_name}; the best {min(len(found), NUM_SHOWN)}", "bold")
    )
    table = Table(box=SIMPLE_HEAD)
    for name in ("s/step", "train", "MFU", "GiB", "tokens"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("layout", overflow="fold")  # the only column that wraps
    table.add_column("engines", no_wrap=True)
    for candidate in found[:NUM_SHOWN]:
        table.add_row(*_search_row(candidate))
    _print_table(console, table, _SEARCH_WIDTH)
    console.print(Text(_SEARCH_CAPTION, "dim"))
    console.print("overrides for the first layout:")
    _print_line(console, " ".join(overrides) or "(none: it is the configuration's layout)")


def as_data(plan: Plan, overrides: Sequence[str]) -> dict[str, Any]:
    """Return the plan for programs, in bytes, seconds and counts."""
    stages = [
        asdict(stage)
        | {
            "activations": dict(stage.activations),  # asdict counts a Counter's pairs
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
        "engine": asdict(engine) | {"kv_tokens": engine.kv_tokens, "num_concurrent": int(plan.concurrency)},
        "teacher_engine": plan.teacher_engine and asdict(plan.teacher_engine),
        "host_bytes": plan.host_bytes,
        "weight_sync_bytes": sync_bytes(plan.config, plan.architecture),
        "seconds": {
            **asdict(time),
            "trainer": time.training_parts,
            "training": time.training,
            "total": time.total,
            "range": step_range(plan),
            "dominant": time.dominant[0],
        },
        "mfu": time.mfu,
        "tokens_per_s": time.tokens_per_s,
        "assumptions": asdict(plan.assumptions),
    }


def _print_section(console: Console, title: str, rows: Rows) -> None:
    console.print(Text(title, "bold"))
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in rows:
        table.add_row(f"  {name}", Text(value))
    console.print(table)


def _print_table(console: Console, table: Table, min_width: int) -> None:
    """Print a table, in a narrower terminal with `min_width` columns and whole numbers."""
    table.width = min_width if console.width < min_width else None
    console.print(table, crop=False)


def _print_line(console: Console, line: str) -> None:
    console.print(f"  {line}", soft_wrap=True, highlight=False, markup=False)


def _model_rows(plan: Plan, where: str) -> Rows:
    arch, gpu = plan.architecture, plan.gpu
    count, active = num_parameters(arch), num_active_parameters(arch)
    lora, adapters = plan.config.model.lora, []
    if lora is not None:
        trained = num_trained_parameters(arch, lora) / 1e6
        adapters = [
            ("trained", f"adapters of rank {lora.rank}: {trained:,.1f}M parameters, {trained / count * 1e8:.2f}%"),
            ("sent", _sent(plan)),
        ]
    shape = f"{arch.num_hidden_layers} layers of {arch.hidden_size:,}, {arch.num_attention_heads} heads"
    keys = f"{arch.num_key_value_heads} key/value heads"
    if arch.kv_lora_rank:
        keys = f"latent attention that caches {arch.cached_dim} numbers per token"
    if arch.linear_layers:
        keys += f" in {arch.num_hidden_layers - len(arch.linear_layers)} of them, the others are Gated DeltaNets"
    return [
        ("model", f"{count / 1e9:.2f}B parameters, {active / 1e9:.2f}B multiplied with each token ({where})"),
        *adapters,
        ("shape", f"{shape}, {keys}, vocabulary {arch.vocab_size:,}"),
        (
            "each GPU",
            f"{gpu.memory_gib} GiB, {gpu.bf16_tflops} dense bf16 TFLOP/s ({gpu.fp8_tflops} FP8), {gpu.memory_tb_s} "
            f"TB/s, NVLink or PCIe {gpu.nvlink_gb_s} and network {gpu.network_gb_s} GB/s each way ({gpu.source})",
        ),
    ]


def _sent(plan: Plan) -> str:
    """Return what a weight update sends of a model with adapters."""
    config, arch = plan.config, plan.architecture
    size = f"{sync_bytes(config, arch) / 2**20:,.1f} MiB at each weight update"
    if sent_adapters(config, arch) is not None:
        return f"the adapters alone, {size}"
    obstacle = None if config.weight_sync.lora else reason_to_merge(config, arch)
    why = f", because of {obstacle.reason}; {obstacle.way_out}" if obstacle else ""
    return f"all weights with the adapters merged, {size}{why}"


def _blocks(stages: Sequence[StageMemory], width: int) -> list[Sequence[StageMemory]]:
    """Split the stages into tables of equal size that fit the width."""
    num_per_table = max(1, (width - _STAGE_NAME_WIDTH) // _STAGE_WIDTH)
    num_tables = -(-len(stages) // num_per_table)
    size = -(-len(stages) // num_tables)
    return [stages[start : start + size] for start in range(0, len(stages), size)]


def _stage_table(plan: Plan, stages: Sequence[StageMemory]) -> Table:
    """Return the table of some stages: layers if they differ, and every row that is not 0 in all stages of the plan."""
    table = Table(box=SIMPLE_HEAD)
    table.add_column("stage", no_wrap=True)
    for stage in stages:
        table.add_column(f"{stage.stage}{'*' * (stage is plan.worst_stage)}", justify="right", no_wrap=True)
    parts: dict[str, Callable[[StageMemory], int]] = {
        "parameters": lambda stage: stage.state.parameters,
        "gradients": lambda stage: stage.state.gradients,
        "optimizer": lambda stage: stage.state.optimizer,
        "FP8 copies": lambda stage: stage.state.quantised,
        "reference model": lambda stage: stage.state.reference,
        "teacher": lambda stage: stage.state.teacher,
        "activations": lambda stage: sum(stage.activations.values()),
        "a layer's backward pass": lambda stage: stage.backward,
        "output layer": lambda stage: stage.output_layer,
        "reserved": lambda stage: plan.while_training(stage) - stage.peak + stage.reserved,
        f"training, of {plan.gpu.memory_gib}": plan.while_training,
        f"generating, of {plan.gpu.memory_gib}": plan.while_generating,
    }
    if len({stage.num_layers for stage in plan.stages}) > 1:
        table.add_row("layers", *(str(stage.num_layers) for stage in stages))
    for name, num_bytes in parts.items():
        if any(map(num_bytes, plan.stages)):
            table.add_row(name, *(f"{num_bytes(stage) / GIB:.1f}" for stage in stages))
    return table


def _activation_rows(plan: Plan) -> Rows:
    worst, batch = plan.worst_stage, largest_micro_batch(plan.config, plan.assumptions)
    counts = worst.in_flight
    chunks = " by model chunk" if len(counts) > 1 else ""
    rows = [(name, gib(num_bytes)) for name, num_bytes in worst.activations.most_common() if num_bytes > 0.05 * GIB]
    in_flight = (
        f"{' + '.join(map(str, counts))}{chunks} in flight, each of {sum(batch.lengths):,} tokens on all context ranks"
    )
    return [*rows, ("micro-batches", in_flight)]


def _engine_title(rollout: RolloutConfig, name: str = "engines") -> str:
    title = f"{name}: {rollout.num_engines} of {rollout.ranks_per_engine} GPUs"
    return title if rollout.nodes_per_engine == 1 else f"{title} on {rollout.nodes_per_engine} nodes"


def _engine_rows(engine: EngineMemory) -> Rows:
    states = []
    if engine.state_bytes:
        room = f"the room of {engine.state_tokens:,.0f} tokens in the KV cache"
        states = [("states", f"{engine.state_bytes / 2**20:,.1f} MiB of Gated DeltaNets per response: {room}")]
    return [
        ("weights", f"{gib(engine.weights)} on each GPU, and {gib(engine.workspace)} of workspace"),
        (
            "KV cache",
            f"{gib(engine.kv_cache)} = {engine.kv_tokens:,} tokens of {engine.kv_per_token / 1024:.0f} KiB; the "
            f"longest prompt and response have {engine.max_model_len:,}",
        ),
        *states,
    ]


def _concurrent(plan: Plan) -> str:
    most = f"rollout.max_num_seqs={plan.config.rollout.max_num_seqs}"
    return f"{int(plan.concurrency)} responses on average, while others wait ({most})"


def _host_rows(plan: Plan) -> Rows:
    offloaded, copied = max(map(plan.offloaded, plan.stages)), max(map(plan.checkpoint_copy, plan.stages))
    moved = sync_bytes(plan.config, plan.architecture)
    loaded = plan.loading_bytes
    routes = [("recorded routes", f"{gib(plan.routes.rank)} of each rank")] if plan.routes.rank else []
    if plan.routes.service:
        served, cached = gib(plan.routes.service), gib(plan.routes.engine)
        routes.append(("engines' routes", f"{served} in the rollout service and on rank 0, {cached} of each engine"))
    return [
        *((host.node, f"{gib(host.num_bytes)} of {host.gib:,.0f} GiB") for host in plan.hosts),
        ("offloaded", f"{gib(offloaded)} of each rank" if offloaded else "nothing"),
        ("checkpoint", f"{gib(copied)} of each rank, a copy to write in the background" if copied else "no copy"),
        ("weight store", f"{gib(plan.store_bytes)} in each node's shared memory" if plan.store_bytes else "none"),
        *routes,
        ("each sync", f"{gib(moved)}, {plan.time.weight_sync:.1f} s; {gib(loaded)} of an engine's GPU while it loads"),
    ]


def _time_rows(plan: Plan) -> Rows:
    time = plan.time
    shown = ", ".join(f"{name} {seconds:.0f}" for name, seconds in time.training_parts.items() if seconds >= 0.5)
    both = f"generation {time.generation:,.0f}", f"training {time.training:,.0f}"
    work = f"the longer of {' and '.join(both)}" if time.overlapped else " + ".join(both)
    others = {"offload": time.offload, "between phases": time.between, "sync": time.weight_sync}
    added = "".join(f" + {name} {seconds:,.0f}" for name, seconds in others.items() if seconds >= 0.5)
    low, high = step_range(plan)
    name, seconds = time.dominant
    return [
        ("seconds", f"{time.total:,.0f} = {work}{added}"),
        ("range", f"{low:,.0f} to {high:,.0f}, as published steps differ from their plans"),
        ("dominant", f"{name}, {seconds / time.total:.0%} of the step"),
        ("training", shown or f"{time.training:.2g}"),
        ("FLOPs", f"{time.model_flops:.2e} of the model; MFU {time.mfu:.0%} while training"),
        ("tokens/s", f"{time.tokens_per_s:,.0f}, {time.tokens_per_s / plan.num_gpus:,.0f} on each GPU"),
        ("micro-batches", f"{num_micro_batches(plan.config, plan.assumptions)} in an update of mean lengths"),
    ]


def _assumption_rows(plan: Plan) -> Rows:
    assumptions, factor = plan.assumptions, plan.gpu.sustained
    more = "" if factor == 1.0 else f", times {factor:g} for an {plan.gpu_name}"
    return [
        ("--efficiency", f"{assumptions.compute_efficiency:g} of the peak FLOP/s{more}"),
        ("--mean-response", f"{assumptions.mean_response_fraction:g} of rollout.max_response_length"),
        ("--host-gib", f"{assumptions.host_memory_gib:,g} in each node of {assumptions.gpus_per_node} GPUs"),
        ("others", "in planning/hardware.py; --json prints all"),
    ]


def _search_row(plan: Plan) -> Iterator[str]:
    config, time = plan.config, plan.time
    yield from (f"{time.total:,.0f}", f"{time.training:,.0f}", f"{time.mfu:.0%}")
    yield from (f"{plan.while_training(plan.worst_stage) / GIB:.0f}", f"{config.trainer.max_tokens_per_gpu:,}")
    yield from (layout_name(config), f"{config.rollout.num_engines} x {config.rollout.ranks_per_engine}")


def layout_name(config: Config) -> str:
    """Return the parallel dimensions above 1 and the settings that save memory, e.g. `TP4 PP2 DP8 offload`."""
    parallel = config.parallel
    sizes = {
        "TP": parallel.tensor_model_parallel_size,
        "PP": parallel.pipeline_model_parallel_size,
        "VPP": parallel.virtual_pipeline_model_parallel_size,
        "CP": parallel.context_parallel_size,
        "EP": parallel.expert_model_parallel_size,
        "DP": parallel.data_parallel_size,
    }
    parts = [f"{name}{size}" for name, size in sizes.items() if size > 1]
    parts += ["uneven stages"] if parallel.pipeline_model_parallel_layout is not None else []
    parts += [f"FP8 {config.fp8.recipe}"] if config.fp8 is not None else []
    parts += [f"{parallel.recompute_granularity} recompute"] if parallel.recompute_granularity else []
    parts += ["offload"] if config.optimizer.cpu_offload else []
    parts += ["trainer offload"] if config.trainer.offload else []
    return " ".join(parts)


def _print_verdict(console: Console, plan: Plan, overrides: Sequence[str]) -> None:
    if plan.fits:
        console.print(Text(f"fits on {plan.num_gpus} {plan.gpu_name}{' with' * bool(overrides)}", "bold green"))
        if overrides:
            _print_line(console, " ".join(overrides))
        return
    console.print(Text(f"does not fit on {plan.num_gpus} {plan.gpu_name}:", "bold red"))
    for problem in plan.problems:
        _print_line(console, problem)
    if overrides:
        console.print("this would fit:", style="bold")
        _print_line(console, " ".join(overrides))
    else:
        _print_obstacles(console, plan, plan.num_gpus)


def _print_obstacles(console: Console, plan: Plan, num_gpus: int) -> None:
    """Print why no layout fits: the problems of the nearest one, and the way out."""
    near, lines = obstacles(plan, num_gpus)
    name = f"; the nearest is {layout_name(near.config) or 'one rank'}" if near else ""
    console.print(f"No layout of the search fits on {num_gpus} {plan.gpu_name}{name}:", soft_wrap=True)
    for line in lines:
        _print_line(console, line)
