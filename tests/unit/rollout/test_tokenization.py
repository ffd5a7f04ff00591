from pathlib import Path

import numpy as np
import pytest
from transformers import MistralConfig, PreTrainedTokenizerBase

from megatron_bapo.config.data import DataConfig
from megatron_bapo.errors import UserError
from megatron_bapo.model.hf_create import byte_tokenizer
from megatron_bapo.records import Prompt
from megatron_bapo.rollout.tokenization import load_tokenizer, tokenize

TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


def tokenizer(template: str | None = None) -> PreTrainedTokenizerBase:
    tokenizer = byte_tokenizer(["abc", "xyz"])
    tokenizer.chat_template = template
    return tokenizer


def data(**settings: object) -> DataConfig:
    return DataConfig.model_validate({"train": {"path": "unused.jsonl"}, **settings})


def prompt(*contents: str) -> Prompt:
    messages = tuple({"role": role, "content": text} for role, text in zip(("system", "user"), contents, strict=False))
    return Prompt("train:4", messages, ground_truth="42", data_source="test")


def test_the_tokenizer_is_that_of_tokenizer_json_beside_a_tekken_json(tmp_path: Path):
    MistralConfig().save_pretrained(tmp_path)
    tokenizer().save_pretrained(tmp_path)
    (tmp_path / "tekken.json").write_text("{}")
    assert load_tokenizer(tmp_path).get_vocab() == tokenizer().get_vocab()


def test_messages_are_joined_as_plain_text_without_a_template():
    (tokenized,) = tokenize([prompt("Be brief.", "6 x 7")], tokenizer(), data(chat_template=False))

    assert tokenizer().decode(tokenized.token_ids) == "Be brief.\n6 x 7"
    assert tokenized.token_ids.dtype == np.int32


def test_the_chat_template_renders_the_roles_and_adds_the_generation_prompt():
    (tokenized,) = tokenize([prompt("Be brief.", "6 x 7")], tokenizer(TEMPLATE), data())

    assert tokenizer().decode(tokenized.token_ids) == "[system]Be brief.[user]6 x 7[assistant]"


THINKING = TEMPLATE + (
    "{% if add_generation_prompt and enable_thinking is defined and not enable_thinking %}[think][/think]{% endif %}"
    "{% if tools %}{{ tools[0].function.name }}{% endif %}"
)
"""How Qwen3's template skips the thinking of the next turn, and that it takes tools."""


def test_further_variables_reach_the_chat_template():
    def rendered(**variables: object) -> str:
        settings = data(chat_template_kwargs=variables)
        (tokenized,) = tokenize([prompt("Be brief.", "6 x 7")], tokenizer(THINKING), settings)
        return tokenizer().decode(tokenized.token_ids).partition("[assistant]")[2]

    assert rendered() == rendered(enable_thinking=True) == ""
    assert rendered(enable_thinking=False) == "[think][/think]"
    assert rendered(tools=[{"type": "function", "function": {"name": "run"}}]) == "run"


def test_tools_that_the_tokenizer_refuses_are_named_with_the_prompt():
    with pytest.raises(UserError, match=r"fails for prompt train:4, .* the roles system, user: Tools should"):
        tokenize([prompt("Be brief.", "6 x 7")], tokenizer(THINKING), data(chat_template_kwargs={"tools": ["run"]}))


@pytest.mark.parametrize("name", ["enable_thinkin", "thinking", "function", "messages", "add_generation_prompt"])
def test_a_variable_that_the_chat_template_does_not_read_is_refused(name: str):
    with pytest.raises(UserError, match=rf"data\.chat_template_kwargs has {name}, but must have names that .* reads"):
        tokenize([prompt("Be brief.", "6 x 7")], tokenizer(THINKING), data(chat_template_kwargs={name: False}))


def test_the_error_of_a_missing_chat_template_names_the_setting():
    with pytest.raises(
        UserError, match=r"has no chat template; set data\.chat_template=false, or --no-chat-template of"
    ):
        tokenize([prompt("hello")], tokenizer(), data())


