import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_bapo.data.prompt_stream import PromptStream
from megatron_bapo.errors import UserError
from megatron_bapo.records import Prompt


def make_prompts(num: int, content: str = "?") -> list[Prompt]:
    return [Prompt(f"train:{i}", ({"role": "user", "content": content},), "1", "test") for i in range(num)]


def ids(prompts: list[Prompt]) -> list[str]:
    return [prompt.prompt_id for prompt in prompts]


@given(num_prompts=st.integers(1, 7), takes=st.lists(st.integers(0, 20), max_size=8), shuffle=st.booleans())
def test_every_epoch_has_every_prompt_once_for_any_batch_sizes(num_prompts, takes, shuffle):
    stream = PromptStream(make_prompts(num_prompts), seed=1, shuffle=shuffle)
    batches = [stream.take(num) for num in takes]
    assert [len(batch) for batch in batches] == takes
    taken = [prompt for batch in batches for prompt in batch]
    for start in range(0, len(taken), num_prompts):
        epoch = ids(taken[start : start + num_prompts])
        assert len(set(epoch)) == len(epoch)


@given(num_prompts=st.integers(1, 7), before=st.integers(0, 20), after=st.integers(1, 20))
def test_a_restored_stream_continues_exactly(num_prompts, before, after):
    prompts = make_prompts(num_prompts)
    stream = PromptStream(prompts, seed=5, shuffle=True)
    stream.take(before)
    state = json.loads(json.dumps(stream.state_dict()))
    restored = PromptStream(prompts, seed=5, shuffle=True)
    restored.take(3)
    restored.load_state_dict(state)
    assert ids(restored.take(after)) == ids(stream.take(after))


def test_epochs_and_seeds_have_different_orders():
    stream = PromptStream(make_prompts(50), seed=0, shuffle=True)
    orders = [ids(stream.take(50)), ids(stream.take(50))]
    orders.append(ids(PromptStream(make_prompts(50), seed=1, shuffle=True).take(50)))
    assert len({tuple(order) for order in orders}) == 3


def test_without_shuffling_the_order_is_the_files():
    stream = PromptStream(make_prompts(3), seed=0, shuffle=False)
    assert ids(stream.take(7)) == [f"train:{i % 3}" for i in range(7)]


@pytest.mark.parametrize(
    ("changed", "name"),
    [
        (PromptStream(make_prompts(4), seed=0, shuffle=True), "num_prompts"),
        (PromptStream(make_prompts(3, "other"), seed=0, shuffle=True), "fingerprint"),
        (PromptStream(make_prompts(3), seed=1, shuffle=True), "seed"),
        (PromptStream(make_prompts(3), seed=0, shuffle=False), "shuffle"),
    ],
    ids=["prompts", "contents", "seed", "shuffle"],
)
def test_a_changed_source_is_refused(changed, name):
    state = PromptStream(make_prompts(3), seed=0, shuffle=True).state_dict()
    with pytest.raises(UserError, match=f"prompt order: its {name} was .* and is .*new run_dir"):
        changed.load_state_dict(state)


def test_no_prompts_are_refused():
    with pytest.raises(UserError, match="no prompts to train on"):
        PromptStream([], seed=0, shuffle=True)
