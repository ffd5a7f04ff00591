import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.packing import first_fit_decreasing, karmarkar_karp, reasoning_lengths
from megatron_bapo.config.padding import PaddingRule, padding_rule
from megatron_bapo.data.packing import BALANCED, Plan, Sharing, cost, pack
from megatron_bapo.errors import UserError

BUDGET = 32768
FP8_CONTEXT = padding_rule(2, 2, sequence_parallel=True, fp8_multiple=16, packing=True)

layouts = st.fixed_dictionaries(
    {
        "tensor_size": st.sampled_from([1, 2, 3, 4, 8]),
        "context_size": st.sampled_from([1, 2, 3, 4]),
        "sequence_parallel": st.booleans(),
        "fp8_multiple": st.sampled_from([None, 16, 32]),
        "packing": st.booleans(),
    }
)
rules = st.builds(PaddingRule, st.integers(1, 6), st.integers(1, 12), st.booleans())


def imbalance(lengths: list[int], plan: Plan) -> float:
    costs = [sum(cost(lengths[index]) for micro_batch in rank for index in micro_batch) for rank in plan]
    return max(costs) * len(costs) / sum(costs)


def allocated(lengths: list[int], plan: Plan, rule: PaddingRule) -> list[int]:
    return [rule.allocated([lengths[index] for index in indices]) for indices in itertools.chain(*plan)]


@given(layout=layouts, lengths=st.lists(st.integers(1, 5000), max_size=8))
def test_padded_lengths_can_be_cut_as_the_layout_cuts_them(layout, lengths):
    rule = padding_rule(**layout)
    tensor_size, context_size = layout["tensor_size"], layout["context_size"]
    padded, total = rule.padded_lengths(lengths), rule.allocated(lengths)
    rest = total - sum(padded)
    assert all(p >= length for p, length in zip(padded, lengths, strict=True))
    assert total > 0
    assert rest >= 0
    if context_size > 1:
        assert all(length % (2 * context_size) == 0 for length in [*padded, rest])
    if layout["sequence_parallel"]:
        assert total % context_size == 0
        assert total // context_size % tensor_size == 0
    if multiple := layout["fp8_multiple"]:
        num_cuts = tensor_size * (2 * context_size if context_size > 1 else 1)
        assert all(length % math.lcm(multiple, num_cuts) == 0 for length in [*padded, rest])
        assert total % (128 * num_cuts) == 0
    if not layout["packing"]:
        assert len(set(padded)) <= 1
        assert rest == 0 or not lengths
        assert not (layout["sequence_parallel"] and any(length % (tensor_size * context_size) for length in padded))


@pytest.mark.parametrize(
    ("layout", "rule"),
    [
        ((8, 1, False, None, True), PaddingRule()),
        ((8, 1, True, None, True), PaddingRule(1, 8)),
        ((1, 4, False, None, True), PaddingRule(8, 8)),
        ((1, 4, True, None, True), PaddingRule(8, 8)),
        ((4, 2, True, None, True), PaddingRule(4, 8)),
        ((3, 2, True, None, True), PaddingRule(4, 12)),
        ((1, 1, False, 16, True), PaddingRule(16, 128)),
        ((4, 1, True, 16, True), PaddingRule(16, 512)),
        ((3, 1, True, 16, True), PaddingRule(48, 384)),
        ((2, 2, False, 32, True), PaddingRule(32, 1024)),
        ((2, 2, False, 16, True), PaddingRule(16, 1024)),
        ((8, 4, True, 16, True), PaddingRule(64, 8192)),
        ((1, 1, False, None, False), PaddingRule(1, 1, equal_lengths=True)),
        ((4, 2, True, None, False), PaddingRule(8, 8, equal_lengths=True)),
        ((2, 1, True, 16, False), PaddingRule(256, 256, equal_lengths=True)),
    ],
)
def test_padding_is_the_least_that_a_layout_allows(layout, rule):
    tensor_size, context_size, sequence_parallel, fp8_multiple, packing = layout
    assert rule == padding_rule(
        tensor_size, context_size, sequence_parallel=sequence_parallel, fp8_multiple=fp8_multiple, packing=packing
    )


def test_padding_counts_once_per_sequence_once_per_micro_batch_and_without_any_sequence():
    assert PaddingRule().padded_lengths([5, 3]) == [5, 3]
    assert PaddingRule(4).padded_lengths([5, 4, 1]) == [8, 4, 4]
    assert PaddingRule(4, equal_lengths=True).padded_lengths([5, 4, 1]) == [8, 8, 8]
    assert PaddingRule(4, equal_lengths=True).padded_lengths([]) == []
    assert PaddingRule().allocated([5, 3]) == 8
    assert PaddingRule(4, 16).allocated([5, 4, 1]) == 16
    assert PaddingRule(4, 16).allocated([5, 4, 1, 1]) == 32
    assert PaddingRule(4, 6).allocated([1]) == 12
    assert PaddingRule(4, 16).allocated([]) == 16


