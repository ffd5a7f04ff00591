from dataclasses import replace

import numpy as np
import pytest
import torch

from megatron_bapo.config.padding import PaddingRule, padding_rule
from megatron_bapo.kept_tokens import kept_tokens_of
from megatron_bapo.parallel.groups import Axis
from megatron_bapo.records import Trajectory, VersionSpan
from megatron_bapo.trainer.micro_batches import Example, MicroBatch, to_micro_batch

CPU = torch.device("cpu")


def example(prompt: list[int], response: list[int], advantage: float = 1.0, weight: float = 1.0) -> Example:
    """Create an example whose behaviour log-probs identify their tokens."""
    trajectory = Trajectory(
        prompt_token_ids=np.array(prompt, np.int32),
        response_token_ids=np.array(response, np.int32),
        behaviour_log_probs=-np.array(response, np.float32) / 1000,
        version_spans=(VersionSpan(0, len(response)),),
        finish_reason="stop",
        text="",
    )
    return Example(trajectory, advantage, weight)


EXAMPLES = [
    example([1, 2, 3], [10, 11], advantage=0.5, weight=0.1),
    example([4], [20, 21, 22], advantage=-1.0, weight=0.2),
    example([5, 6], [30], advantage=2.0, weight=0.3),
]


def lay_out(rule: PaddingRule, examples: list[Example] = EXAMPLES, rank: int = 0, size: int = 1) -> MicroBatch:
    return to_micro_batch(examples, rule, Axis(None, rank, size), CPU)  # pyright: ignore[reportArgumentType]


def triples(batch: MicroBatch) -> set[tuple[int, ...]]:
    """Return (token, label, position) of every token."""
    columns = torch.stack([batch.tokens_T, batch.labels_T, batch.packed.positions_T], dim=1)
    return {tuple(row) for row in columns.tolist()}


def test_every_label_is_the_next_token_of_the_same_sequence():
    batch = lay_out(PaddingRule())

    assert batch.tokens_T.tolist() == [1, 2, 3, 10, 4, 20, 21, 5, 6]
    assert batch.labels_T.tolist() == [2, 3, 10, 11, 20, 21, 22, 6, 30]
    assert batch.packed.positions_T.tolist() == [0, 1, 2, 3, 0, 1, 2, 0, 1]


@pytest.mark.parametrize(
    "rule", [PaddingRule(), PaddingRule(1, 4), PaddingRule(4, 8), PaddingRule(equal_lengths=True)], ids=str
)
def test_response_positions_point_at_the_hidden_states_that_predict_response_tokens(rule: PaddingRule):
    batch = lay_out(rule)

    assert batch.labels_T[batch.response_positions_N].tolist() == [10, 11, 20, 21, 22, 30]
    assert batch.tokens_T[batch.response_positions_N].tolist() == [3, 10, 4, 20, 21, 6]
    assert batch.response_index_N.tolist() == list(range(6))
    assert len(batch.tokens_T) == len(batch.labels_T) == len(batch.packed.positions_T) == rule.allocated([4, 3, 2])


@pytest.mark.parametrize("rule", [PaddingRule(), PaddingRule(1, 4)], ids=str)
def test_examples_of_a_group_share_all_but_the_last_token_of_their_prompt(rule: PaddingRule):
    group = [replace(example([1, 2, 3], response), group=7) for response in ([10, 11], [20], [30, 31, 32])]
    batch = to_micro_batch([group[0], EXAMPLES[1], *group[1:]], rule, Axis(None, 0, 1), CPU, True)  # pyright: ignore[reportArgumentType]

    tokens = [1, 2, 3, 10, 4, 20, 21, 3, 3, 30, 31]
    padding = [0] * (rule.allocated([len(tokens)]) - len(tokens))
    assert batch.tokens_T.tolist() == tokens + padding
    assert batch.packed.positions_T.tolist()[: len(tokens)] == [0, 1, 2, 3, 0, 1, 2, 2, 2, 3, 4]
    assert batch.tokens_T[batch.response_positions_N].tolist() == [3, 10, 4, 20, 21, 3, 3, 30, 31]
    assert batch.labels_T[batch.response_positions_N].tolist() == [10, 11, 20, 21, 22, 20, 30, 31, 32]
    assert batch.response_positions_N.unique().numel() == batch.response_positions_N.numel()


