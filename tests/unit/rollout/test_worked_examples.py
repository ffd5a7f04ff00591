import asyncio
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerBase

from megatron_bapo.config.loading import load_config
from megatron_bapo.config.schema import Config
from megatron_bapo.errors import FunctionFailed, UserError
from megatron_bapo.model.hf_create import byte_tokenizer
from megatron_bapo.records import Prompt, Trajectory
from megatron_bapo.rollout.tokenization import tokenize
from megatron_bapo.rollout.worked_examples import WorkedExamples

CONFIG = Path(__file__).parents[3] / "configs/calculator_tool.yaml"


@pytest.fixture
def tokenizer() -> PreTrainedTokenizerBase:
    return byte_tokenizer(["abc", "xyz"])


def config(**settings: Any) -> Config:
    overrides = [f"{key.replace('__', '.')}={value}" for key, value in settings.items()]
    return load_config(CONFIG, ["data.chat_template=false", *overrides])


def made(config: Config, tokenizer: PreTrainedTokenizerBase, question: str) -> Trajectory:
    prompt = Prompt("train:4", ({"role": "user", "content": question},), "42", "sums")

    async def main() -> Trajectory:
        examples = WorkedExamples(config, tokenizer)
        try:
            (example,) = await examples.of(tokenize([prompt], tokenizer, config.data))
            return example
        finally:
            examples.close()

    return asyncio.run(main())


def test_without_a_demonstration_the_ground_truth_is_the_answer(tokenizer):
    example = made(config(warm_start__demonstration="null"), tokenizer, "6 * 7 =")

    *answer, last = example.response_token_ids.tolist()
    assert tokenizer.decode(answer) == "42"
    assert last == tokenizer.eos_token_id
    assert example.num_sampled == len(example.behaviour_log_probs) == example.version_spans[0].num_tokens == 3
    assert example.reward == 1.0


def test_of_a_demonstration_the_policys_turns_and_their_ends_are_learned_and_replies_are_not(tokenizer):
    example = made(config(), tokenizer, "Add: 12 + 30 =")

    end = str(tokenizer.eos_token)
    response = example.response_token_ids
    assert tokenizer.decode(response) == f"<calculator>12 + 30</calculator>{end}4242{end}"
    assert tokenizer.decode(response[example.sampled_positions]) == f"<calculator>12 + 30</calculator>{end}42{end}"
    assert example.num_sampled == len(response) - 2 == len(example.behaviour_log_probs)


def test_a_demonstration_that_fails_or_has_no_room_names_the_prompt(tokenizer):
    with pytest.raises(FunctionFailed, match=r"demonstration failed on prompt train:4(.|\n)*not an arithmetic"):
        made(config(), tokenizer, "What?")
    with pytest.raises(UserError, match=r"has 38 tokens for prompt train:4, and rollout.max_response_length is 16"):
        made(config(rollout__max_response_length=16), tokenizer, "12 + 30 =")


def test_a_demonstration_does_not_see_the_rewards_authorization(tokenizer, tmp_path, monkeypatch):
    (tmp_path / "looking.py").write_text(
        "import os\n\n\n"
        "def around(messages, data_source, ground_truth, extra_info=None):\n"
        "    return [os.environ.get('OF_THE_REWARD', 'nothing')]\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("OF_THE_REWARD", "Bearer word")
    remote = {"reward__type": "remote", "reward__remote__url": "http://host/score"}
    settings = config(
        warm_start__demonstration="looking:around", **remote, reward__remote__authorization_env="OF_THE_REWARD"
    )
    example = made(settings, tokenizer, "6 * 7 =")

    assert tokenizer.decode(example.response_token_ids[:-1]) == "nothing"
