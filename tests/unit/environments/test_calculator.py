import time
from contextlib import suppress
from pathlib import Path

import pytest

from megatron_bapo.config.loading import load_config
from megatron_bapo.data.prompts import load_prompts
from megatron_bapo.environments.calculator import calculate, demonstration, longest_expression, reply
from megatron_bapo.functions.user_function import load
from megatron_bapo.rewards.scorer import reward_target


def answer(content: str) -> str | None:
    messages = [{"role": "user", "content": "<calculator>1</calculator>"}, {"role": "assistant", "content": content}]
    return reply(messages, "d", "42")


@pytest.mark.parametrize(
    ("expression", "result"),
    [
        ("(3 + 4) * 6", "42"),
        ("7/2", "3.5"),
        ("0.1 + 0.2", "0.3"),
        ("-7 // 2", "-4"),
        ("-7 % 3", "2"),
        ("2 ** 10 - +1", "1023"),
        ("2 ** -1", "0.5"),
        ("1 / 3", "0.333333333333"),
        ("12345678901234567890 * 2", "24691357802469135780"),
        (" 1e3\n", "1000"),
        ("1 / 0", "error: division by zero"),
        ("0 ** -1", "error: division by zero"),
        ("4 ** 0.5", "error: exponents must be whole numbers"),
        ("2 +", "error: not an arithmetic expression"),
        ("", "error: not an arithmetic expression"),
        ("\x00", "error: not an arithmetic expression"),
        ("1 + True", "error: only numbers, + - * / // % ** and parentheses"),
        ("1 if 2 else 3", "error: only numbers, + - * / // % ** and parentheses"),
        ("'a' * 3", "error: only numbers, + - * / // % ** and parentheses"),
        ("2j", "error: only numbers, + - * / // % ** and parentheses"),
        ("9 ** 9 ** 9", "error: number too large"),
        ("1e400", "error: number too large"),
        ("*".join(["9 ** 600"] * 15), "error: number too large"),
        ("1" * 201, "error: more than 200 characters"),
        ("(" * 100 + "1" + ")" * 99, "error: not an arithmetic expression"),
    ],
)
def test_expressions_have_exact_results_or_an_error_text(expression, result):
    started = time.process_time()
    assert answer(f"Let me see: <calculator>{expression}</calculator>") == result
    assert time.process_time() - started < 1.0


@pytest.mark.parametrize("unit", ["<calculator>", "<calculator>1 + 1", "</calculator>", "<", "(", "1 ", "+(", "1("])
@pytest.mark.parametrize("function", [reply, demonstration])
def test_time_grows_no_faster_than_the_length_of_a_message(function, unit):
    """20 times the length takes about 20 times as long; a quadratic search would take 400 times as long."""

    def cpu_s(num_characters: int) -> float:
        content = unit * (num_characters // len(unit))
        durations = []
        for _ in range(3):
            start = time.process_time()
            with suppress(ValueError):
                function([{"role": "user", "content": content}], "d", "42")
            durations.append(time.process_time() - start)
        return min(durations)

    cpu_s(1000)
    assert cpu_s(60_000) < 80 * max(cpu_s(3000), 0.001)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("What is (3 + 4) * 2?", "(3 + 4) * 2"),
        ("12 and 3 + 45 and 6", "3 + 45"),
        ("-7 + (2 - 1) - ", "7 + (2 - 1)"),
        ("1", ""),
        (") + 1", ""),
        (".)", ""),
        ("no number", ""),
        ("\u0661\u0662 +\u00a0\u0663", "\u0661\u0662 +\u00a0\u0663"),
    ],
)
def test_the_longest_expression_of_a_message_is_found(text, found):
    assert longest_expression(text) == found


@pytest.mark.parametrize(
    "expression", ["__import__('os').getcwd()", "(1).__class__", "print(1)", "[1 for _ in (1,)]", "x", "f'{1}'"]
)
def test_no_expression_is_executed(expression):
    with pytest.raises(ValueError, match="only numbers"):
        calculate(expression)


def test_the_last_call_of_the_last_message_counts_and_no_call_ends_the_response():
    assert answer("<calculator>1</calculator> or <calculator>2</calculator>") == "2"
    assert answer("It is 42.") is None
    assert answer("<calculator>1") is None


def test_the_example_run_demonstrates_valid_calls_and_rewards_their_results():
    config = load_config(Path(__file__).parents[3] / "configs/calculator_tool.yaml")
    assert config.environment is not None
    assert config.environment.type == "calculator"
    assert config.data.system_prompt is not None
    assert answer(config.data.system_prompt) == "42"
    assert config.warm_start is not None
    assert config.warm_start.demonstration == f"{demonstration.__module__}:demonstration"
    reward = load(reward_target(config.reward)).call
    for prompt in load_prompts(config.data.train, name="train", system_prompt=config.data.system_prompt).prompts[:20]:
        truth = {
            "data_source": prompt.data_source,
            "ground_truth": prompt.ground_truth,
            "extra_info": prompt.extra_info,
        }
        call, result, last = demonstration([*prompt.messages], **truth)
        assert call == f"<calculator>{prompt.extra_info['metadata']['expression']}</calculator>"
        assert answer(call) == result
        assert reward(solution_str=last, **truth)["score"] == 1.0
        assert reward(solution_str=call, **truth)["score"] < 0.5
