import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path
from threading import Event
from typing import Any

import numpy as np
import pytest
from transformers import PreTrainedTokenizerBase

from megatron_bapo.config.data import DataConfig, PromptConfig
from megatron_bapo.config.reward import EnvironmentConfig
from megatron_bapo.data.rollout_files import RolloutHeader, read_rollouts, rollout_files, write_rollouts
from megatron_bapo.errors import UserError
from megatron_bapo.model.hf_create import byte_tokenizer
from megatron_bapo.records import Group, Prompt, Trajectory, VersionSpan
from megatron_bapo.rollout.environment import FunctionEnvironment, reply_encoder
from megatron_bapo.rollout.in_flight_group import Reply

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}EOS\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""A template like Qwen's; EOS is replaced by the tokenizer's own token."""
MODULE = """
import asyncio, time

def guess(messages, data_source, ground_truth, extra_info=None):
    content = messages[-1]["content"]
    if content == "slow":
        time.sleep(60)
    if content == "broken":
        raise ValueError("no such guess")
    if content == "cut":
        return "41 or \\ud83d or \\udc80, \\ud83d\\ude00"
    return None if content == ground_truth else f"{len(messages)}: not {content}"

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
    with guessing(tmp_path, monkeypatch, tokenizer, request.param) as environment:
        yield environment


@contextmanager
def guessing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tokenizer: PreTrainedTokenizerBase, function: str = "guess"
) -> Iterator[FunctionEnvironment]:
    (tmp_path / "environment_test_functions.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    config = EnvironmentConfig(
        type="function", function=f"environment_test_functions:{function}", timeout_s=1.0, timeout_reply="late"
    )
    data = DataConfig.model_validate({"train": {"path": "unused.jsonl"}, "chat_template": False})
    environment = FunctionEnvironment(config, data, tokenizer)
    yield environment
    environment.close()


@pytest.mark.slow
def test_a_users_function_replies_or_ends_the_response_and_a_late_reply_is_replaced(environment, tokenizer):
    async def reply_to(content: str) -> Reply | None:
        turns = [{"role": "assistant", "content": "1"}, {"role": "tool", "content": "no"}]
        return await environment.reply(PROMPT, [*turns, {"role": "assistant", "content": content}])

    async def main() -> None:
        wrong, right, slow = await asyncio.gather(reply_to("41"), reply_to("42"), reply_to("slow"))
        assert wrong is not None
        assert slow is not None
        assert wrong.message == {"role": "tool", "content": "4: not 41"}
        assert tokenizer.decode(wrong.token_ids) == "4: not 41"
        assert right is None
        assert slow.message["content"] == "late"
        assert environment.num_timeouts == 1
        with pytest.raises(UserError, match=r"failed on a turn of a response to prompt train:4(.|\n)*no such guess"):
            await reply_to("broken")
        environment.close()

    asyncio.run(main())


def test_the_event_loop_goes_on_while_a_reply_is_tokenized(tmp_path, monkeypatch, tokenizer):
    begun, may_end = Event(), Event()

    class Slow(type(tokenizer)):
        def encode(self, text: str, **options: Any) -> list[int]:  # pyright: ignore[reportIncompatibleMethodOverride]
            if text == "3: not 41":
                begun.set()
                assert may_end.wait(10), "the event loop stands still"
            return super().encode(text, **options)

    slow = deepcopy(tokenizer)
    slow.__class__ = Slow

    async def main(environment: FunctionEnvironment) -> None:
        turns = [{"role": "tool", "content": "no"}, {"role": "assistant", "content": "41"}]
        work = asyncio.ensure_future(environment.reply(PROMPT, turns))
        while not begun.is_set():
            await asyncio.sleep(0.01)
        may_end.set()
        reply = await work
        assert reply is not None
        assert tokenizer.decode(reply.token_ids) == "3: not 41"
        environment.close()

    with guessing(tmp_path, monkeypatch, slow) as environment:
        asyncio.run(main(environment))


