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
from megatron_bapo.rollout.sft_demonstrations import SftDemonstrations
from megatron_bapo.rollout.tokenization import tokenize

CONFIG = Path(__file__).parents[3] / "configs/calculator_tool.yaml"


@pytest.fixture
def tokenizer() -> PreTrainedTokenizerBase:
    return byte_tokenizer(["abc", "xyz"])


def config(**settings: Any) -> Config:
    overrides = [f"{key.replace('__', '.')}={value}" for key, value in settings.items()]
    return load_config(CONFIG, ["data.chat_template=false", *overrides])


def demonstration(config: Config, tokenizer: PreTrainedTokenizerBase, question: str) -> Trajectory:
    prompt = Prompt("train:4", ({"role": "user", "content": question},), "42", "sums")

    async def main() -> Trajectory:
        demonstrations = SftDemonstrations(config, tokenizer)
        try:
            (example,) = await demonstrations.for_prompts(tokenize([prompt], tokenizer, config.data))
            return example
        finally:
            demonstrations.close()

    return asyncio.run(main())


def test_without_a_demonstration_function_the_response_is_the_ground_truth(tokenizer):
    example = demonstration(config(warm_start__demonstration="null"), tokenizer, "6 * 7 =")

    *response, last = example.response_token_ids.tolist()
    assert tokenizer.decode(response) == "42"
    assert last == tokenizer.eos_token_id
    assert example.num_sampled == len(example.behaviour_log_probs) == example.version_spans[0].num_tokens == 3
    assert example.reward == 1.0


def test_the_loss_covers_a_demonstrations_turns_and_their_ends_but_not_the_replies(tokenizer):
    example = demonstration(config(), tokenizer, "Add: 12 + 30 =")

    end = str(tokenizer.eos_token)
    response = example.response_token_ids
    assert tokenizer.decode(response) == f"<calculator>12 + 30</calculator>{end}4242{end}"
    assert tokenizer.decode(response[example.sampled_positions]) == f"<calculator>12 + 30</calculator>{end}42{end}"
    assert example.num_sampled == len(response) - 2 == len(example.behaviour_log_probs)


def test_a_demonstration_that_fails_or_is_too_long_names_the_prompt(tokenizer):
    with pytest.raises(FunctionFailed, match=r"demonstration failed on prompt train:4(.|\n)*not an arithmetic"):
        demonstration(config(), tokenizer, "What?")
    with pytest.raises(UserError, match=r"has 38 tokens for prompt train:4, and rollout.max_response_length is 16"):
        demonstration(config(rollout__max_response_length=16), tokenizer, "12 + 30 =")


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
    example = demonstration(settings, tokenizer, "6 * 7 =")

    assert tokenizer.decode(example.response_token_ids[:-1]) == "nothing"


def test_a_ground_truth_without_room_is_refused_with_the_prompt_its_length_and_the_way_out(tokenizer):
    settings = config(warm_start__demonstration="null", rollout__max_response_length=2)
    rule = (
        r"has 3 tokens for prompt train:4, and rollout.max_response_length is 2; raise it, .*warm_start.demonstration"
    )
    with pytest.raises(UserError, match=rule):
        demonstration(settings, tokenizer, "6 * 7 =")
    settings = config(warm_start__demonstration="null", rollout__max_response_length=3)
    assert len(demonstration(settings, tokenizer, "6 * 7 =").response_token_ids) == 3
