import numpy as np
import pytest

from megatron_bapo.errors import ProbeFailed
from megatron_bapo.rollout.messages import SequenceScore
from megatron_bapo.rollout.weight_probe import WeightProbe

OURS = np.array([-1.0, -2.0, -3.0], np.float32)
PROBE = WeightProbe(7, np.arange(4, dtype=np.int32), OURS, tolerance=0.01)


def test_an_engine_with_the_trainers_weights_passes():
    found = PROBE.difference("engine 0", SequenceScore(7, OURS + np.array([0.003, 0.004, 0.0], np.float32)))
    assert found.largest == pytest.approx(0.004, rel=1e-3)
    assert found.rms == pytest.approx(0.005 / 3**0.5, rel=1e-3)


def test_rounding_of_one_improbable_token_passes_and_a_wrong_row_of_the_embedding_does_not():
    """One of 31 tokens differs; in bfloat16 rounding was seen to change one by 0.36 nats."""
    ours = np.full(31, -2.0, np.float32)
    probe = WeightProbe(7, np.arange(32, dtype=np.int32), ours, tolerance=0.2)
    one = np.eye(31, dtype=np.float32)[20]
    assert probe.difference("engine 0", SequenceScore(7, ours - 0.5 * one)).largest == pytest.approx(0.5)
    with pytest.raises(ProbeFailed, match=r"token 21 .* -4.000000, the trainer -2.000000; all tokens are 0.36 nats"):
        probe.difference("engine 0", SequenceScore(7, ours - 2.0 * one))


DECODING = WeightProbe(7, np.arange(4, dtype=np.int32), OURS, tolerance=0.01, num_decoded=3)


def test_an_engine_that_decodes_and_prefills_with_the_same_log_probs_passes():
    score = SequenceScore(7, OURS + np.float32(0.001), OURS + np.float32(0.005), OURS)
    assert DECODING.difference("engine 0", score) == pytest.approx((0.005, 0.005), rel=1e-3)


@pytest.mark.parametrize("fault", [np.array([0, 0, 0.02], np.float32), np.array([0, 0, np.nan], np.float32)])
def test_a_fault_in_the_decode_path_alone_is_found(fault: np.ndarray):
    score = SequenceScore(7, OURS, OURS - fault, OURS)
    message = (
        r"engine 0 samples token 3 after the probe .* the same token -3.000000 by prefill; .* decoding is at fault"
    )
    with pytest.raises(ProbeFailed, match=message):
        DECODING.difference("engine 0", score)


@pytest.mark.parametrize(
    ("score", "message"),
    [
        (SequenceScore(6, OURS), "engine 0 serves policy version 6; the trainer published 7"),
        (
            SequenceScore(7, OURS - [0, 0.02, 0]),
            r"token 2 .* -2.020000, the trainer -2.000000; .* 0.012 nats .*is 0.01",
        ),
        (SequenceScore(7, OURS * np.nan), "token 1 of the probe a log-prob of nan"),
    ],
)
def test_another_version_and_other_weights_are_named(score: SequenceScore, message: str):
    with pytest.raises(ProbeFailed, match=message):
        PROBE.difference("engine 0", score)
