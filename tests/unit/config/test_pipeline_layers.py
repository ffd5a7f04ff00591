from itertools import combinations, pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_bapo.config.architecture import FAMILIES, Architecture
from megatron_bapo.config.pipeline_layers import (
    LAYER_PASSES,
    OUTPUT_PASSES,
    chunk_layers,
    division_problems,
    layer_flops,
    layer_stages,
    output_flops,
    stage_layers,
)
from megatron_bapo.config.schema import ParallelConfig


def model(num_layers: int, **changes: Any) -> Architecture:
    """Return a model of Qwen3-235B-A22B's width, without experts unless `changes` has them."""
    shape: dict[str, Any] = {
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_attention_heads": 64,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "vocab_size": 151936,
        "max_position_embeddings": 40960,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "tie_word_embeddings": False,
    }
    return Architecture(FAMILIES["qwen3"], num_layers, **shape | changes)


def with_experts(num_layers: int, num_dense: int = 0) -> Architecture:
    """Return a model with experts in all but the first layers, which are wider."""
    experts = {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 1536}
    moe_layers = frozenset(range(num_dense, num_layers))
    return model(num_layers, intermediate_size=36864, moe_layers=moe_layers, **experts)


def parallel(pp: int, vpp: int = 1, layout: object = None) -> ParallelConfig:
    sizes = {"world_size": pp, "pipeline_model_parallel_size": pp, "virtual_pipeline_model_parallel_size": vpp}
    return ParallelConfig.model_validate({**sizes, "pipeline_model_parallel_layout": layout})


def counts(architecture: Architecture, layout: ParallelConfig) -> list[int]:
    assert [*division_problems(architecture, layout, "the model")] == []
    return [len(layers) for layers in chunk_layers(architecture, layout)]


@pytest.mark.parametrize(("num_layers", "pp", "vpp"), [(4, 1, 1), (24, 4, 1), (24, 4, 3), (48, 2, 4)])
def test_without_a_layout_every_chunk_has_as_many_layers(num_layers: int, pp: int, vpp: int) -> None:
    size = num_layers // (pp * vpp)
    for stage in range(pp):
        firsts = [(chunk * pp + stage) * size for chunk in range(vpp)]
        found = stage_layers(model(num_layers), parallel(pp, vpp), stage)
        assert found == [range(first, first + size) for first in firsts]


@pytest.mark.slow
@settings(deadline=None, max_examples=60)
@given(st.integers(1, 40), st.integers(1, 5), st.integers(1, 3), st.sampled_from([64, 4096, 151936]))
def test_auto_gives_every_layer_to_one_chunk_and_no_chunk_is_empty(
    num_layers: int, pp: int, vpp: int, vocab_size: int
) -> None:
    architecture, layout = model(max(num_layers, pp * vpp), vocab_size=vocab_size), parallel(pp, vpp, "auto")
    chunks = chunk_layers(architecture, layout)
    assert len(chunks) == pp * vpp
    assert [layer for layers in chunks for layer in layers] == [*range(architecture.num_hidden_layers)]
    assert all(chunks)
    stages = layer_stages(architecture, layout)
    for stage in range(pp):
        own = [layer for layers in stage_layers(architecture, layout, stage) for layer in layers]
        assert own == [layer for layer, number in enumerate(stages) if number == stage]


@pytest.mark.parametrize("num_chunks", [2, 3, 4])
@pytest.mark.parametrize("architecture", [model(11), with_experts(12), with_experts(13, num_dense=3)])
def test_auto_has_the_smallest_sum_of_squares_of_all_divisions(architecture: Architecture, num_chunks: int) -> None:
    num_layers = architecture.num_hidden_layers
    costs = [LAYER_PASSES * layer_flops(architecture, layer) for layer in range(num_layers)]
    costs[-1] += OUTPUT_PASSES * output_flops(architecture)

    def of_chunks(sizes: list[int]) -> list[int]:
        ends = [sum(sizes[:index]) for index in range(len(sizes) + 1)]
        return [sum(costs[first:stop]) for first, stop in pairwise(ends)]

    divisions = [
        [stop - first for first, stop in pairwise((0, *ends, num_layers))]
        for ends in combinations(range(1, num_layers), num_chunks - 1)
    ]
    found = counts(architecture, parallel(num_chunks, 1, "auto"))
    squares = [sum(cost**2 for cost in of_chunks(sizes)) for sizes in divisions]
    assert found == divisions[squares.index(min(squares))]
    if len({layer_flops(architecture, layer) for layer in range(num_layers)}) == 1:
        assert max(of_chunks(found)) == min(max(of_chunks(sizes)) for sizes in divisions)