@given(
    lengths=st.lists(st.integers(1, 20), max_size=48),
    num_ranks=st.integers(1, 5),
    num_multiple_of=st.integers(1, 3),
    rule=rules,
    spare=st.integers(0, 40),
)
def test_every_trajectory_once_in_equally_many_micro_batches_within_the_budget(
    lengths, num_ranks, num_multiple_of, rule, spare
):
    max_tokens = rule.allocated([20]) + spare
    plan = pack(lengths, max_tokens, num_ranks, rule=rule, num_multiple_of=num_multiple_of)
    num_micro_batches = len(plan[0])
    assert [len(rank) for rank in plan] == [num_micro_batches] * num_ranks
    assert num_micro_batches > 0
    assert num_micro_batches % num_multiple_of == 0
    assert sorted(itertools.chain(*itertools.chain(*plan))) == list(range(len(lengths)))
    assert all(indices == sorted(indices) for indices in itertools.chain(*plan))
    assert max(allocated(lengths, plan, rule)) <= max_tokens
    assert plan == pack(lengths, max_tokens, num_ranks, rule=rule, num_multiple_of=num_multiple_of)

    num_empty = sum(not indices for indices in itertools.chain(*plan))
    assert num_empty == max(0, num_micro_batches * num_ranks - len(lengths))
    if num_empty and num_micro_batches > num_multiple_of:
        assert (num_micro_batches - num_multiple_of) * num_ranks < len(lengths)

    for rank in plan:
        costs = [sum(map(cost, rule.padded_lengths([lengths[i] for i in indices]))) for indices in rank]
        assert all(this >= following - 1e-9 for this, following in itertools.pairwise(costs))


@pytest.mark.parametrize("rule", [PaddingRule(), FP8_CONTEXT], ids=["unpadded", "fp8-tp2-cp2"])
@pytest.mark.parametrize("seed", range(5))
def test_on_reasoning_lengths_budgets_are_filled_and_ranks_balanced(seed, rule):
    lengths = reasoning_lengths(2048, seed)
    plan = pack(lengths, BUDGET, num_ranks=8, rule=rule)
    assert sum(lengths) / (8 * len(plan[0]) * BUDGET) >= 0.95
    assert sum(lengths) / sum(allocated(lengths, plan, rule)) >= 0.95
    assert imbalance(lengths, plan) <= 1.05


