from itertools import pairwise

import numpy as np
import pytest
import torch

from megatron_bapo.errors import UserError
from megatron_bapo.records import Trajectory, VersionSpan
from megatron_bapo.trainer.micro_batches import Example, MicroBatch, to_micro_batch, to_micro_batches

CPU = torch.device("cpu")


def example(prompt: list[int], response: list[int], advantage: float = 1.0, weight: float = 1.0) -> Example:
    """An example whose behaviour log-probs name the tokens they belong to."""
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


def sequences(batch: MicroBatch) -> list[tuple[list[int], ...]]:
    """(tokens, labels, positions) of each packed sequence."""
    bounds = batch.packed.cu_seqlens_q.tolist()
    columns = (batch.tokens_T, batch.labels_T, batch.positions_T)
    return [tuple(x[start:end].tolist() for x in columns) for start, end in pairwise(bounds)]


def test_every_label_is_the_next_token_of_the_same_sequence():
    assert sequences(to_micro_batch(EXAMPLES, 1, CPU)) == [
        ([1, 2, 3, 10], [2, 3, 10, 11], [0, 1, 2, 3]),
        ([4, 20, 21], [20, 21, 22], [0, 1, 2]),
        ([5, 6], [6, 30], [0, 1]),
    ]


@pytest.mark.parametrize("multiple_of", [1, 4, 8])
def test_response_positions_point_at_the_logits_that_predict_response_tokens(multiple_of):
    batch = to_micro_batch(EXAMPLES, multiple_of, CPU)

    assert batch.labels_T[batch.response_positions_N].tolist() == [10, 11, 20, 21, 22, 30]
    assert batch.tokens_T[batch.response_positions_N].tolist() == [3, 10, 4, 20, 21, 6]


def test_log_probs_advantages_and_weights_stand_beside_their_tokens():
    batch = to_micro_batch(EXAMPLES, 4, CPU)

    labels_N = batch.labels_T[batch.response_positions_N]
    torch.testing.assert_close(batch.behaviour_log_probs_N, -labels_N / 1000)
    assert batch.advantages_N.tolist() == [0.5, 0.5, -1.0, -1.0, -1.0, 2.0]
    torch.testing.assert_close(batch.weights_N, torch.tensor([0.1, 0.1, 0.2, 0.2, 0.2, 0.3]))


def test_padding_is_a_sequence_of_its_own_that_carries_no_label():
    plain, padded = (to_micro_batch(EXAMPLES, multiple_of, CPU) for multiple_of in (1, 8))

    assert len(plain.tokens_T) == 9
    assert len(padded.tokens_T) == len(padded.labels_T) == len(padded.positions_T) == 16
    assert sequences(padded)[:3] == sequences(plain)
    assert torch.equal(padded.response_positions_N, plain.response_positions_N)
    assert padded.packed.max_seqlen_q == 7


def test_a_total_that_fits_gets_no_padding():
    assert len(sequences(to_micro_batch(EXAMPLES, 3, CPU))) == len(EXAMPLES)


def test_a_one_token_prompt_with_a_one_token_answer_is_one_input_token():
    batch = to_micro_batch([example([7], [8])], 1, CPU)

    assert sequences(batch) == [([7], [8], [0])]
    assert batch.response_positions_N.tolist() == [0]


@pytest.mark.parametrize("data_size", [1, 2, 3])
def test_the_ranks_share_every_example_once_in_equally_many_micro_batches(data_size):
    rng = np.random.default_rng(0)
    examples = [example([1] * int(rng.integers(1, 9)), [100 + i] * int(rng.integers(1, 9))) for i in range(12)]

    ranks = [
        to_micro_batches(examples, max_tokens=20, data_rank=rank, data_size=data_size, multiple_of=2, device=CPU)
        for rank in range(data_size)
    ]

    assert len({len(batches) for batches in ranks}) == 1
    assert all(len(batch.tokens_T) <= 20 for batches in ranks for batch in batches)
    labels = torch.cat([b.labels_T[b.response_positions_N] for batches in ranks for b in batches]).tolist()
    assert sorted(labels) == sorted(token for e in examples for token in e.trajectory.response_token_ids.tolist())


def test_a_trajectory_over_the_token_budget_names_the_setting():
    with pytest.raises(UserError, match=r"trainer\.max_tokens_per_gpu"):
        to_micro_batches(EXAMPLES, max_tokens=3, data_rank=0, data_size=1, multiple_of=1, device=CPU)