@pytest.mark.parametrize(
    ("architecture", "sizes", "expected"),
    [
        (with_experts(94), (8, 1), [12] * 7 + [10]),
        (with_experts(94), (8, 2), [6] * 15 + [4]),
        (with_experts(61), (4, 1), [16, 16, 16, 13]),
        (with_experts(61), (4, 2), [8, 8, 8, 8, 8, 8, 8, 5]),
        (with_experts(61, num_dense=3), (4, 1), [13, 17, 17, 14]),
        (model(61, vocab_size=64), (4, 1), [15, 15, 16, 15]),
    ],
)
def test_auto_counts_the_output_layer_and_what_layers_differ_in(
    architecture: Architecture, sizes: tuple[int, int], expected: list[int]
) -> None:
    assert counts(architecture, parallel(*sizes, "auto")) == expected


@pytest.mark.parametrize(
    ("sizes", "layout", "expected"),
    [
        ((8, 1), [11, 11], [11, *[12] * 6, 11]),
        ((8, 1), [None, 10], [12] * 7 + [10]),
        ((8, 2), [12, 10], [6, 6, 6, 6, 6, 6, 6, 5] * 2),
        ((2, 1), [50, 44], [50, 44]),
        ((2, 1), [50, None], [50, 44]),
        ((2, 2), [48, 46], [24, 23, 24, 23]),
        ((2, 2), [20, 30, 30, 14], [20, 30, 30, 14]),
        ((1, 1), [94], [94]),
    ],
)
def test_a_list_names_the_ends_or_every_chunk(sizes: tuple[int, int], layout: list, expected: list[int]) -> None:
    assert counts(with_experts(94), parallel(*sizes, layout)) == expected


AUTO = "set it to auto, which gives [12, 12, 12, 12, 12, 12, 12, 10]"


@pytest.mark.parametrize(
    ("sizes", "layout", "rule", "way_out"),
    [
        (
            (8, 1),
            None,
            "config.json: num_hidden_layers=94 must be a multiple of parallel.pipeline_model_parallel_size=8,",
            "set parallel.pipeline_model_parallel_layout=auto, which gives [12, 12, 12, 12, 12, 12, 12, 10]",
        ),
        ((8, 1), [11, None], "=[11, null] leaves 83 layers, which the other 7 stages must share evenly", AUTO),
        ((8, 1), [60, 60], "=[60, 60] leaves -26 layers", AUTO),
        ((8, 1), [11, 12, 11], "must have two numbers, of the first and the last stage, or the 8 numbers of", AUTO),
        ((8, 1), [12, None, *[12] * 6], "the 8 numbers of all model chunks", AUTO),
        ((8, 1), [12] * 8, "has the sum 96, which must be all 94 layers", AUTO),
        ((8, 2), [11, 11], "must have multiples of virtual_pipeline_model_parallel_size=2", "set it to auto"),
        ((8, 2), [12, 12], "leaves 70 layers, which the other 6 stages must share evenly in 2 chunks each", "auto"),
        ((2, 1), [47, 48], "must have the sum 94", "set it to auto, which gives [48, 46]"),
        ((1, 1), [40, 54], "must have the 1 numbers of all model chunks", "set it to auto, which gives [94]"),
        (
            (48, 2),
            "auto",
            "num_hidden_layers=94 must be at least parallel.pipeline_model_parallel_size=48 x",
            "most 94",
        ),
    ],
)
def test_a_division_that_does_not_work_is_refused_with_one_that_does(
    sizes: tuple[int, int], layout: object, rule: str, way_out: str
) -> None:
    (problem,) = division_problems(with_experts(94), parallel(*sizes, layout), "config.json")
    assert rule in problem
    assert way_out in problem
