from dataclasses import astuple

import numpy as np
import pytest

from megatron_bapo.simulation.engine_costs import COSTS, MeasuredDecode, Observations, fitted, observed, schedule


def literal_schedule(
    requests: list[tuple[int, list[int]]], max_num_seqs: int, *, shares_prompts: bool
) -> list[tuple[int, int, int, int]]:
    """Compute the schedule step by step."""
    waiting = [
        (request, length, 0 if shares_prompts and i > 0 else prompt)
        for request, (prompt, lengths) in enumerate(requests)
        for i, length in enumerate(lengths)
    ]
    running: list[list[int]] = []
    left, done = [len(lengths) for _, lengths in requests], {}
    taken = steps = answer_steps = reads = 0
    while waiting or running:
        while waiting and len(running) < max_num_seqs:
            running.append([*waiting.pop(0)])
            taken += 1
        steps, answer_steps = steps + 1, answer_steps + len(running)
        for answer in running:
            reads += answer[2]
            answer[1] -= 1
            answer[2] += 1
            left[answer[0]] -= answer[1] == 0
        running = [answer for answer in running if answer[1]]
        done |= {r: (taken, steps, answer_steps, reads) for r, num in enumerate(left) if num == 0 and r not in done}
    return [done[request] for request in range(len(requests))]


@pytest.mark.parametrize("shares_prompts", [True, False])
@pytest.mark.parametrize("max_num_seqs", [1, 3, 4, 100])
def test_the_work_done_when_each_request_ends_follows_from_the_lengths(max_num_seqs: int, shares_prompts: bool):
    lengths = np.random.default_rng(0).integers(1, 30, (6, 2)).tolist()
    requests = [(5 + i, each) for i, each in enumerate(lengths)]

    expected = literal_schedule(requests, max_num_seqs, shares_prompts=shares_prompts)
    assert schedule(requests, max_num_seqs, shares_prompts=shares_prompts) == expected


def test_measured_steps_cost_the_sum_of_single_steps():
    decode = MeasuredDecode(overhead=1.0, per_sequence=0.1, per_token=0.01)

    expected = sum(1.0 + 0.1 * 3 + 0.01 * (50 + 3 * step) for step in range(7))
    assert decode.seconds(7, 3, 50) == pytest.approx(expected)


def test_only_requests_before_the_first_late_arrival_are_observed():
    def request(sent_s: float, answered_s: float, *num_tokens: int) -> dict[str, object]:
        answers = {"num_prompt_tokens": 5, "num_tokens": num_tokens}
        return {"step": 2, "engine": "engine 0", "sent_s": sent_s, "answered_s": answered_s, **answers}

    found = observed([request(10.0, 12.0, 3), request(10.1, 15.0, 9), request(13.0, 20.0, 9)], 8)

    assert found.units_RC.tolist() == [[2.0, 3.0, 6.0, 5 + 6 + 7 + 5 + 6 + 7]]
    assert found.seconds_R.tolist() == [2.0]


def test_costs_are_recovered_from_noise_within_their_errors():
    rng, true = np.random.default_rng(0), np.array([0.002, 0.003, 0.0001, 1e-7])
    lengths = np.ceil(rng.exponential(300, (30, 8, 4))).astype(int).tolist()
    batches = [schedule([(8, each) for each in batch], 256) for batch in lengths]
    units = np.array(batches, float).reshape(-1, len(COSTS))
    batch = np.repeat(np.arange(30), 8)
    seconds = (units @ true) * (1 + rng.normal(0, 0.05, 30))[batch]

    costs = fitted([Observations(units, seconds, batch)])

    found = np.array([costs.sequence_s, *astuple(costs.decode)])
    off = np.abs(found - true) * units.mean(0) / seconds.mean()
    assert (off < 3 * np.array([*costs.errors.values()])).all()
    assert costs.decode.overhead == pytest.approx(0.003, rel=0.05)
    assert costs.max_sequences == 32


def test_no_cost_is_negative():
    steps, answers = np.array([10.0, 20.0, 40.0]), np.array([80.0, 120.0, 150.0])
    units = np.stack([np.full(3, 8.0), steps, answers, 1000.0 * steps], 1)

    costs = fitted([Observations(units, np.array([0.5, 1.5, 3.5]), np.array([0, 0, 1]))])

    assert min(costs.sequence_s, *astuple(costs.decode)) == 0.0
