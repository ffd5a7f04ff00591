from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron_bapo.config.schema import Config
from megatron_bapo.controller.prompt_sets import load_task_prompts
from megatron_bapo.controller.recorded_rollouts import RecordedRollouts, check_files
from megatron_bapo.controller.run_state import check_resumable
from megatron_bapo.data.rollout_files import RolloutHeader, read_rollouts, rollout_files, write_parts, write_rollouts
from megatron_bapo.errors import UserError
from megatron_bapo.model.hf_create import create_checkpoint
from megatron_bapo.records import Group, Prompt, Trajectory, VersionSpan
from megatron_bapo.rollout.tokenization import load_tokenizer
from megatron_bapo.run_directory import RunDirectory

HEADER = RolloutHeader(step=1, policy_version=7, num_groups=2, n=2, vocab_size=0, num_reward_timeouts=3)


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Config:
    config = Config.model_validate(
        {
            "run_dir": tmp_path_factory.mktemp("run"),
            "model": {"create": {"num_hidden_layers": 1, "hidden_size": 8}},
            "data": {
                "max_prompt_length": 24,
                "chat_template": False,
                "train": {"reasoning_gym": {"chain_sum": {"min_terms": 2, "max_terms": 2}}, "size": 9},
            },
            "reward": {"type": "reasoning_gym"},
            "rollout": {"n": 2, "max_response_length": 4},
            "trainer": {"total_steps": 3, "train_batch_size": 4, "ppo_mini_batch_size": 4},
        }
    )
    assert config.model.create is not None
    texts = [prompt.messages[0]["content"] for prompt in load_task_prompts(config).train]
    create_checkpoint(config.model_path, config.model.create, texts, config.seed)
    return config


def write(folder: Path, step: int, *, length: int = 2, n: int = 2, vocab_size: int, **fields: Any) -> None:
    tokens = np.full(length, step, np.int32)
    trajectory = Trajectory(tokens, tokens, np.zeros(length, np.float32), (VersionSpan(6, length),), "stop", "", 1.0)
    groups = [Group(Prompt(f"p:{index}", (), "", "p"), (trajectory,) * n) for index in range(2)]
    write_rollouts(folder, replace(HEADER, step=step, n=n, vocab_size=vocab_size, **fields), groups, None)


@pytest.fixture
def vocab_size(config: Config) -> int:
    return len(load_tokenizer(config.model_path))


@pytest.fixture
def folder(tmp_path: Path, vocab_size: int) -> Path:
    for step in (1, 2, 3):
        write(tmp_path, step, vocab_size=vocab_size)
    return tmp_path


@pytest.mark.parametrize("num_done", [0, 1, 2])
def test_batches_come_in_the_order_of_steps_from_the_runs_current_step(config, folder, num_done):
    rollouts = RecordedRollouts(config, folder, num_done)

    taken = [rollouts.take()[0] for _ in range(3 - num_done)]

    steps = [int(scored.groups[0].trajectories[0].response_token_ids[0]) for scored in taken]
    assert steps == list(range(num_done + 1, 4))
    assert {(scored.policy_version, scored.num_reward_timeouts) for scored in taken} == {(7, 3)}


def test_sft_demonstrations_continue_from_the_saved_position(config, folder, tmp_path):
    rollout = config.rollout.model_copy(update={"max_response_length": 8})  # room for every ground truth
    config = config.model_copy(update={"rollout": rollout})
    first, second = RecordedRollouts(config, folder, 0), RecordedRollouts(config, folder, 0)
    texts = [example.text for example in first.sft_demonstrations(9)]

    before = [example.text for example in second.sft_demonstrations(4)]
    first.restore_data_state(second.begin_saving(tmp_path), tmp_path)

    assert before + [example.text for example in first.sft_demonstrations(5)] == texts


def test_missing_files_are_refused_with_the_range_of_existing_steps(config, folder, vocab_size):
    (folder / "step-00000003.parquet").unlink()

    (folder / "step-00000001.parquet").rename(folder / "step-00000004.parquet")
    with pytest.raises(UserError, match=r"no rollouts of step 1; .* and trainer\.total_steps=3; generate the missing"):
        check_files(config, folder, 0, vocab_size)
    (folder / "step-00000004.parquet").rename(folder / "step-00000001.parquet")
    with pytest.raises(UserError, match=r"no rollouts of step 3.*from step 1 to 2.*trainer\.total_steps=2"):
        check_files(config, folder, 0, vocab_size)


def test_a_folder_without_files_is_refused(config, tmp_path):
    with pytest.raises(UserError, match="holds no step-"):
        check_files(config, tmp_path / "missing", 0, vocab_size=0)


def test_files_of_another_batch_size_or_tokenizer_are_refused_with_the_matching_settings(config, folder, vocab_size):
    write(folder, 2, n=3, vocab_size=vocab_size)
    with pytest.raises(UserError, match=r"set rollout\.n=3 and trainer\.train_batch_size=6"):
        check_files(config, folder, 0, vocab_size)

    write(folder, 2, vocab_size=vocab_size + 1)
    with pytest.raises(UserError, match=f"tokenizer of {vocab_size + 1} tokens.* has {vocab_size};"):
        check_files(config, folder, 0, vocab_size)
    check_files(config, folder, 2, vocab_size)  # files of finished steps need not fit


def test_files_without_the_routes_to_replay_are_refused(config, folder, vocab_size):
    algorithm = config.algorithm.model_copy(update={"routing_replay": "rollout"})
    config = config.model_copy(update={"algorithm": algorithm})

    with pytest.raises(UserError, match=r"has no routes, and algorithm\.routing_replay=rollout needs those of"):
        check_files(config, folder, 0, vocab_size)


