from itertools import pairwise

import numpy as np

from megatron_bapo.kept_tokens import kept_tokens_of
from megatron_bapo.rollout.messages import Completion, Generated
from megatron_bapo.rollout.partial_output import PartialCompletion, PartialOutput


def report(*token_ids: list[int], version: int = 3, after: tuple[int, ...] = ()) -> Generated:
    """Return a report of new tokens for each completion; `after` are the numbers of tokens in earlier reports."""
    completions = (
        Completion(np.array(each, np.int32), -np.array(each, np.float32), "abort", "", num_before)
        for each, num_before in zip(token_ids, after or (0,) * len(token_ids), strict=True)
    )
    return Generated(version, tuple(completions))


def tokens(generated: Generated | None) -> list[list[int]]:
    assert generated is not None
    for completion in generated.completions:
        assert completion.log_probs.tolist() == [-token for token in completion.token_ids.tolist()]
        assert (completion.token_ids.dtype, completion.log_probs.dtype) == (np.int32, np.float32)
    return [completion.token_ids.tolist() for completion in generated.completions]


def test_reports_are_joined_by_completion():
    output = PartialOutput()
    for i in range(100):
        output.extend(report([2 * i, 2 * i + 1], [] if i % 3 else [i], after=(2 * i, (i + 2) // 3)))
    found = output.generated()

    assert tokens(found) == [[*range(200)], [*range(0, 100, 3)]]
    assert found is not None
    assert found.policy_version == 3


def test_without_tokens_there_is_no_output():
    output = PartialOutput()
    assert output.generated() is None
    output.extend(report([], []))
    assert output.generated() is None


def test_what_was_returned_does_not_change_with_later_reports_and_is_not_copied():
    output, seen = PartialOutput(), []
    for i in range(200):
        output.extend(report([i], after=(i,)))
        seen.append(output.generated())

    assert [tokens(each) for each in seen] == [[[*range(i + 1)]] for i in range(200)]
    shared = sum(
        np.shares_memory(a.completions[0].token_ids, b.completions[0].token_ids)
        for a, b in pairwise(seen)
        if a is not None and b is not None
    )
    assert shared > 150


def test_the_completions_of_a_request_are_in_one_block_of_memory():
    output = PartialOutput()
    for i in range(100):
        output.extend(report([i], [-i], after=(i, i)))
    generated = output.generated()
    assert generated is not None
    bases = {id(array.base) for each in generated.completions for array in (each.token_ids, each.log_probs)}

    assert len(bases) == 1
    assert tokens(generated) == [[*range(100)], [-i for i in range(100)]]


def test_a_report_that_does_not_continue_the_others_is_ignored_and_one_from_the_start_replaces_them():
    output = PartialOutput()
    output.extend(report([1, 2]))
    output.extend(report([5], after=(4,)))
    assert tokens(output.generated()) == [[1, 2]]
    output.extend(report([3], after=(2,)))
    assert tokens(output.generated()) == [[1, 2, 3]]
    output.extend(report([7], version=4))
    found = output.generated()
    assert tokens(found) == [[7]]
    assert found is not None
    assert found.policy_version == 4


def test_kept_tokens_are_reported_with_their_tokens():
    """A part has those of the tokens since its start, however they were reported; what was returned never changes."""
    output, engine, seen = PartialOutput(), PartialCompletion(), list[np.ndarray]()
    for i in range(100):
        engine.extend([i], [-1.0], "abort", kept_tokens_of([i], [{i, 1000 + i}]))
        if i % 3 == 2:
            delta = engine.completion(i - 2, 2 * (i - 2))
            assert delta.kept_tokens is not None
            assert delta.kept_tokens.tolist() == [value for k in (i - 2, i - 1, i) for value in (~k, 1000 + k)]
            output.extend(Generated(3, (delta,)))
            found = output.generated()
            assert found is not None
            assert found.completions[0].kept_tokens is not None
            seen.append(found.completions[0].kept_tokens)
    assert [each.tolist() for each in seen] == [
        [value for k in range(3 * i) for value in (~k, 1000 + k)] for i in range(1, 34)
    ]
    assert engine.completion(100, engine.num_kept).kept_tokens is None