def test_log_probs_advantages_and_weights_are_aligned_with_their_tokens():
    batch = lay_out(PaddingRule(1, 4))

    labels_N = batch.labels_T[batch.response_positions_N]
    torch.testing.assert_close(batch.behaviour_log_probs_N, -labels_N / 1000)
    assert batch.advantages_N.tolist() == [0.5, 0.5, -1.0, -1.0, -1.0, 2.0]
    torch.testing.assert_close(batch.weights_N, torch.tensor([0.1, 0.1, 0.2, 0.2, 0.2, 0.3]))


def test_per_token_values_follow_their_tokens_over_packing_and_the_context_split():
    arrays = [np.arange(n, dtype=np.float32) + 10 * i for i, n in enumerate((2, 3, 1))]
    examples = [
        replace(e, advantage=a, proximal_log_probs=-a, reference_log_probs=a / 2, correction_weights=a + 1)
        for e, a in zip(EXAMPLES, arrays, strict=True)
    ]
    rule = padding_rule(1, 2, sequence_parallel=False, fp8_multiple=None, packing=True)
    parts = [lay_out(rule, examples, rank, 2) for rank in range(2)]
    index_N = torch.cat([part.response_index_N for part in parts])
    expected_N = torch.from_numpy(np.concatenate(arrays))[index_N]

    def held(name: str) -> torch.Tensor:
        return torch.cat([getattr(part, name) for part in parts])

    torch.testing.assert_close(held("advantages_N"), expected_N)
    torch.testing.assert_close(held("behaviour_log_probs_N"), -expected_N)
    torch.testing.assert_close(held("rollout_log_probs_N"), -torch.tensor([10, 11, 20, 21, 22, 30])[index_N] / 1000)
    torch.testing.assert_close(held("reference_log_probs_N"), expected_N / 2)
    torch.testing.assert_close(held("corrections_N"), expected_N + 1)
    assert held("sequence_index_N").tolist() == torch.tensor([0, 0, 1, 1, 1, 2])[index_N].tolist()
    assert {part.num_sequences for part in parts} == {3}


def test_without_a_reference_or_a_correction_the_values_are_neutral():
    batch = lay_out(PaddingRule())

    assert batch.reference_log_probs_N.isnan().all()
    assert batch.corrections_N.tolist() == [1.0] * 6
    assert torch.equal(batch.rollout_log_probs_N, batch.behaviour_log_probs_N)


@pytest.mark.parametrize("size", [2, 3, 4])
def test_context_parallel_ranks_have_every_response_token_once_with_the_label_of_the_whole_sequence(size: int):
    """Compare with the whole sequence; labels that are shifted after the split would be wrong at every chunk end."""
    rule = padding_rule(1, size, sequence_parallel=False, fp8_multiple=None, packing=True)
    whole, parts = lay_out(rule), [lay_out(rule, rank=rank, size=size) for rank in range(size)]

    assert len({len(part.tokens_T) for part in parts}) == 1
    assert all(triples(part) <= triples(whole) for part in parts)
    index = torch.cat([part.response_index_N for part in parts])
    labels = torch.cat([part.labels_T[part.response_positions_N] for part in parts])
    weights = torch.cat([part.weights_N for part in parts])
    assert sorted(index.tolist()) == list(range(6))
    assert labels[index.argsort()].tolist() == [10, 11, 20, 21, 22, 30]
    assert torch.equal(weights[index.argsort()], whole.weights_N)