def test_files_without_the_log_probs_of_the_teacher_on_engines_are_refused(config, folder, vocab_size):
    def taught(temperature: float = 1.0, **distillation: Any) -> Config:
        algorithm = {"objective": "distill", "distillation": {"teacher": "one", **distillation}}
        rollout = config.rollout.model_dump() | {"temperature": temperature}
        return Config.model_validate(config.model_dump() | {"algorithm": algorithm, "rollout": rollout})

    check_files(taught(), folder, 0, vocab_size)  # the trainer scores the responses
    with pytest.raises(UserError, match=r"has no teacher's log-probs, .* needs those of .*teacher=one"):
        check_files(taught(engines={}), folder, 0, vocab_size)
    for step in (1, 2, 3):
        write(folder, step, vocab_size=vocab_size, teacher="one", sampling={"temperature": 1.0})
    check_files(taught(engines={}), folder, 0, vocab_size)
    with pytest.raises(UserError, match=r"has log-probs of the teacher one, .* needs those of .*teacher=two"):
        check_files(taught(teacher="two", engines={}), folder, 0, vocab_size)
    with pytest.raises(UserError, match=r"was sampled with rollout\.temperature=1\.0"):
        check_files(taught(temperature=0.5, engines={}), folder, 0, vocab_size)
    check_files(taught(teacher="two"), folder, 0, vocab_size)


@pytest.mark.parametrize(
    ("length", "rule"), [(5, r"rollout\.max_response_length=4"), (25, r"data\.max_prompt_length=24")]
)
def test_a_sequence_that_is_too_long_is_refused_before_the_start(config, folder, vocab_size, length, rule):
    write(folder, 3, length=length, vocab_size=vocab_size)

    with pytest.raises(UserError, match=rf"{length} tokens, but {rule}; raise it to {length}"):
        check_files(config, folder, 0, vocab_size)


def test_a_sequence_that_is_too_long_is_refused_in_a_file_whose_header_has_no_lengths(config, folder, vocab_size):
    write(folder, 1, length=5, vocab_size=vocab_size)
    header, groups = read_rollouts(rollout_files(folder)[1])
    write_parts(folder, replace(header, longest_prompt=0, longest_response=0), [groups])

    rollouts = RecordedRollouts(config, folder, 0)
    with pytest.raises(UserError, match=r"5 tokens, but rollout\.max_response_length=4; raise it to 5"):
        rollouts.take()


def test_training_and_rollout_only_runs_do_not_share_a_directory(config, tmp_path, vocab_size):
    directory = RunDirectory(tmp_path)
    write(directory.rollouts, 1, vocab_size=vocab_size)
    with pytest.raises(UserError, match=r"choose run_dir=.* and --rollouts-from"):
        check_resumable(config, directory)
    check_resumable(config, directory, rollout_only=True)

    directory.metrics.touch()
    check_resumable(config, directory)
    with pytest.raises(UserError, match="holds a training run"):
        check_resumable(config, directory, rollout_only=True)


@pytest.mark.parametrize(("key", "recorded"), [("temperature", 0.6), ("top_p", 0.9), ("top_k", 20), ("min_p", 0.1)])
def test_files_that_were_sampled_otherwise_are_refused_with_both_values_and_the_way_out(
    config, folder, vocab_size, key, recorded
):
    sampling = config.rollout.sampling
    write(folder, 2, vocab_size=vocab_size, sampling=sampling | {key: recorded})
    rule = rf"sampled with rollout\.{key}={recorded}, and the configuration has rollout\.{key}={sampling[key]}:"

    with pytest.raises(UserError, match=rule + ".*recomputed without rollout_correction and off_policy_mask_threshold"):
        check_files(config, folder, 0, vocab_size)

    update = {"behaviour_policy": "recomputed"}
    recomputed = config.model_copy(update={"algorithm": config.algorithm.model_copy(update=update)})
    check_files(recomputed, folder, 0, vocab_size)


def test_files_without_the_tokens_that_the_trainer_is_to_keep_are_refused(config, folder, vocab_size):
    keeping = config.model_copy(update={"algorithm": config.algorithm.model_copy(update={"keep_sampling_mask": True})})
    with pytest.raises(UserError, match=r"has no kept_tokens, .* set it to false with .*=recomputed"):
        check_files(keeping, folder, 0, vocab_size)


@pytest.mark.parametrize("keeps", [False, True])
def test_kept_tokens_of_files_are_used_only_if_the_trainer_is_to_keep_them(config, folder, vocab_size, keeps):
    path = folder / "step-00000001.parquet"
    header, groups = read_rollouts(path)
    kept = [
        Group(g.prompt, tuple(replace(t, kept_tokens=~t.response_token_ids) for t in g.trajectories)) for g in groups
    ]
    write_rollouts(folder, header, kept, None)
    algorithm = config.algorithm.model_copy(update={"keep_sampling_mask": keeps})
    settings = {"algorithm": algorithm, "trainer": config.trainer.model_copy(update={"total_steps": 1})}

    scored, _ = RecordedRollouts(config.model_copy(update=settings), folder, 0).take()

    found = [None if t.kept_tokens is None else t.kept_tokens.tolist() for g in scored.groups for t in g.trajectories]
    assert found == [[-2, -2] if keeps else None] * 4


def test_files_that_do_not_say_how_they_were_sampled_or_say_the_same_are_taken(config, folder, vocab_size):
    write(folder, 2, vocab_size=vocab_size, sampling=config.rollout.sampling)

    check_files(config, folder, 0, vocab_size)
    rollouts = RecordedRollouts(config, folder, 0)
    assert [rollouts.take()[0].sampling for _ in range(2)] == [{}, config.rollout.sampling]