@pytest.mark.parametrize("seed", range(5))
def test_a_minibatch_too_small_to_fill_all_budgets_takes_the_fewest_micro_batches(seed):
    lengths = reasoning_lengths(512, seed)
    plan = pack(lengths, BUDGET, num_ranks=8, rule=FP8_CONTEXT)
    assert len(plan[0]) == -(-sum(lengths) // (8 * BUDGET))
    assert sum(lengths) / sum(allocated(lengths, plan, FP8_CONTEXT)) >= 0.95
    assert imbalance(lengths, plan) <= 1.05


def test_reasoning_lengths_have_the_stated_median_tail_and_limit():
    lengths = sorted(reasoning_lengths(100_000, seed=0))
    assert lengths[50_000] == pytest.approx(2048, rel=0.02)
    assert lengths[99_000] == pytest.approx(20480, rel=0.05)
    assert lengths[0] >= 1
    assert lengths[-1] == BUDGET


def test_a_micro_batch_is_filled_to_the_last_token_where_only_that_needs_no_more_of_them():
    assert pack([4, 7, 3, 10, 10, 3, 6], max_tokens=12, num_ranks=1) == [[[2, 5, 6], [0, 1], [3], [4]]]
    assert pack([10, 4, 6], max_tokens=10, num_ranks=1) == [[[0], [1, 2]]]


def test_a_further_micro_batch_is_opened_where_full_ones_leave_the_ranks_unbalanced():
    lengths = [4, 5, 11, 2, 6, 8, 7]
    plan = pack(lengths, max_tokens=11, num_ranks=2, attention_length=11)
    costs = [sum(cost(lengths[i], 11) for indices in rank for i in indices) for rank in plan]
    assert len(plan[0]) == 3 > sum(lengths) / (2 * 11)
    assert max(costs) * 2 / sum(costs) <= 1.05


def test_long_trajectories_weigh_more_than_their_tokens():
    lengths = [16000, 4000, 4000, 4000, 4000, 4000, 4000]
    assert pack(lengths, max_tokens=40000, num_ranks=2) == [[[0]], [[1, 2, 3, 4, 5, 6]]]
    assert pack(lengths, max_tokens=40000, num_ranks=2, attention_length=1e9) == [[[0, 6]], [[1, 2, 3, 4, 5]]]


def test_equal_lengths_group_sequences_of_similar_length():
    lengths = [2, 10, 2, 10, 2, 10, 2, 2]
    rule = PaddingRule(equal_lengths=True)
    assert pack(lengths, max_tokens=30, num_ranks=1, rule=rule) == [[[1, 3, 5], [0, 2, 4, 6, 7]]]


def test_a_budget_between_two_multiples_is_used_up_to_the_lower():
    assert pack([8, 8, 8], max_tokens=31, num_ranks=1, rule=PaddingRule(1, 16)) == [[[0, 2], [1]]]


def test_micro_batches_without_a_trajectory_stay_empty():
    assert pack([5, 7, 6], max_tokens=10, num_ranks=4) == [[[1]], [[2]], [[0]], [[]]]
    assert pack([7], max_tokens=10, num_ranks=1, num_multiple_of=2) == [[[0], []]]
    assert pack([10, 10, 10], max_tokens=10, num_ranks=2) == [[[0], [2]], [[1], []]]
    assert pack([], max_tokens=10, num_ranks=2) == [[[]], [[]]]


def test_a_trajectory_over_the_budget_names_length_key_and_remedy():
    message = r"with 11 tokens, 12 with padding, .* the 11 .*trainer\.max_tokens_per_gpu.*; raise trainer\.max_tok"
    with pytest.raises(UserError, match=message):
        pack([3, 11], max_tokens=11, num_ranks=1, rule=PaddingRule(4))


def test_the_compared_differencing_method_gives_its_textbook_partition():
    def sums(values: list[float], parts: list[list[int]]) -> list[float]:
        return sorted(sum(values[i] for i in part) for part in parts)

    values = [8.0, 7.0, 6.0, 5.0, 4.0]
    assert sums(values, karmarkar_karp(values, 2, equal_number=False)) == [14, 16]
    parts = karmarkar_karp([*values, 1.0], 3, equal_number=True)
    assert [len(part) for part in parts] == [2, 2, 2]
    assert sums([*values, 1.0], parts) == [9, 11, 11]


def test_the_compared_first_fit_fills_in_order_of_length_and_tops_up_the_number_of_bins():
    lengths = [12288, 20480, 8192, 4096, 16384]
    assert first_fit_decreasing(lengths, BUDGET, 2) == [[[1, 0]], [[4, 2, 3]]]
    assert first_fit_decreasing(lengths, BUDGET, 3) == [[[1, 0]], [[4, 2]], [[3]]]


groups = st.lists(st.tuples(st.integers(0, 60), st.lists(st.integers(1, 60), min_size=1, max_size=8)), max_size=12)


@pytest.mark.slow
@given(
    groups=groups, num_ranks=st.integers(1, 4), num_multiple_of=st.integers(1, 2), repeated=st.sampled_from([0.0, 0.3])
)
def test_groups_that_share_their_prompt_fit_the_budget_and_cost_the_busiest_rank_no_more(
    groups, num_ranks, num_multiple_of, repeated
):
    members = [(number, num, own) for number, (num, owns) in enumerate(groups) for own in owns]
    group_of, shared, own = ([member[column] for member in members] for column in range(3))
    lengths = [num + more for num, more in zip(shared, own, strict=True)]

    def work(plan: Plan) -> float:
        return max(sum(map(cost_of, rank)) for rank in plan)

    def num_tokens(indices: list[int]) -> int:
        return sum(own[i] for i in indices) + sum({group_of[i]: shared[i] for i in indices}.values())

    def cost_of(indices: list[int]) -> float:
        return num_tokens(indices) + sum(lengths[i] ** 2 for i in indices) / 1000.0

    settings = {"num_multiple_of": num_multiple_of, "attention_length": 1000.0}
    plan = pack(lengths, 128, num_ranks, sharing=Sharing(group_of, shared, repeated), **settings)

    assert sorted(i for rank in plan for indices in rank for i in indices) == list(range(len(lengths)))
    for indices in itertools.chain.from_iterable(plan):
        num_computed, num_all = num_tokens(indices), sum(lengths[i] for i in indices)
        assert num_computed + repeated * (num_all - num_computed) <= 128
    (num_micro_batches,) = {len(rank) for rank in plan}
    assert num_micro_batches % num_multiple_of == 0
    apart = pack(lengths, 128, num_ranks, **settings)
    alone = max(sum(cost(lengths[i], 1000.0) for indices in rank for i in indices) for rank in apart)
    assert work(plan) <= BALANCED * alone + 1e-9


def test_the_groups_of_a_batch_stay_whole_where_that_balances_the_ranks():
    """Eight groups of four on two ranks; alone, each trajectory has 150 tokens."""
    sharing = Sharing([index // 4 for index in range(32)], [100] * 32)
    plan = pack([150] * 32, 700, 2, sharing=sharing)
    assert [[sorted(index % 4 for index in indices) for indices in rank] for rank in plan] == 2 * [
        2 * [[0, 0, 1, 1, 2, 2, 3, 3]]
    ]
    assert all(len({index // 4 for index in indices}) == 2 for rank in plan for indices in rank)
    assert len(pack([150] * 32, 700, 2)[0]) == 4
