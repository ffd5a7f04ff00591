"""Bytes and time of a full weight sync of published models on clusters of 8-GPU hosts, computed from the plan.

python -m bench.weight_sync_on_paper
"""

from __future__ import annotations

from dataclasses import dataclass

from bench.report import option_parser, report
from megatron_bapo.config.architecture import FAMILIES, Architecture
from megatron_bapo.config.schema import ParallelConfig
from megatron_bapo.model.weight_layouts import EngineLayout, many_hosts, trainer_shards, weight_plan
from megatron_bapo.planning.hardware import GPUS, Assumptions
from megatron_bapo.planning.weight_transfer import TransferSpeed
from megatron_bapo.weight_sync.plan_figures import store_figures

SPEED = TransferSpeed.of(GPUS["H100"], Assumptions())
_COMMON = {"max_position_embeddings": 32768, "rms_norm_eps": 1e-6, "rope_theta": 1e6, "tie_word_embeddings": False}
MODELS = {
    "Qwen2.5-7B": Architecture(
        family=FAMILIES["qwen2"], num_hidden_layers=28, hidden_size=3584, intermediate_size=18944,
        num_attention_heads=28, num_key_value_heads=4, head_dim=128, vocab_size=152064, **_COMMON,
    ),
    "Qwen2.5-32B": Architecture(
        family=FAMILIES["qwen2"], num_hidden_layers=64, hidden_size=5120, intermediate_size=27648,
        num_attention_heads=40, num_key_value_heads=8, head_dim=128, vocab_size=152064, **_COMMON,
    ),
    "Qwen3-235B-A22B": Architecture(
        family=FAMILIES["qwen3_moe"], num_hidden_layers=94, hidden_size=4096, intermediate_size=12288,
        num_attention_heads=64, num_key_value_heads=4, head_dim=128, vocab_size=151936, num_experts=128,
        num_experts_per_tok=8, moe_intermediate_size=1536, norm_topk_prob=True, moe_layers=frozenset(range(94)),
        **_COMMON,
    ),
}  # fmt: skip
LAYOUTS = {
    "Qwen2.5-7B": ({"tensor_model_parallel_size": 2}, EngineLayout(1)),
    "Qwen2.5-32B": ({"tensor_model_parallel_size": 4, "sequence_parallel": True}, EngineLayout(4)),
    "Qwen3-235B-A22B": (
        {
            "tensor_model_parallel_size": 4, "sequence_parallel": True, "pipeline_model_parallel_size": 2,
            "expert_model_parallel_size": 4, "expert_tensor_parallel_size": 1,
        },
        EngineLayout(8, expert_parallel=True),
    ),
}  # fmt: skip


COLUMNS = ("model", "GPUs", "engines", "model GiB", "network GiB", "busiest link GiB", "peak GiB per rank", "seconds")
PLACEMENTS = {True: "colocated", False: "half and half"}


@dataclass(frozen=True)
class Sync:
    """A full weight sync of one model on one cluster, whose layout is `engines`."""

    engines: str
    model_bytes: int
    network_bytes: int
    link_bytes: int
    """Bytes of the busiest pair of a sending rank and a receiving host."""
    peak_bytes: int
    """Largest extra memory of a rank."""
    seconds: float


def computed(model: str, num_gpus: int, *, colocated: bool) -> Sync | None:
    """Return the sync of a model, or None if the layout does not fit.

    Either half of the GPUs train and half generate, or all GPUs take turns with both.
    """
    architecture, (layout, engine) = MODELS[model], LAYOUTS[model]
    num_trainers = num_gpus if colocated else num_gpus // 2
    if not colocated and num_trainers % 8:
        return None
    parallel = ParallelConfig(world_size=num_trainers, **layout)
    num_engines = (num_gpus if colocated else num_gpus - num_trainers) // engine.num_ranks
    placement = many_hosts(parallel, engine, num_engines, 8, colocated=colocated)
    plan = weight_plan(architecture, parallel, engine, placement, dtype="bfloat16", bucket_bytes=256 << 20)
    figures = store_figures(plan, trainer_shards(architecture, parallel), placement.reader_hosts)
    crossing = [size for (rank, host), size in figures.links.items() if plan.sender_hosts[rank] != host]
    return Sync(
        f"{num_engines} x {engine.name}",
        *(plan.total_bytes, figures.network_bytes, max(crossing, default=0), max(figures.peak_bytes)),
        figures.traffic.seconds(SPEED),
    )


def main() -> None:
    rows, figures = [], {}
    for model in MODELS:
        for num_gpus in (8, 64, 256):
            for colocated, placement in PLACEMENTS.items():
                if (sync := computed(model, num_gpus, colocated=colocated)) is None:
                    continue
                sizes = (sync.model_bytes, sync.network_bytes, sync.link_bytes, sync.peak_bytes)
                gib = (f"{size / 2**30:.2f}" for size in sizes)
                rows.append((model, f"{num_gpus} {placement}", sync.engines, *gib, f"{sync.seconds:.2f}"))
                figures[f"{model} on {num_gpus} {placement}, s"] = round(sync.seconds, 2)
    report("weight_sync_on_paper", COLUMNS, rows, ratios={}, figures=figures)


if __name__ == "__main__":
    option_parser(__doc__).parse_args()
    main()