def test_a_prompt_of_exactly_the_limit_passes_and_one_token_more_is_refused_by_id():
    settings = data(chat_template=False, max_prompt_length=5)

    assert len(tokenize([prompt("12345")], tokenizer(), settings)[0].token_ids) == 5
    with pytest.raises(
        UserError, match=r"train:4, counted from 0, has 6 tokens; data\.max_prompt_length allows 1 to 5\. "
    ):
        tokenize([prompt("123456")], tokenizer(), settings)


def test_several_long_prompts_are_counted_and_the_tool_that_removes_them_is_named():
    prompts = [prompt("12345"), prompt("123456"), prompt("12"), prompt("12345678")]

    with pytest.raises(UserError) as caught:
        tokenize(prompts, tokenizer(), data(chat_template=False, max_prompt_length=5))
    message = str(caught.value)
    assert "has 6 tokens; data.max_prompt_length allows 1 to 5 (of 2 such prompts the longest has 8)" in message
    assert "tools/prepare_data.py does with --tokenizer and --max-prompt-length" in message


@pytest.mark.parametrize(
    ("template", "reason"),
    [("{{ raise_exception('no system role') }}", "no system role"), ("{% for m in", "unexpected 'end of template'")],
)
def test_a_template_that_refuses_the_conversation_or_is_wrong_is_named(template: str, reason: str):
    with pytest.raises(UserError) as caught:
        tokenize([prompt("Be brief.", "6 x 7")], tokenizer(template), data())
    message = str(caught.value)
    assert "fails for prompt train:4, counted from 0, whose messages have the roles system, user: " + reason in message
    assert message.endswith("or set data.chat_template=false")


def test_a_conversation_that_ends_with_an_answer_is_refused_in_a_chat_template_only():
    ended = Prompt("train:0", ({"role": "user", "content": "1+1"}, {"role": "assistant", "content": "2"}), "2", "sums")
    with pytest.raises(UserError, match=r"train:0, counted from 0, ends with a message of the assistant"):
        tokenize([ended], tokenizer(TEMPLATE), data())
    assert len(tokenize([ended], tokenizer(), data(chat_template=False))) == 1


def test_a_prompt_without_a_token_is_refused_by_id():
    with pytest.raises(UserError, match=r"prompt train:4, counted from 0, has 0 tokens"):
        tokenize([prompt("")], tokenizer(), data(chat_template=False))


def test_a_saved_tokenizer_loads_from_its_folder(tmp_path: Path):
    tokenizer(TEMPLATE).save_pretrained(tmp_path)

    loaded = load_tokenizer(tmp_path)

    assert loaded.chat_template == TEMPLATE
    assert loaded.encode("abc") == tokenizer().encode("abc")


def test_a_missing_folder_is_named():
    with pytest.raises(UserError, match=r"^there is no folder nowhere to load .*relative paths start at"):
        load_tokenizer(Path("nowhere"))


def test_a_folder_without_tokenizer_is_named(tmp_path: Path):
    with pytest.raises(UserError, match=f"no tokenizer can be loaded from {tmp_path}"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize(
    ("name", "text"),
    [("tokenizer.json", ""), ("tokenizer.json", "{}"), ("tokenizer.json", "[]"), ("tokenizer_config.json", "[1]")],
)
def test_a_damaged_tokenizer_is_refused_with_its_folder(tmp_path: Path, name: str, text: str):
    tokenizer().save_pretrained(tmp_path)
    (tmp_path / name).write_text(text)

    with pytest.raises(UserError, match=f"no tokenizer can be loaded from {tmp_path}: .+: .+"):
        load_tokenizer(tmp_path)


def test_a_tokenizer_without_an_end_of_sequence_is_refused(tmp_path: Path):
    endless = tokenizer()
    endless.eos_token = None
    endless.save_pretrained(tmp_path)

    with pytest.raises(UserError, match=r"has no eos_token; set it in tokenizer_config\.json"):
        load_tokenizer(tmp_path)
