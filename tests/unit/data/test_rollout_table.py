from pathlib import Path

import numpy as np

from megatron_bapo.data.rollout_samples import SampledGroup, SampledResponse, SampleHeader, write_samples
from megatron_bapo.data.rollout_table import COLUMNS, MAX_ROWS, MAX_TEXT, rollout_table
from megatron_bapo.records import Group, Prompt, Trajectory, VersionSpan

HEADER = SampleHeader(step=12, policy_version=4, num_groups=8, n=3, objective="bapo", temperature=1.0)
HOSTILE = "<script>alert(1)</script>\x00\u202e\ud800\ttext\n"
SHOWN = "<script>alert(1)</script>\\u0000\\u202e\ufffd\ttext\n"


def response(text: str, reward: float = 0.5, *, used: bool = True) -> SampledResponse:
    tokens = np.arange(4, dtype=np.int32)
    spans = (VersionSpan(3, 1), VersionSpan(5, 3)) if used else (VersionSpan(3, 4),)
    trajectory = Trajectory(tokens, tokens, np.full(4, -1.0, np.float32), spans, "length", text, reward)
    if not used:
        return SampledResponse(trajectory, np.full(4, -0.5))
    figures = {name: np.ones(4, np.float32) for name in ("log_probs", "entropy", "ratio", "correction")}
    figures["marks"] = np.array([1, 2, 8, 0], np.float32)
    return SampledResponse(trajectory, np.full(4, 0.25), None, 1, 0.6, 1.2, figures)


def written(folder: Path, *groups: list[SampledResponse], content: str = "1 + 1") -> Path:
    prompt = Prompt("p:0", ({"role": "user", "content": content},), "2", "p")
    sampled = (
        SampledGroup(index, Group(prompt, tuple(each.trajectory for each in group)), tuple(group))
        for index, group in enumerate(groups)
    )
    return write_samples(folder, HEADER, sampled, lambda batch: [""] * len(batch))


def test_a_row_has_the_response_and_what_became_of_it(tmp_path: Path) -> None:
    path = written(tmp_path, [response("two"), response("three", float("nan"), used=False)])
    first, second = (dict(zip(COLUMNS, row, strict=True)) for row in rollout_table(path))
    assert first == {
        "step": 12,
        "group": 0,
        "sample": 0,
        "prompt_id": "p:0",
        "prompt": "1 + 1",
        "response": "two",
        "ground_truth": "2",
        "reward": 0.5,
        "advantage": 0.25,
        "length": 4,
        "finish_reason": "length",
        "policy_versions": "3-5",
        "clipped_share": 0.5,
    }
    assert (second["response"], second["reward"], second["advantage"]) == ("three", None, -0.5)
    assert (second["policy_versions"], second["clipped_share"]) == ("3", None)


def test_invisible_characters_are_shown_and_long_texts_are_cut(tmp_path: Path) -> None:
    path = written(tmp_path, [response(HOSTILE), response("a" * 5000 + "b" * 5000)], content=HOSTILE)
    hostile, long = (dict(zip(COLUMNS, row, strict=True)) for row in rollout_table(path))
    assert (hostile["prompt"], hostile["response"]) == (SHOWN, SHOWN)
    assert len(long["response"]) == MAX_TEXT
    assert "a [... 10000 characters in all ...] b" in long["response"]


def test_several_messages_have_their_roles(tmp_path: Path) -> None:
    messages = ({"role": "system", "content": "Be brief."}, {"role": "user", "content": "1 + 1"})
    one = response("two")
    group = SampledGroup(0, Group(Prompt("p:0", messages, "2", "p"), (one.trajectory,)), (one,))
    (row,) = rollout_table(write_samples(tmp_path, HEADER, [group], lambda batch: [""] * len(batch)))
    assert row[COLUMNS.index("prompt")] == "system: Be brief.\n\nuser: 1 + 1"


def test_of_a_large_step_every_group_has_its_first_responses(tmp_path: Path) -> None:
    one = response("two")
    path = written(tmp_path, *([one] * 20 for _ in range(10)))
    rows = [dict(zip(COLUMNS, row, strict=True)) for row in rollout_table(path)]
    assert len(rows) == MAX_ROWS
    samples = [[row["sample"] for row in rows if row["group"] == group] for group in range(10)]
    assert samples == [[*range(13)]] * 8 + [[*range(12)]] * 2
