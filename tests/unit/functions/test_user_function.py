import ast
import asyncio
import inspect
import textwrap
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from megatron_bapo.errors import UserError
from megatron_bapo.functions.user_function import Target, checked, load

MODULE_NUMBERS = count()


@pytest.fixture
def write_module(tmp_path, monkeypatch):
    """Return a function that writes an importable module and returns its name, a new one at every call."""
    monkeypatch.syspath_prepend(tmp_path)

    def write(source: str) -> str:
        name = f"my_reward_{next(MODULE_NUMBERS)}"
        Path(tmp_path, f"{name}.py").write_text(textwrap.dedent(source))
        return name

    return write


def target(spec: str) -> Target:
    arguments = ("data_source", "solution_str", "ground_truth", "extra_info")
    return Target(f"reward.function={spec}", spec, arguments, "score", optional_arguments=("prompt", "turns"))


def call(spec: str) -> dict[str, Any] | str | None:
    function = load(target(spec))
    arguments = {"data_source": "d", "solution_str": "42", "ground_truth": "42", "extra_info": {"weight": 0.5}}
    arguments |= {"prompt": ["question"], "turns": []}
    result = function.call(**{name: arguments[name] for name in function.arguments})
    assert inspect.iscoroutine(result) == function.is_async
    return checked(target(spec), asyncio.run(result) if inspect.iscoroutine(result) else result)


@pytest.mark.parametrize(
    ("body", "reward"),
    [
        ("return float(solution_str == ground_truth)", 1.0),
        ("return solution_str == ground_truth", 1.0),
        ("return {'score': 0.25, 'acc': 1}", 0.25),
        ("return extra_info['weight']", 0.5),
        ("import numpy; return numpy.float32(0.5)", 0.5),
    ],
)
@pytest.mark.parametrize("definition", ["def", "async def"])
def test_numbers_and_dicts_are_rewards(write_module, definition, body, reward):
    name = write_module(f"{definition} f(data_source, solution_str, ground_truth, extra_info=None):\n    {body}\n")
    assert call(f"{name}:f") == {"score": reward, "pred": None}


def test_a_function_with_conversation_parameters_gets_them(write_module):
    name = write_module(
        "def f(data_source, solution_str, ground_truth, extra_info=None, prompt=()):\n    return len(prompt)\n"
    )
    assert call(f"{name}:f") == {"score": 1.0, "pred": None}


@pytest.mark.parametrize(
    ("result", "answer"), [("{'score': 1, 'pred': 7}", "7"), ("{'score': 1}", None), ("1.0", None)]
)
def test_a_dict_may_contain_the_extracted_answer(write_module, result, answer):
    name = write_module(f"def f(data_source, solution_str, ground_truth, extra_info=None):\n    return {result}\n")
    assert call(f"{name}:f") == {"score": 1.0, "pred": answer}


@pytest.mark.parametrize("value", ["None", "'1.0'", "float('nan')", "{'reward': 1.0}", "[1.0]"])
def test_another_return_value_raises(write_module, value):
    name = write_module(f"def f(data_source, solution_str, ground_truth, extra_info=None):\n    return {value}\n")
    with pytest.raises(
        ValueError, match=r"it returned .*; a reward is a finite number, or a dict with one under 'score'"
    ):
        call(f"{name}:f")


def test_a_missing_module_names_the_nearest(write_module):
    name = write_module("")
    with pytest.raises(UserError, match=f"no module '{name}x'; did you mean '{name}'"):
        load(target(f"{name}x:f"))


def test_a_missing_module_of_a_package_names_the_nearest():
    with pytest.raises(UserError, match=r"no module 'json\.decode'; did you mean 'json\.decoder'"):
        load(target("json.decode:f"))


def test_a_module_that_is_no_package_is_named():
    with pytest.raises(UserError, match=r"no module 'math\.score'"):
        load(target("math.score:f"))


def test_a_missing_function_names_the_nearest(write_module):
    name = write_module("def compute_score(data_source, solution_str, ground_truth, extra_info=None): return 0.0\n")
    with pytest.raises(UserError, match=f"{name} has no 'compute_scores'; did you mean 'compute_score'"):
        load(target(f"{name}:compute_scores"))


def test_a_missing_dependency_is_named_itself(write_module):
    name = write_module("import surely_not_installed\n")
    with pytest.raises(UserError, match=f"importing {name} failed, as it needs 'surely_not_installed'"):
        load(target(f"{name}:f"))


def test_an_error_at_import_is_shown(write_module):
    name = write_module("limit = 1 / 0\n")
    with pytest.raises(UserError, match=rf"importing {name} failed:(?s:.)*ZeroDivisionError"):
        load(target(f"{name}:f"))


def test_an_object_that_is_no_function_is_refused(write_module):
    name = write_module("f = 3\n")
    with pytest.raises(UserError, match=f"{name}:f is a int, not a function"):
        load(target(f"{name}:f"))


@pytest.mark.parametrize(
    "arguments", ["solution_str, ground_truth", "data_source, answer, ground_truth, extra_info=None"]
)
def test_another_signature_is_refused_with_the_right_one(write_module, arguments):
    name = write_module(f"def f({arguments}): return 0.0\n")
    with pytest.raises(
        UserError, match=r"write it as def f\(data_source, solution_str, ground_truth, extra_info=None\)"
    ):
        load(target(f"{name}:f"))


@pytest.mark.parametrize("value", ["'42'", "[]", "['call', 'reply']", "['call', '', 'answer']", "[42]"])
def test_turns_begin_and_end_with_the_policy(value):
    shown = Target("warm_start.demonstration=mine:shown", "mine:shown", ("messages",), "turns")
    assert checked(shown, ["call", "reply", "answer"]) == ["call", "reply", "answer"]
    with pytest.raises(ValueError, match=r"it returned .*; a demonstration is a list of non-empty texts"):
        checked(shown, ast.literal_eval(value))