@pytest.mark.parametrize("chat_template", [False, True])
def test_a_reply_with_half_a_character_is_tokenized_and_saved(environment, tokenizer, tmp_path, chat_template):
    """A tool may cut its output in the middle of a UTF-16 pair, and Python's JSON reads such text without an error."""
    tokenizer.chat_template = CHATML.replace("EOS", tokenizer.eos_token)
    encode = reply_encoder(tokenizer, "tool", PromptConfig(chat_template=chat_template))

    async def reply() -> Reply | None:
        try:
            return await environment.reply(PROMPT, [{"role": "assistant", "content": "cut"}])
        finally:
            environment.close()

    found = asyncio.run(reply())
    assert found is not None
    text = "41 or \ufffd or \ufffd, \U0001f600"
    assert found.message["content"] == text
    assert text in tokenizer.decode(encode(text))
    trajectory = Trajectory(
        prompt_token_ids=np.array([1], np.int32),
        response_token_ids=found.token_ids,
        behaviour_log_probs=np.zeros(len(found.token_ids), np.float32),
        version_spans=(VersionSpan(0, len(found.token_ids)),),
        finish_reason="stop",
        text=tokenizer.decode(found.token_ids),
        reward=1.0,
        turns=(found.message,),
    )
    header = RolloutHeader(
        step=1, policy_version=0, num_groups=1, n=1, vocab_size=len(tokenizer), num_reward_timeouts=0
    )
    write_rollouts(tmp_path, header, [Group(PROMPT, (trajectory,))], None)
    _, (group,) = read_rollouts(rollout_files(tmp_path)[1])
    assert group.trajectories[0].turns == (found.message,)
    assert group.trajectories[0].text == text


def test_with_a_chat_template_a_reply_is_the_text_between_two_turns(tokenizer):
    tokenizer.chat_template = CHATML.replace("EOS", tokenizer.eos_token)
    encode = reply_encoder(tokenizer, "tool", PromptConfig(chat_template=True))

    turn = {"role": "assistant", "content": "Z"}
    whole = tokenizer.apply_chat_template([turn, {"role": "tool", "content": "42"}, turn], tokenize=False)
    first = tokenizer.apply_chat_template([turn], tokenize=False).removesuffix("\n")
    assert first.endswith(tokenizer.eos_token)
    rest = whole.removeprefix(first)
    assert tokenizer.decode(encode("42")) == rest[: rest.index("Z")]
    assert encode("42").dtype == np.int32


def test_the_turn_after_a_reply_starts_as_the_variables_of_the_chat_template_say(tokenizer):
    tokenizer.chat_template = CHATML.replace("EOS", tokenizer.eos_token) + "{% if quiet %}[quiet]{% endif %}"
    loud, quiet = (
        reply_encoder(tokenizer, "tool", PromptConfig(chat_template_kwargs={"quiet": value}))("42")
        for value in (False, True)
    )
    assert tokenizer.decode(quiet) == tokenizer.decode(loud) + "[quiet]"


def test_the_text_of_a_reply_is_never_encoded_as_special_tokens(tokenizer):
    content = f"a{tokenizer.eos_token}b"
    for template in (None, CHATML.replace("EOS", tokenizer.eos_token)):
        tokenizer.chat_template = template
        encode = reply_encoder(tokenizer, "tool", PromptConfig(chat_template=template is not None))
        token_ids = encode(content).tolist()
        assert token_ids.count(tokenizer.eos_token_id) == encode("ab").tolist().count(tokenizer.eos_token_id)
        assert content in tokenizer.decode(token_ids)


@pytest.mark.parametrize(
    "template",
    [
        CHATML.replace("EOS", " <end>"),
        "{% for m in messages %}{% if m.role != 'tool' %}{{ m.content }}{% endif %}{% endfor %}",
    ],
)
def test_a_template_without_a_place_for_replies_is_refused(tokenizer, template):
    tokenizer.chat_template = template
    with pytest.raises(UserError, match=r"a reply with the role tool in this order; .* Set environment.role"):
        reply_encoder(tokenizer, "tool", PromptConfig(chat_template=True))


def test_a_template_that_refuses_the_role_of_replies_is_named(tokenizer):
    refused = "{% if m.role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}"
    tokenizer.chat_template = f"{{% for m in messages %}}{refused}{{% endfor %}}"
    with pytest.raises(UserError, match=r"fails for a reply with environment.role=tool, .*: no tools. Set environment"):
        reply_encoder(tokenizer, "tool", PromptConfig(chat_template=True))
