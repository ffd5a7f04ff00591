import json

import numpy as np
import pytest

from megatron_bapo.config.data import CurriculumConfig
from megatron_bapo.data.curriculum import Curriculum, pass_rate
from megatron_bapo.data.prompt_stream import PromptStream
from megatron_bapo.errors import UserError
from megatron_bapo.records import Group, Prompt, Trajectory, VersionSpan

NUM_PROMPTS = 200


def prompts() -> list[Prompt]:
    return [Prompt(f"train:{i}", ({"role": "user", "content": "?"},), "1", "test") for i in range(NUM_PROMPTS)]


def stream(seed: int = 3, **settings) -> PromptStream:
    all_prompts = prompts()
    config = CurriculumConfig.model_validate(settings)
    curriculum = Curriculum(config, (prompt.prompt_id for prompt in all_prompts))
    return PromptStream(all_prompts, seed=seed, shuffle=True, curriculum=curriculum)


def measured(stream: PromptStream) -> PromptStream:
    """Measure pass rates; that of prompt i is i / 10 modulo 1.1: 0, 0.1 ... 1."""
    assert stream.curriculum is not None
    for i in range(NUM_PROMPTS):
        stream.curriculum.measure(f"train:{i}", i % 11 / 10)
    return stream


def rate(prompt_id: str) -> float:
    return int(prompt_id.split(":")[1]) % 11 / 10


def test_unmeasured_prompts_are_sampled_in_the_order_without_a_curriculum():
    plain = PromptStream(prompts(), seed=3, shuffle=True)
    assert [p.prompt_id for p in stream().take(450)] == [p.prompt_id for p in plain.take(450)]


@pytest.mark.parametrize(
    ("settings", "share"),
    [
        ({"min_probability": 0.05}, lambda p: max(4 * p * (1 - p), 0.05)),
        (
            {"weighting": "band", "min_pass_rate": 0.2, "max_pass_rate": 0.7, "min_probability": 0.3},
            lambda p: 1.0 if 0.2 <= p <= 0.7 else 0.3,
        ),
    ],
    ids=["variance", "band"],
)
def test_prompts_are_sampled_with_the_probability_of_their_pass_rate(settings, share):
    source = measured(stream(**settings))
    rates = [rate(prompt.prompt_id) for prompt in source.take(20000)]
    num_epochs = source.num_taken / NUM_PROMPTS
    for tenth in range(11):
        num_prompts = len(range(tenth, NUM_PROMPTS, 11))
        expected = share(tenth / 10)
        found = sum(r == tenth / 10 for r in rates) / (num_prompts * num_epochs)
        assert found == pytest.approx(
            expected, abs=4 * np.sqrt(expected * (1 - expected) / (num_prompts * num_epochs)) + 0.01
        )


def test_every_epoch_visits_each_prompt_once_and_counts_skipped_ones():
    source = measured(stream())
    taken = [source.take(1)[0].prompt_id for _ in range(700)]
    assert source.num_taken == source.num_skipped + len(taken)
    assert source.num_skipped > 0
    again = measured(stream())
    epochs: dict[int, list[str]] = {}
    for name in taken:
        assert again.take(1)[0].prompt_id == name
        epochs.setdefault((again.num_taken - 1) // NUM_PROMPTS, []).append(name)
    assert len(epochs) > 3
    assert all(len(set(names)) == len(names) < NUM_PROMPTS for names in epochs.values())


def test_a_restored_stream_keeps_measured_pass_rates():
    source = measured(stream(num_groups=2))
    source.take(120)
    saved = json.loads(json.dumps(source.state_dict()))
    restored = stream(num_groups=2)
    restored.load_state_dict(saved)
    for one in (source, restored):
        assert one.curriculum is not None
        one.curriculum.measure("train:0", 0.5)
    assert restored.take(500) == source.take(500)
    assert (restored.num_taken, restored.num_skipped) == (source.num_taken, source.num_skipped)


def test_the_order_depends_on_the_seed():
    assert measured(stream()).take(300) == measured(stream()).take(300)
    assert {p.prompt_id for p in measured(stream()).take(60)} != {p.prompt_id for p in measured(stream(4)).take(60)}


def test_only_the_latest_groups_count():
    curriculum = Curriculum(CurriculumConfig(num_groups=2, min_probability=0.01), ())
    for passed in (1.0, 1.0, 0.5, 0.0):
        curriculum.measure("train:0", passed)
    assert curriculum.probability("train:0") == pytest.approx(4 * 0.25 * 0.75)


def test_a_groups_pass_rate_is_its_share_of_right_responses():
    one = np.zeros(1, np.int32)
    answers = [Trajectory(one, one, one, (VersionSpan(0, 1),), "stop", "", reward=r) for r in (1.0, 0.9, 2.0, -1.0)]
    assert pass_rate(Group(prompts()[0], tuple(answers))) == 0.5


def test_a_recorded_pass_rate_is_used_until_one_is_measured(tmp_path):
    path = tmp_path / "rates.jsonl"
    path.write_text('{"prompt_id": "train:0", "pass_rate": 1.0}\n{"prompt_id": "train:1", "pass_rate": 0.1}\n')
    curriculum = Curriculum(CurriculumConfig(pass_rates=path), ["train:0", "train:1"])
    assert [curriculum.probability(f"train:{i}") for i in range(3)] == [0.1, pytest.approx(0.36), 1.0]
    curriculum.measure("train:0", 0.5)
    assert curriculum.probability("train:0") == 1.0


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ('{"prompt_id": "train:0"}', r"rates.jsonl:1 is .*; write .*with a rate from 0 to 1"),
        ('{"prompt_id": "train:0", "pass_rate": 1.5}', r"rates.jsonl:1 is "),
        ("[", r"rates.jsonl:1 is "),
        ("[" * 200_000, r"rates.jsonl:1 is "),
        ('{"prompt_id": "\xe9", "pass_rate": 0.5}', "rates.jsonl:1 is .*\ufffd"),
        ('{"prompt_id": "other:0", "pass_rate": 0.5}', "names none of the training prompts"),
    ],
)
def test_a_broken_file_of_pass_rates_is_refused(tmp_path, line, problem):
    path = tmp_path / "rates.jsonl"
    path.write_bytes(line.encode("latin-1") + b"\n")
    with pytest.raises(UserError, match=problem):
        Curriculum(CurriculumConfig(pass_rates=path), ["train:0"])