@pytest.mark.parametrize("size", [1, 2])
def test_an_environments_tokens_are_context_and_never_labels(size: int):
    """Use tokens 51 and 52 as an environment reply, which the model reads but does not train on."""
    turns = example([1, 2], [40, 41, 51, 52, 42])
    mask = np.array([True, True, False, False, True])
    log_probs = turns.trajectory.behaviour_log_probs[mask]
    spans = (VersionSpan(0, 3),)
    masked = replace(turns.trajectory, loss_mask=mask, behaviour_log_probs=log_probs, version_spans=spans)
    examples = [EXAMPLES[0], replace(turns, trajectory=masked, advantage=np.array([1.0, 2.0, 3.0])), EXAMPLES[2]]
    rule = padding_rule(1, size, sequence_parallel=False, fp8_multiple=None, packing=True)
    parts = [lay_out(rule, examples, rank, size) for rank in range(size)]

    index_N = torch.cat([part.response_index_N for part in parts]).argsort()
    held = {
        name: torch.cat([getattr(part, name) for part in parts])[index_N]
        for name in ("behaviour_log_probs_N", "advantages_N", "sequence_index_N")
    }
    labels = torch.cat([part.labels_T[part.response_positions_N] for part in parts])[index_N]
    inputs = torch.cat([part.tokens_T[part.response_positions_N] for part in parts])[index_N]
    assert labels.tolist() == [10, 11, 40, 41, 42, 30]
    assert inputs.tolist() == [3, 10, 2, 40, 52, 6]
    torch.testing.assert_close(held["behaviour_log_probs_N"], -labels / 1000)
    assert held["advantages_N"].tolist() == [0.5, 0.5, 1.0, 2.0, 3.0, 2.0]
    assert held["sequence_index_N"].tolist() == [0, 0, 1, 1, 1, 2]
    assert {51, 52} <= {token for part in parts for token in part.tokens_T.tolist()}


def with_kept_tokens(given: Example) -> Example:
    """Return the example with a set of one to three tokens for each sampled one, among them the token itself."""
    sampled = given.trajectory.response_token_ids[given.trajectory.sampled_positions].tolist()
    sets = [[token + 100 * i for i in range(1 + token % 3)] for token in sampled]
    return replace(given, trajectory=replace(given.trajectory, kept_tokens=kept_tokens_of(sampled, sets)))


@pytest.mark.parametrize("size", [1, 2, 4])
def test_kept_tokens_are_in_host_memory_and_follow_their_tokens(size: int):
    """They follow through the context split, packing, a shared prompt, and a response with an environment's tokens."""
    turns = example([4], [20, 51, 22]).trajectory
    mask = np.array([True, False, True])
    masked = replace(turns, loss_mask=mask, behaviour_log_probs=turns.behaviour_log_probs[mask])
    examples = [EXAMPLES[0], Example(masked, 1.0, 1.0), replace(EXAMPLES[1], group=0), replace(EXAMPLES[1], group=0)]
    rule = padding_rule(1, size, sequence_parallel=False, fp8_multiple=None, packing=True)
    num = 0
    for rank in range(size):
        batch = to_micro_batch([*map(with_kept_tokens, examples)], rule, Axis(None, rank, size), CPU, size == 1)  # pyright: ignore[reportArgumentType]
        labels = batch.labels_T[batch.response_positions_N].tolist()
        assert batch.kept is not None
        assert isinstance(batch.kept.token_ids_M, np.ndarray)
        found = np.split(batch.kept.token_ids_M, np.cumsum(batch.kept.sizes_T))[:-1]
        assert [each.tolist() for each in found] == [[t + 100 * i for i in range(1 + t % 3)] for t in labels]
        num += len(found)
    assert num == 10
    assert lay_out(rule, []).kept is None


def test_kept_tokens_of_some_examples_only_are_refused():
    for examples in (EXAMPLES[:1], [with_kept_tokens(EXAMPLES[0])]):
        with pytest.raises(AssertionError, match="all examples of a micro-batch have kept tokens, or none has"):
            lay_out(PaddingRule(), [*examples, EXAMPLES[1], with_kept_tokens(EXAMPLES[2])])


def test_without_examples_a_micro_batch_is_padding_without_a_response():
    batch = lay_out(PaddingRule(4, 8), examples=[], rank=1, size=2)

    assert len(batch.tokens_T) == 4
    assert len(batch.response_positions_N) == len(batch.weights_N) == 0


def test_a_one_token_prompt_with_a_one_token_response_is_one_input_token():
    batch = lay_out(PaddingRule(), [example([7], [8])])

    assert (batch.tokens_T.tolist(), batch.labels_T.tolist()) == ([7], [8])
    assert batch.response_positions_N.tolist() == [0]
