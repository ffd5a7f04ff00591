import pytest

from megatron_bapo.config.reward import RewardConfig
from megatron_bapo.errors import UserError
from megatron_bapo.records import Prompt
from megatron_bapo.rewards.ground_truths import check_ground_truths

NEVER_CALLED = RewardConfig(type="function", function="never.called:score")


def prompts(*ground_truths: str) -> list[Prompt]:
    messages = ({"role": "user", "content": "?"},)
    return [Prompt(f"train:{index}", messages, text, "math", {}) for index, text in enumerate(ground_truths)]


@pytest.mark.slow
def test_ground_truths_that_math_verify_reads_pass() -> None:
    check_ground_truths(RewardConfig(), prompts("42", "\\frac{1}{2}", '["18", "77"]', "[1,2)", "42"))


@pytest.mark.slow
def test_the_first_unreadable_ground_truth_is_named_and_all_are_counted() -> None:
    with pytest.raises(UserError) as refused:
        check_ground_truths(RewardConfig(), prompts("42", " ", "", "7", " "))
    message = str(refused.value)
    assert "cannot read 3 of 5 ground truths" in message
    assert "prompt train:1" in message
    assert "no number or formula in the ground truth ' '" in message
    assert "\n" not in message


def test_other_rewards_are_not_called() -> None:
    check_ground_truths(NEVER_CALLED, prompts(""))


def test_the_tests_of_programs_are_read_and_no_program_runs() -> None:
    config = RewardConfig(type="code")
    good = '{"inputs": ["1"], "outputs": ["2"]}'
    check_ground_truths(config, prompts(good, good))
    check_ground_truths(config, prompts(good, "[]"), allowed=1)
    with pytest.raises(UserError, match=r"reward\.type=code cannot read 2 of 3 .* prompt train:1, .* write them as \{"):
        check_ground_truths(config, prompts(good, "[]", "42"))
