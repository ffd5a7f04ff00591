import asyncio
from collections.abc import Iterator

import numpy as np
import pytest
from transformers import PreTrainedTokenizerBase

from megatron_bapo.config.reward import EnvironmentConfig
from megatron_bapo.config.schema import DataConfig
from megatron_bapo.errors import UserError
from megatron_bapo.model.hf_create import byte_tokenizer
from megatron_bapo.records import Prompt
from megatron_bapo.rollout.environment import FunctionEnvironment, reply_encoder
from megatron_bapo.rollout.generation import Reply

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}EOS\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""As Qwen's; EOS stands for the tokenizer's own token."""
MODULE = """
import asyncio, time

def guess(messages, data_source, ground_truth, extra_info=None):
    said = messages[-1]["content"]
    if said == "slow":
        time.sleep(60)
    if said == "broken":
        raise ValueError("no such guess")
    return None if said == ground_truth else f"{len(messages)}: not {said}"

async def guess_later(messages, data_source, ground_truth, extra_info=None):
    await asyncio.sleep(60 if messages[-1]["content"] == "slow" else 0.01)
    return guess(messages, data_source, ground_truth)
"""
PROMPT = Prompt("train:4", ({"role": "user", "content": "Guess."},), "42", "guessing")


@pytest.fixture
def tokenizer() -> PreTrainedTokenizerBase:
    return byte_tokenizer(["abc", "xyz"])


@pytest.fixture(params=["guess", "guess_later"])
def environment(request, tmp_path, monkeypatch, tokenizer) -> Iterator[FunctionEnvironment]:
    (tmp_path / "environment_test_functions.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    config = EnvironmentConfig(
        type="function", function=f"environment_test_functions:{request.param}", timeout_s=1.0, timeout_reply="late"
    )
    data = DataConfig.model_validate({"train": {"path": "unused.jsonl"}, "chat_template": False})
    environment = FunctionEnvironment(config, data, tokenizer)
    yield environment
    environment.close()


def test_a_users_function_replies_ends_the_answer_and_is_replaced_when_it_is_late(environment, tokenizer):
    async def say(said: str) -> Reply | None:
        turns = [{"role": "assistant", "content": "1"}, {"role": "tool", "content": "no"}]
        return await environment.reply(PROMPT, [*turns, {"role": "assistant", "content": said}])

    async def main() -> None:
        wrong, right, slow = await asyncio.gather(say("41"), say("42"), say("slow"))
        assert wrong is not None
        assert slow is not None
        assert wrong.message == {"role": "tool", "content": "4: not 41"}
        assert tokenizer.decode(wrong.token_ids) == "4: not 41"
        assert right is None
        assert slow.message["content"] == "late"
        assert environment.num_timeouts == 1
        with pytest.raises(UserError, match=r"failed on a turn of an answer to prompt train:4(.|\n)*no such guess"):
            await say("broken")
        environment.close()

    asyncio.run(main())


def test_with_a_chat_template_a_reply_is_what_stands_between_two_turns(tokenizer):
    tokenizer.chat_template = CHATML.replace("EOS", tokenizer.eos_token)
    encode = reply_encoder(tokenizer, "tool", chat_template=True)

    said = {"role": "assistant", "content": "Z"}
    whole = tokenizer.apply_chat_template([said, {"role": "tool", "content": "42"}, said], tokenize=False)
    first = tokenizer.apply_chat_template([said], tokenize=False).removesuffix("\n")
    assert first.endswith(tokenizer.eos_token)
    behind = whole.removeprefix(first)
    assert tokenizer.decode(encode("42")) == behind[: behind.index("Z")]
    assert encode("42").dtype == np.int32


def test_a_reply_cannot_speak_in_special_tokens(tokenizer):
    content = f"a{tokenizer.eos_token}b"
    for template in (None, CHATML.replace("EOS", tokenizer.eos_token)):
        tokenizer.chat_template = template
        encode = reply_encoder(tokenizer, "tool", chat_template=template is not None)
        own = encode(content).tolist()
        assert own.count(tokenizer.eos_token_id) == encode("ab").tolist().count(tokenizer.eos_token_id)
        assert content in tokenizer.decode(own)


@pytest.mark.parametrize(
    "template",
    [
        CHATML.replace("EOS", " <end>"),
        "{% for m in messages %}{% if m.role != 'tool' %}{{ m.content }}{% endif %}{% endfor %}",
    ],
)
def test_a_template_without_a_place_for_replies_is_refused(tokenizer, template):
    tokenizer.chat_template = template
    with pytest.raises(UserError, match=r"one after another: .* set environment.role"):
        reply_encoder(tokenizer, "tool", chat_template=True)
