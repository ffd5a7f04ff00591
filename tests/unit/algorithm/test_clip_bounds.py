"""The one-pass search against the oracle and against a literal Algorithm 1 that iterates over tokens."""

from __future__ import annotations

import json
import math
import random
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch.overrides import TorchFunctionMode

from megatron_bapo.algorithm.clip_bounds import ClipBounds, ClipBoundsSettings, find_clip_bounds
from megatron_bapo.algorithm.loss_tokens import LossTokens
from megatron_bapo.algorithm.policy_loss import policy_loss
from megatron_bapo.config.algorithm import AlgorithmConfig

ORACLE = json.loads((Path(__file__).parent / "clip_bounds_cases.json").read_text())["cases"]
PAPER = ClipBoundsSettings()


class Token(NamedTuple):
    ratio: float
    advantage: float
    weight: float
    present: bool


def tensor(values: Any, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.tensor([float(value) for value in values], dtype=dtype)


def settings_from(cfg: dict[str, float], **choices: Any) -> ClipBoundsSettings:
    # The oracle also asks for targets 0 and 1, which a run's configuration need not accept.
    return ClipBoundsSettings.model_construct(
        positive_contribution_target=cfg["rho0"],
        ratio_lower_start=cfg["a_lo"],
        ratio_lower_max=cfg["b_lo"],
        ratio_lower_step=cfg["d_lo"],
        ratio_upper_start=cfg["a_hi"],
        ratio_upper_max=cfg["b_hi"],
        ratio_upper_step=cfg["d_hi"],
        **choices,
    )


def search(tokens: list[Token], settings: ClipBoundsSettings, **kwargs: Any) -> ClipBounds:
    return find_clip_bounds(
        tensor(t.ratio for t in tokens).log(),
        tensor(t.advantage for t in tokens),
        settings,
        mask=torch.tensor([t.present for t in tokens], dtype=torch.bool),
        weights=tensor(t.weight for t in tokens),
        **kwargs,
    )


def search_in_shards(shards: list[list[Token]], settings: ClipBoundsSettings) -> ClipBounds:
    """Return the result of the last rank, with a reduction that adds the vectors of all ranks."""
    vectors: list[torch.Tensor] = []

    def reduce(vector: torch.Tensor) -> None:
        vectors.append(vector.clone())
        vector.copy_(torch.stack(vectors).sum(dim=0))

    *_, found = [search(shard, settings, reduce=reduce) for shard in shards]
    assert len(vectors) == len(shards), "reduce is called exactly once per search"
    return found


def literal_search(tokens: list[Token], settings: ClipBoundsSettings) -> tuple[float, float, float]:
    """Run Algorithm 1 (or the released loop) with one evaluation per move; return (low, high, share)."""
    kept = [
        (min(max(t.ratio, math.exp(-20)), math.exp(20)), t.advantage, t.weight)
        for t in tokens
        if t.present and not math.isnan(t.ratio) and math.isfinite(t.advantage) and math.isfinite(t.weight)
    ]
    s, gradient = settings, settings.contribution == "gradient"
    low, high = s.ratio_lower_start, s.ratio_upper_start

    def evaluate() -> tuple[float, float]:
        positive = (w * a * (r * (r < high) if gradient else min(r, high)) for r, a, w in kept if a > 0)
        negative = (w * -a * (r * (r > low) if gradient else max(r, low)) for r, a, w in kept if a < 0)
        return math.fsum(positive), math.fsum(negative)

    while True:
        positive, negative = evaluate()
        share = positive / (positive + negative) if positive + negative else math.nan
        if s.target_measure == "ratio":
            target = s.positive_contribution_target / (1 - s.positive_contribution_target)
            satisfied = negative == 0 or positive / (negative + 1e-8) >= target
        else:
            satisfied = math.isnan(share) or share >= s.positive_contribution_target - 1e-9
        next_low, next_high = round(low + s.ratio_lower_step, 9), round(high + s.ratio_upper_step, 9)
        if s.search_order == "upper_first":
            if satisfied or next_low > s.ratio_lower_max:
                return low, high, share
            low, high = (low, next_high) if next_high <= s.ratio_upper_max else (next_low, high)
        else:
            if satisfied or (low == s.ratio_lower_max and high == s.ratio_upper_max):
                return low, high, share
            if low < s.ratio_lower_max:
                low = min(next_low, s.ratio_lower_max)
            else:
                high = min(next_high, s.ratio_upper_max)


def random_settings(rng: random.Random) -> ClipBoundsSettings:
    a_lo, a_hi = rng.choice([0.5, 0.6, 0.8]), rng.choice([1.0, 1.2, 1.25])
    return settings_from(
        {
            "a_lo": a_lo,
            "b_lo": rng.choice([a_lo, 0.85, 0.9, 1.0]),
            "d_lo": rng.choice([0.02, 0.05, 0.07, 0.3]),
            "a_hi": a_hi,
            "b_hi": rng.choice([a_hi, 1.5, 2.0, 3.0]),
            "d_hi": rng.choice([0.05, 0.1, 0.13]),
            "rho0": rng.choice([0.0, 0.2, 0.33, 0.4, 0.45, 0.5, 0.6, 0.9]),
        },
        contribution=rng.choice(["value", "gradient"]),
        search_order=rng.choice(["upper_first", "lower_first"]),
        target_measure=rng.choice(["share", "ratio"]),
    )


def random_tokens(rng: random.Random) -> list[Token]:
    ratios = rng.choice(
        [[0.5, 0.7, 1.0, 1.2, 1.35, 2.0, 3.0, 5.0], [round(rng.lognormvariate(0, 0.5), 3) for _ in range(8)]]
    )
    advantages = rng.choice([[-2.0, -1.0, -0.5, 0.0, 1.0, 2.0, 3.0], [round(rng.gauss(0, 1), 2) for _ in range(8)]])
    tokens = []
    for _ in range(rng.randrange(14)):
        odd = rng.random() < 0.06
        tokens.append(
            Token(
                ratio=rng.choice([math.nan, math.inf, 0.0]) if odd and rng.random() < 0.6 else rng.choice(ratios),
                advantage=rng.choice([math.nan, math.inf, -math.inf])
                if odd and rng.random() < 0.4
                else rng.choice(advantages),
                weight=rng.choice([math.nan, math.inf, 0.0])
                if odd and rng.random() < 0.3
                else rng.choice([0.25, 0.5, 1.0]),
                present=rng.random() < 0.9,
            )
        )
    return tokens


def values(bounds: ClipBounds) -> list[Any]:
    """Return every field in a form that compares bit for bit, with NaN equal to itself."""
    return [repr(v.item()) if isinstance(v, torch.Tensor) else v for v in vars(bounds).values()]


def assert_matches_literal(found: ClipBounds, expected: tuple[float, float, float]) -> None:
    low, high, share = expected
    assert (found.low.item(), found.high.item()) == (low, high)
    assert found.positive_share.item() == pytest.approx(share, rel=1e-11, nan_ok=True)


@pytest.mark.parametrize("contribution", ["value", "gradient"])
@pytest.mark.parametrize("case", ORACLE, ids=lambda case: case["name"])
def test_oracle_case(case: dict[str, Any], contribution: str) -> None:
    settings = settings_from(case["cfg"], contribution=contribution)
    found = find_clip_bounds(
        tensor(case["r"]).log(),
        tensor(case["A"]),
        settings,
        mask=None if case["mask"] is None else torch.tensor(case["mask"]),
        weights=None if case["w"] is None else tensor(case["w"]),
    )
    expected = case[contribution]
    assert (found.low.item(), found.high.item()) == (expected["c_low"], expected["c_high"])
    for value, name in [
        (found.positive_share, "rho"),
        (found.initial_positive_share, "rho_start"),
        (found.positive_sum, "P"),
        (found.negative_sum, "N"),
    ]:
        reference = math.nan if expected[name] is None else expected[name]
        assert value.item() == pytest.approx(reference, abs=1e-8, rel=1e-9, nan_ok=True)


# The released search multiplies by the mask, so a masked NaN stops it at the start. This fault is not reproduced.
@pytest.mark.parametrize("case", [c for c in ORACLE if c["name"] != "nan_ratio_masked"], ids=lambda case: case["name"])
def test_lower_first_with_the_ratio_measure_is_the_released_search(case: dict[str, Any]) -> None:
    settings = settings_from(case["cfg"], search_order="lower_first", target_measure="ratio")
    found = find_clip_bounds(tensor(case["r"]).log(), tensor(case["A"]), settings)
    expected = case["released"]
    assert (found.low.item(), found.high.item()) == (expected["c_low"], expected["c_high"])
    if isinstance(expected["pos_neg_ratio"], float):
        assert (found.positive_sum / (found.negative_sum + 1e-8)).item() == pytest.approx(
            expected["pos_neg_ratio"], abs=1e-6
        )


# Ties with the target and with grid points, NaN, infinities, masks, weights, no tokens; orders, splits, empty shards.
@pytest.mark.parametrize("seed", range(8))
@pytest.mark.slow
def test_2500_random_cases_match_the_literal_loop_in_any_order_and_split(seed: int) -> None:
    rng = random.Random(seed)
    outcomes = Counter[str]()
    for _ in range(2500):
        tokens, settings = random_tokens(rng), random_settings(rng)
        found, expected = search(tokens, settings), literal_search(tokens, settings)
        assert_matches_literal(found, expected)
        outcomes[found.outcome] += 1
        rng.shuffle(tokens)
        cuts = sorted(rng.randrange(len(tokens) + 1) for _ in range(rng.randrange(3)))
        shards = [tokens[a:b] for a, b in zip([0, *cuts], [*cuts, len(tokens)], strict=True)]
        assert values(search_in_shards(shards, settings)) == values(found)
    assert min(outcomes[name] for name in ("start", "interior", "end", "no_signal")) > 50, outcomes


def test_sums_over_many_chunks_are_bitwise_independent_of_the_order() -> None:
    generator = torch.Generator().manual_seed(0)
    log_ratio = torch.randn(300_000, generator=generator) * 0.4
    advantages = torch.randn(300_000, generator=generator) * torch.randn(300_000, generator=generator).mul(10).exp()
    order = torch.randperm(300_000, generator=generator)
    first, second = (
        find_clip_bounds(log_ratio, advantages, PAPER),
        find_clip_bounds(log_ratio[order], advantages[order], PAPER),
    )
    assert values(first) == values(second)
    terms = advantages.double() * torch.minimum(log_ratio.double().exp(), first.high)
    assert first.positive_sum.item() == pytest.approx(math.fsum(terms[advantages > 0].tolist()), rel=1e-12)


@pytest.mark.parametrize(("excess", "outcome"), [(2e-9, "start"), (1e-8, "end")])
def test_a_share_within_1e_9_of_the_target_is_satisfied(excess: float, outcome: str) -> None:
    settings = ClipBoundsSettings(positive_contribution_target=0.5)
    assert find_clip_bounds(tensor([0, 0]), tensor([1, -1 - excess]), settings).outcome == outcome


def test_an_exact_tie_does_not_satisfy_the_ratio_measure() -> None:
    settings = ClipBoundsSettings(positive_contribution_target=0.5, target_measure="ratio")
    assert find_clip_bounds(tensor([0, 0]), tensor([1, -1]), settings).outcome == "end"


@pytest.mark.parametrize("scale", [2.0**-150, 1e-30, 1e30, 2.0**150])
@pytest.mark.parametrize("contribution", ["value", "gradient"])
def test_a_common_scale_of_the_advantages_changes_no_bound(scale: float, contribution: str) -> None:
    generator = torch.Generator().manual_seed(1)
    log_ratio = torch.randn(2000, generator=generator, dtype=torch.float64) * 0.5
    advantages = torch.randn(2000, generator=generator, dtype=torch.float64)
    target = {"value": 0.45, "gradient": 0.42}[contribution]
    settings = ClipBoundsSettings.model_validate({"positive_contribution_target": target, "contribution": contribution})
    plain = find_clip_bounds(log_ratio, advantages, settings)
    scaled = find_clip_bounds(log_ratio, advantages * scale, settings)
    assert plain.outcome == "interior"
    assert (scaled.low, scaled.high) == (plain.low, plain.high)
    assert scaled.positive_share.item() == pytest.approx(plain.positive_share.item(), rel=1e-12)


def test_contributions_below_the_range_count_as_zero_and_above_it_are_dropped() -> None:
    found = find_clip_bounds(torch.zeros(4, dtype=torch.float64), tensor(["1e-60", "-1e-300", "1e50", "-1e308"]), PAPER)
    assert found.outcome == "no_signal"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_gradient_contribution_snaps_ratios_within_rounding_to_the_grid_point(dtype: torch.dtype) -> None:
    settings = ClipBoundsSettings(contribution="gradient")
    points = [round(1.2 + 0.05 * k, 2) for k in range(37)]
    for index, point in enumerate(points[:-1]):
        found = find_clip_bounds(torch.tensor([point, 1.0], dtype=dtype).log(), tensor([1, -1], dtype), settings)
        assert found.high.item() == points[index + 1]
    lower = [round(0.6 + 0.02 * k, 2) for k in range(16)]
    for point in lower[1:]:
        found = find_clip_bounds(
            torch.tensor([1.0, point, 1.0], dtype=dtype).log(), tensor([1, -1, -1], dtype), settings
        )
        assert found.low.item() == point


def test_half_precision_inputs_are_supported() -> None:
    found = find_clip_bounds(
        torch.tensor([2.0, 1.0], dtype=torch.bfloat16).log(), torch.tensor([1.0, -2.0], dtype=torch.bfloat16), PAPER
    )
    assert (found.low.item(), found.high.item()) == (0.6, 1.35)


@pytest.mark.parametrize("contribution", ["value", "gradient"])
@pytest.mark.parametrize("dtype", [torch.int64, torch.float16, torch.bfloat16, torch.float32])
def test_the_dtypes_of_the_inputs_do_not_matter(dtype: torch.dtype, contribution: Any) -> None:
    numbers = [
        torch.tensor(values) for values in ([0, 1, -1, 2, 0], [1, 2, -3, -1, -2], [1, 1, 0, 1, 1], [1, 2, 1, 1, 3])
    ]
    settings = ClipBoundsSettings(contribution=contribution)
    first, second = (
        find_clip_bounds(log_ratio, advantages, settings, mask=mask, weights=weights)
        for log_ratio, advantages, mask, weights in ([n.to(d) for n in numbers] for d in (dtype, torch.float64))
    )
    assert values(first) == values(second)


@pytest.mark.parametrize("contribution", ["value", "gradient"])
@pytest.mark.parametrize("order", ["upper_first", "lower_first"])
@pytest.mark.parametrize(("target", "outcome"), [(0.0, "start"), (1.0, "end")])
def test_a_target_of_zero_stays_at_the_start_and_a_target_of_one_reaches_the_end(
    contribution: Any, order: Any, target: float, outcome: str
) -> None:
    settings = ClipBoundsSettings(
        positive_contribution_target=target, contribution=contribution, search_order=order, target_measure="share"
    )
    assert find_clip_bounds(tensor([0, 0]), tensor([1, -1]), settings).outcome == outcome
    assert find_clip_bounds(tensor([0]), tensor([1]), settings).outcome == "start"


@pytest.mark.parametrize(("order", "low", "high"), [("upper_first", 0.6, 1.2), ("lower_first", 0.9, 3.0)])
def test_steps_longer_than_the_ranges_move_the_bounds_only_in_the_released_search(
    order: Any, low: float, high: float
) -> None:
    settings = ClipBoundsSettings(search_order=order, ratio_lower_step=5.0, ratio_upper_step=7.0)
    found = find_clip_bounds(tensor([0]), tensor([-1]), settings)
    assert (found.low.item(), found.high.item()) == (low, high)
    assert found.moves == ((0, 0) if order == "upper_first" else (1, 1))


@pytest.mark.parametrize("order", ["upper_first", "lower_first"])
def test_ranges_of_one_point_are_start_and_end(order: Any) -> None:
    settings = ClipBoundsSettings(
        search_order=order, ratio_lower_start=0.9, ratio_lower_max=0.9, ratio_upper_start=1.0, ratio_upper_max=1.0
    )
    found = find_clip_bounds(tensor([0, 0]), tensor([-1, -2]), settings)
    assert (found.low.item(), found.high.item(), found.moves, found.outcome) == (0.9, 1.0, (0, 0), "start")


def test_moves_count_the_steps_of_either_bound() -> None:
    found = find_clip_bounds(tensor([2, 1]).log(), tensor([1, -2]), PAPER)
    assert (found.low.item(), found.high.item(), found.moves) == (0.6, 1.35, (0, 3))
    assert find_clip_bounds(tensor([0]), tensor([-1]), PAPER).moves == (15, 36)


def test_tokens_that_are_all_unusable_give_the_starting_bounds() -> None:
    nan, inf = math.nan, math.inf
    found = find_clip_bounds(
        tensor([nan, nan, 0, 0, 0]), tensor([1, nan, inf, -inf, 1]), PAPER, weights=tensor([1, 1, 1, 1, -1])
    )
    assert (found.low.item(), found.high.item(), found.outcome) == (0.6, 1.2, "no_signal")
    assert math.isnan(found.positive_share.item())


def test_a_token_of_negative_weight_is_dropped_and_one_of_weight_zero_is_ignored() -> None:
    log_ratio, advantages = tensor([2, 1, 1, 1]).log(), tensor([1, -2, 5, -5])
    found = find_clip_bounds(log_ratio, advantages, PAPER, weights=tensor([1, 1, -1, 0]))
    alone = find_clip_bounds(log_ratio[:2], advantages[:2], PAPER)
    assert (found.moves, found.positive_share) == (alone.moves, alone.positive_share)


def test_inputs_of_unequal_length_are_refused() -> None:
    with pytest.raises(AssertionError, match="one value per token"):
        find_clip_bounds(tensor([0, 0]), tensor([1]), PAPER)


def test_inputs_are_not_modified() -> None:
    log_ratio, advantages, weights = tensor([-30, 0, 1]), tensor([-1, 2, -3]), tensor([1, 2, 3])
    before = [t.clone() for t in (log_ratio, advantages, weights)]
    find_clip_bounds(log_ratio, advantages, PAPER, mask=torch.tensor([True, False, True]), weights=weights)
    assert all(map(torch.equal, before, (log_ratio, advantages, weights)))


def test_inputs_that_require_gradients_give_detached_bounds() -> None:
    found = find_clip_bounds(tensor([0, 0]).requires_grad_(), tensor([1, -1]), PAPER)
    assert not found.high.requires_grad


def test_no_token_on_this_rank_still_takes_part_in_the_reduction() -> None:
    filled = [Token(2.0, 1.0, 1.0, True), Token(1.0, -2.0, 1.0, True)]
    found = search_in_shards([filled, []], PAPER)
    assert (found.low.item(), found.high.item(), found.outcome) == (0.6, 1.35, "interior")


def test_unusable_tokens_of_every_rank_and_chunk_change_no_bound() -> None:
    usable = [Token(2.0, 1.0, 1.0, True), Token(1.0, -2.0, 1.0, True)]
    bad = [Token(math.nan, 1.0, 1.0, True), Token(1.0, math.inf, 1.0, True), Token(math.nan, 1.0, 1.0, False)]
    assert values(search_in_shards([usable + bad, bad, []], PAPER)) == values(search(usable, PAPER))
    log_ratio, advantages = torch.linspace(-1, 1, 300_000), torch.ones(300_000)
    log_ratio[[0, 150_000, 299_999]], advantages[::2] = math.nan, -1.0
    usable_T = ~log_ratio.isnan()
    expected = find_clip_bounds(log_ratio[usable_T], advantages[usable_T], PAPER)
    assert values(find_clip_bounds(log_ratio, advantages, PAPER)) == values(expected)


@pytest.mark.parametrize("num_tokens", [1, 131_071, 131_072, 131_073, 262_144])
@pytest.mark.parametrize("contribution", ["value", "gradient"])
def test_sums_are_correct_at_chunk_boundaries(num_tokens: int, contribution: Any) -> None:
    generator = torch.Generator().manual_seed(num_tokens)
    log_ratio = torch.randn(num_tokens, generator=generator, dtype=torch.float64) * 0.4
    advantages = torch.randn(num_tokens, generator=generator, dtype=torch.float64)
    weights, mask = torch.rand(num_tokens, generator=generator), torch.rand(num_tokens, generator=generator) < 0.9
    settings = ClipBoundsSettings(positive_contribution_target=0.9, contribution=contribution)
    found = find_clip_bounds(log_ratio, advantages, settings, mask=mask, weights=weights)
    ratio, terms = log_ratio.exp(), advantages * weights * mask
    if contribution == "value":
        positive = terms.clamp(min=0) * ratio.clamp(max=found.high)
        negative = -terms.clamp(max=0) * ratio.clamp(min=found.low)
    else:
        positive = terms.clamp(min=0) * ratio * (ratio < found.high)
        negative = -terms.clamp(max=0) * ratio * (ratio > found.low)
    assert found.positive_sum.item() == pytest.approx(positive.sum().item(), rel=1e-11)
    assert found.negative_sum.item() == pytest.approx(negative.sum().item(), rel=1e-11)


class HostReads(TorchFunctionMode):
    """Records the operations that make the host wait for a GPU, up to the copy of the result to the host."""

    WAITING = ("cpu", "item", "tolist", "numpy", "nonzero", "__bool__", "__int__", "__float__", "__index__", "equal")

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name in self.WAITING and "cpu" not in self.names:
            self.names.append(name)
        # Indexing with a mask needs the number of selected elements on the host.
        if name == "__getitem__" and isinstance(args[1], torch.Tensor) and "cpu" not in self.names:
            self.names.append(name)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("contribution", ["value", "gradient"])
def test_the_host_waits_for_one_result(contribution: Any) -> None:
    inputs = torch.randn(200_000), torch.randn(200_000)
    settings = ClipBoundsSettings(contribution=contribution)
    with HostReads() as reads:
        find_clip_bounds(*inputs, settings, mask=torch.ones(200_000), weights=torch.ones(200_000))
    assert reads.names == ["cpu"]


def test_new_bounds_do_not_recompile_the_loss() -> None:
    num_compiled = 0

    def count(module: Any, _inputs: Any) -> Any:
        nonlocal num_compiled
        num_compiled += 1
        return module.forward

    compiled = torch.compile(policy_loss, backend=count, fullgraph=True)
    weights, seen, settings = torch.ones(2), set(), AlgorithmConfig()
    for ratio in (1.3, 1.6, 2.0, 2.5):
        log_probs, advantages = tensor([ratio, 1], torch.float32).log(), torch.tensor([1.0, -2.0])
        found = find_clip_bounds(log_probs, advantages, PAPER)
        seen.add((found.low.item(), found.high.item()))
        tokens = LossTokens(torch.zeros(2), advantages, weights)
        compiled(log_probs, torch.zeros(2), tokens, found.low.float(), found.high.float(), settings)
    assert len(seen) > 1
    assert num_compiled == 1
