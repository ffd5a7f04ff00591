"""Division of a model's layers into pipeline stages and their model chunks.

Model chunks are counted in the order of the model: chunk i is on stage i % pipeline_model_parallel_size.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import accumulate, pairwise

from megatron_bapo.config.architecture import Architecture
from megatron_bapo.config.schema import ParallelConfig

AUTO_LENGTH = 8192
"""Length in tokens of the sequence whose FLOPs `auto` balances; attention's share grows with it."""
LAYER_PASSES, OUTPUT_PASSES = 3, 4
"""Products of an update, in forward passes: the logits are computed again in the backward pass."""


def chunk_layers(architecture: Architecture, parallel: ParallelConfig) -> list[range]:
    """Return the layers of every model chunk. The layout must have passed `division_problems`."""
    ends = accumulate(_layer_counts(architecture, parallel), initial=0)
    chunks = [range(first, stop) for first, stop in pairwise(ends)]
    assert chunks[-1].stop == architecture.num_hidden_layers, f"{chunks} are not all layers"
    return chunks


def stage_layers(architecture: Architecture, parallel: ParallelConfig, stage: int) -> list[range]:
    """Return the layers of every model chunk of a pipeline stage."""
    return chunk_layers(architecture, parallel)[stage :: parallel.pipeline_model_parallel_size]


def layer_stages(architecture: Architecture, parallel: ParallelConfig) -> list[int]:
    """Return the pipeline stage of every layer."""
    chunks = chunk_layers(architecture, parallel)
    return [number % parallel.pipeline_model_parallel_size for number, layers in enumerate(chunks) for _ in layers]


def division_problems(architecture: Architecture, parallel: ParallelConfig, where: str) -> Iterator[str]:
    """Yield what is wrong with the division, if anything; `where` names the architecture's source in messages."""
    pp, vpp = parallel.pipeline_model_parallel_size, parallel.virtual_pipeline_model_parallel_size
    layout, num_layers = parallel.pipeline_model_parallel_layout, architecture.num_hidden_layers
    sizes = f"parallel.pipeline_model_parallel_size={pp}"
    sizes += f" x virtual_pipeline_model_parallel_size={vpp}" if vpp > 1 else ""
    if num_layers < pp * vpp:
        yield (
            f"{where}: num_hidden_layers={num_layers} must be at least {sizes}, because every model chunk needs a "
            f"layer; choose a size of at most {num_layers}"
        )
    elif layout is None and num_layers % (pp * vpp):
        yield (
            f"{where}: num_hidden_layers={num_layers} must be a multiple of {sizes}, which splits them; set "
            f"parallel.pipeline_model_parallel_layout=auto, which gives {_automatic(architecture, parallel)}, or "
            "choose a size that divides it"
        )
    elif isinstance(layout, tuple) and (rule := _broken_rule(num_layers, parallel, layout)):
        yield (
            f"parallel.pipeline_model_parallel_layout={_written(layout)} {rule} ({where}: num_hidden_layers="
            f"{num_layers}, {sizes}); set it to auto, which gives {_automatic(architecture, parallel)}"
        )


def _broken_rule(num_layers: int, parallel: ParallelConfig, layout: Sequence[int | None]) -> str | None:
    """Return what a list of layers does against the rules."""
    pp, vpp = parallel.pipeline_model_parallel_size, parallel.virtual_pipeline_model_parallel_size
    if _is_of_ends(parallel, layout):
        given = [number for number in layout if number is not None]
        if any(number % vpp for number in given):
            return f"must have multiples of virtual_pipeline_model_parallel_size={vpp}, the chunks of a stage"
        rest, stages = num_layers - sum(given), pp - len(given)
        if stages == 0:
            return None if rest == 0 else f"must have the sum {num_layers}"
        if rest <= 0 or rest % (stages * vpp):
            each = f" in {vpp} chunks each" if vpp > 1 else ""
            return f"leaves {rest} layers, which the other {stages} stages must share evenly{each}"
        return None
    counts = [number for number in layout if number is not None]
    if len(counts) != pp * vpp or len(layout) != pp * vpp:
        ends = "two numbers, of the first and the last stage, or " if pp > 1 else ""
        return f"must have {ends}the {pp * vpp} numbers of all model chunks"
    return None if sum(counts) == num_layers else f"has the sum {sum(counts)}, which must be all {num_layers} layers"


