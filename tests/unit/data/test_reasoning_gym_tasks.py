import json
import subprocess
import sys
from typing import Any

import pytest

from megatron_bapo.config.data import PromptSourceConfig
from megatron_bapo.data.prompts import load_prompts
from megatron_bapo.data.reasoning_gym_tasks import generate_entries
from megatron_bapo.errors import UserError
from megatron_bapo.records import Prompt

ONE_DIGIT_SUMS = {"chain_sum": {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}}


def generate(tasks: dict[str, dict[str, Any]], size: int, seed: int = 0) -> list[Prompt]:
    source = PromptSourceConfig(reasoning_gym=tasks, size=size, seed=seed)
    return load_prompts(source, name="train", system_prompt=None).prompts


def test_prompts_carry_the_entry_for_the_tasks_own_scorer():
    (prompt,) = generate({"chain_sum": {}}, size=1)
    assert prompt.prompt_id == "train:0"
    assert prompt.data_source == "reasoning_gym/chain_sum"
    assert prompt.messages == ({"role": "user", "content": prompt.extra_info["question"]},)
    assert prompt.ground_truth == prompt.extra_info["answer"]
    assert json.loads(json.dumps(prompt.extra_info)) == prompt.extra_info


def test_tasks_are_mixed_evenly_whatever_their_order_in_the_file():
    prompts = generate({"gcd": {}, "chain_sum": {}, "lcm": {}}, size=8)
    tasks = [prompt.data_source.removeprefix("reasoning_gym/") for prompt in prompts]
    assert tasks == ["chain_sum", "gcd", "lcm", "chain_sum", "gcd", "lcm", "chain_sum", "gcd"]
    assert prompts == generate({"lcm": {}, "chain_sum": {}, "gcd": {}}, size=8)


@pytest.mark.slow
def test_the_same_seed_gives_the_same_prompts_in_another_process():
    code = (
        "import json; from megatron_bapo.data.reasoning_gym_tasks import generate_entries\n"
        "print(json.dumps(generate_entries({'chain_sum': {}, 'knights_knaves': {}}, size=6, seed=3)))"
    )
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, timeout=120).stdout
    here = generate_entries({"chain_sum": {}, "knights_knaves": {}}, size=6, seed=3)
    assert json.loads(output) == [list(pair) for pair in here]


@pytest.mark.parametrize("distinct", [True, False])
def test_more_questions_than_fit_into_memory_are_refused_before_any_is_generated(distinct):
    with pytest.raises(UserError, match=r"size=1000000000000 does not fit .* room for [\d,]+ prompts at most"):
        generate_entries({"chain_sum": {}}, size=10**12, seed=0, distinct=distinct)


def test_adjacent_seeds_give_different_questions():
    tasks = {"chain_sum": {"min_digits": 4, "max_digits": 4}}
    first, second = (
        {prompt.messages[0]["content"] for prompt in generate(tasks, size=50, seed=seed)} for seed in (0, 1)
    )
    assert not first & second


def test_repeated_questions_come_with_answers_of_their_own():
    source = PromptSourceConfig(reasoning_gym={"grid_walk": {}}, size=2000, distinct=False)
    prompts = load_prompts(source, name="train", system_prompt=None).prompts
    questions = {prompt.messages[0]["content"] for prompt in prompts}
    walks = {(prompt.messages[0]["content"], prompt.ground_truth) for prompt in prompts}
    assert len(prompts) == 2000
    assert len(questions) < 1700
    assert len(walks) > 1800


def test_all_of_a_small_task_is_found_and_each_question_once():
    prompts = generate(ONE_DIGIT_SUMS, size=200)
    assert len({prompt.messages[0]["content"] for prompt in prompts}) == 200


def test_a_task_with_fewer_questions_than_asked_for_is_refused():
    with pytest.raises(UserError, match=r"chain_sum has only 200 distinct questions .* and 201 are needed; lower size"):
        generate(ONE_DIGIT_SUMS, size=201)


def test_a_generator_without_an_index_beyond_its_size_continues():
    assert len(generate({"gsm_symbolic": {}}, size=600)) == 600


def test_an_unknown_task_names_the_nearest():
    with pytest.raises(UserError, match="no task 'chain_sums'; the nearest is 'chain_sum'"):
        generate({"chain_sums": {}}, size=1)


def test_an_unknown_parameter_names_the_nearest():
    with pytest.raises(UserError, match="chain_sum has no parameter 'min_term'; the nearest is min_terms, all are"):
        generate({"chain_sum": {"min_term": 2}}, size=1)


@pytest.mark.parametrize("params", [{"min_terms": 5, "max_terms": 2}, {"min_terms": "two"}])
def test_refused_parameters_are_named(params):
    with pytest.raises(UserError, match="chain_sum rejects the parameters"):
        generate({"chain_sum": params}, size=1)


@pytest.mark.parametrize("key", ["seed", "size"])
def test_seed_and_size_belong_to_the_source(key):
    with pytest.raises(UserError, match=f"{key} is not a parameter"):
        generate({"chain_sum": {key: 3}}, size=1)


def test_a_size_below_the_number_of_tasks_is_refused():
    with pytest.raises(UserError, match="size is 1 for 2 reasoning_gym tasks"):
        generate({"chain_sum": {}, "gcd": {}}, size=1)


def test_a_task_whose_scorer_does_not_survive_json_is_refused():
    with pytest.raises(UserError, match=r"rearc cannot be used: its scorer gives its own answer 0\.05 instead of 1\.0"):
        generate({"rearc": {}}, size=1)


def test_a_task_that_differs_between_processes_needs_a_fixed_hash_seed(monkeypatch):
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    with pytest.raises(UserError, match="PYTHONHASHSEED=0"):
        generate({"ransom_note": {}}, size=1)
