import time
from pathlib import Path

import pytest

from megatron_bapo.config.loading import load_config
from megatron_bapo.data.prompts import load_prompts
from megatron_bapo.environments.calculator import calculate, demonstration, reply
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
def test_expressions_have_exact_results_or_say_what_is_wrong(expression, result):
    started = time.monotonic()
    assert answer(f"Let me see: <calculator>{expression}</calculator>") == result
    assert time.monotonic() - started < 1.0


@pytest.mark.parametrize(
    "expression", ["__import__('os').getcwd()", "(1).__class__", "print(1)", "[1 for _ in (1,)]", "x", "f'{1}'"]
)
def test_nothing_is_run(expression):
    with pytest.raises(ValueError, match="only numbers"):
        calculate(expression)


def test_the_last_call_of_the_last_message_counts_and_none_ends_the_answer():
    assert answer("<calculator>1</calculator> or <calculator>2</calculator>") == "2"
    assert answer("It is 42.") is None
    assert answer("<calculator>1") is None


def test_the_example_run_teaches_calls_that_are_understood_and_pays_for_their_results():
    config = load_config(Path(__file__).parents[3] / "configs/calculator_tool.yaml")
    assert config.environment is not None
    assert config.environment.type == "calculator"
    assert config.data.system_prompt is not None
    assert answer(config.data.system_prompt) == "42"
    assert config.warm_start is not None
    assert config.warm_start.demonstration == f"{demonstration.__module__}:demonstration"
    reward, _ = load(reward_target(config.reward))
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