def _layer_counts(architecture: Architecture, parallel: ParallelConfig) -> list[int]:
    """Return the number of layers of every model chunk."""
    pp, vpp = parallel.pipeline_model_parallel_size, parallel.virtual_pipeline_model_parallel_size
    layout = parallel.pipeline_model_parallel_layout
    if layout is None:
        return [architecture.num_hidden_layers // (pp * vpp)] * (pp * vpp)
    if layout == "auto":
        return _automatic(architecture, parallel)
    if not _is_of_ends(parallel, layout):
        return [number for number in layout if number is not None]
    given = [number for number in layout if number is not None]
    between = (architecture.num_hidden_layers - sum(given)) // max(1, pp - len(given))
    first, last = (between if number is None else number for number in layout)
    return [number // vpp for number in (first, *[between] * (pp - 2), last)] * vpp


def _is_of_ends(parallel: ParallelConfig, layout: Sequence[int | None]) -> bool:
    """Return whether a list has the layers of the first and the last stage."""
    return len(layout) == 2 and parallel.pipeline_model_parallel_size > 1


def _written(layout: Sequence[int | None]) -> str:
    return f"[{', '.join('null' if number is None else str(number) for number in layout)}]"


def _automatic(architecture: Architecture, parallel: ParallelConfig) -> list[int]:
    sizes = parallel.pipeline_model_parallel_size, parallel.virtual_pipeline_model_parallel_size
    return [*_balanced(architecture, sizes[0] * sizes[1])]


@lru_cache(maxsize=256)
def _balanced(architecture: Architecture, num_chunks: int) -> tuple[int, ...]:
    """Return the number of layers of each chunk for which the sum of the squared FLOPs of the chunks is the smallest.

    If all layers are alike, no division has a smaller largest chunk. Of equal divisions the one with fewer layers in
    the first chunks is taken, because the first stages hold the activations of the most micro-batches.
    """
    num_layers = architecture.num_hidden_layers
    flops = [LAYER_PASSES * layer_flops(architecture, layer) for layer in range(num_layers)]
    flops[-1] += OUTPUT_PASSES * output_flops(architecture)
    before = [*accumulate(flops, initial=0)]
    best: dict[int, tuple[int, tuple[int, ...]]] = {num_layers: (0, ())}
    for _ in range(num_chunks):  # `best` has the divisions of all layers from its key on into the last chunks
        best = {
            first: min(
                ((before[stop] - before[first]) ** 2 + squares, (stop - first, *counts))
                for stop, (squares, counts) in best.items()
                if first < stop
            )
            for first in range(max(best))
        }
    return best[0][1]


def layer_flops(architecture: Architecture, layer: int) -> int:
    """Return the FLOPs of a token's forward pass through a layer; attending to `AUTO_LENGTH` / 2 tokens or a window."""
    arch, is_linear = architecture, layer in architecture.linear_layers
    weights = arch.hidden_size * (arch.linear_in_width + arch.linear_value_width)
    weights = weights if is_linear else _attention_weights(arch)
    if layer in arch.moe_layers:
        experts = 3 * (arch.num_experts_per_tok * arch.moe_intermediate_size + arch.shared_expert_intermediate_size)
        weights += arch.hidden_size * (arch.num_experts + experts)
    else:
        weights += 3 * arch.hidden_size * arch.intermediate_size
    attended = min(AUTO_LENGTH, 2 * (arch.window(layer) or AUTO_LENGTH))
    return 2 * weights + (arch.recurrence_flops if is_linear else 2 * arch.attention_width * attended)


def _attention_weights(arch: Architecture) -> int:
    """Return the number of weights of a layer's attention without its norms."""
    queries, values = (arch.num_attention_heads * width for width in (arch.head_dim, arch.value_dim))
    if not arch.kv_lora_rank:
        return arch.hidden_size * (arch.qkv_width + values)
    up = arch.num_attention_heads * (arch.qk_nope_head_dim + arch.v_head_dim)
    from_hidden = (arch.q_lora_rank or queries) + arch.cached_dim + values
    return arch.hidden_size * from_hidden + arch.q_lora_rank * queries + arch.kv_lora_rank * up


def output_flops(architecture: Architecture) -> int:
    """Return the FLOPs of a token's forward pass through the output layer. The embedding is a lookup and has none."""
    return 2 * architecture.hidden_size * architecture.vocab_size


def engine_stage(layer: int, num_layers: int, num_stages: int) -> int:
    """Return the pipeline stage of an engine that has a layer; remainder layers go to the stages before the last one.

    Source: vLLM, vllm/distributed/utils.py, get_pp_indices.
    """
    sizes = [num_layers // num_stages] * num_stages
    for stage in range(2, num_layers % num_stages + 2):
        sizes[-stage] += 1
    end = 0
    for stage, size in enumerate(sizes):
        end += size
        if layer < end:
            return stage
    raise AssertionError(f"layer {layer} of {num_layers}")
