from typing import Any

from megatron_bapo.config.arithmetic import batch_arithmetic
from megatron_bapo.config.schema import Config


def rows(**sections: dict[str, Any]) -> dict[str, str]:
    trainer = {"total_steps": 10, "train_batch_size": 1024, "ppo_mini_batch_size": 256, "ppo_epochs": 2}
    tree = {
        "run_dir": "runs/test",
        "model": {"create": {}},
        "parallel": {"world_size": 8, "tensor_model_parallel_size": 2, "sequence_parallel": True},
        "data": {"train": {"path": "x.jsonl"}, "max_prompt_length": 1000},
        "rollout": {"n": 16, "max_response_length": 3000},
        "trainer": trainer | {"max_tokens_per_gpu": 10000},
    }
    return dict(batch_arithmetic(Config.model_validate(tree | sections)))


def test_everything_is_counted_in_trajectories() -> None:
    table = rows()
    assert table["trainer"] == "8 processes = 2 tensor x 1 pipeline x 4 data parallel, sequence parallel"
    uneven = {"world_size": 2, "pipeline_model_parallel_size": 2, "pipeline_model_parallel_layout": "auto"}
    assert rows(parallel=uneven)["trainer"].endswith("2 pipeline x 1 data parallel, uneven pipeline stages")
    assert table["each step"] == "64 prompts x 16 = 1,024 trajectories"
    assert table["updates per step"] == "2 passes x 1,024 / 256 trajectories = 8"
    assert table["each update"] == "256 trajectories = 64 x 4 data-parallel ranks"
    odd = rows(parallel={"world_size": 3})["each update"]
    assert odd == "256 trajectories = 85.3 x 3 data-parallel ranks"
    assert table["whole run"] == "10 steps x 8 = 80 updates on 10,240 trajectories"


def test_the_teacher_is_named_with_the_objective() -> None:
    assert rows()["objective"] == "bapo, with advantages by grpo"
    distillation = {"teacher": "models/large"}
    assert rows(algorithm={"distillation": distillation})["objective"] == (
        "bapo, with advantages by grpo, and distillation from the teacher models/large"
    )
    alone = {"objective": "distill", "distillation": distillation}
    assert rows(algorithm=alone)["objective"] == "distill, towards the teacher models/large"
    engines = {"num_engines": 2, "tensor_parallel_size": 4}
    served = rows(algorithm={"distillation": {**distillation, "engines": engines}})
    assert served["engines"].endswith(" parallel, and 2 x 4 tensor parallel of the teacher")


def test_token_limits_are_counted_for_the_longest_trajectories() -> None:
    assert "1,000 prompt + 3,000 response = 4,000 at most per trajectory" in rows()["tokens"]
    assert "10,000 holds 2 such trajectories, so an update takes at most 32 micro-batches per rank" in rows()["tokens"]


def test_held_out_samples_and_warm_start_are_listed() -> None:
    assert rows()["held-out samples"] == "none: data.validation is not set"
    assert "warm start" not in rows()
    data = {"train": {"path": "x.jsonl"}, "validation": {"path": "y.jsonl"}}
    table = rows(data=data, evaluation={"every_steps": 5}, warm_start={"num_steps": 300})
    assert table["held-out samples"] == "4 per prompt, before the first and after the last step, and every 5 steps"
    assert table["warm start"] == "300 supervised updates of 128 demonstrations"


def test_prompts_and_objective_are_listed() -> None:
    assert (rows()["training prompts"], rows()["objective"]) == ("x.jsonl", "bapo, with advantages by grpo")
    tasks = {"reasoning_gym": {"spell_backward": {}, "chain_sum": {"max_terms": 2}}, "size": 15000}
    table = rows(data={"train": tasks}, algorithm={"objective": "gspo", "adv_estimator": "rloo"})
    assert table["training prompts"] == "15,000 of reasoning_gym: spell_backward, chain_sum"
    assert table["objective"] == "gspo, with advantages by rloo"


def test_the_rollout_mode_and_the_staleness_are_listed() -> None:
    assert rows()["rollouts"] == "sync: while the trainer waits"
    rollout = {"n": 16, "max_response_length": 3000, "mode": "async", "max_staleness": 2}
    table = rows(rollout=rollout | {"partial_rollout": {"token_budget": 500}, "filter_groups": {"enable": True}})
    assert table["rollouts"] == (
        "async: also while the trainer trains, tokens up to 2 policy versions old, responses in segments of 500 "
        "tokens, groups of equal rewards dropped and replaced"
    )


def test_the_behaviour_policy_is_listed() -> None:
    assert rows()["behaviour policy"].startswith("rollout: ratios are current / rollout log-probs")
    correction = {"rollout_is": "token", "rollout_rs": "geometric"}
    row = rows(algorithm={"behaviour_policy": "recomputed", "rollout_correction": correction})["behaviour policy"]
    assert row.endswith("gives token importance weights and geometric rejection")
    assert rows(algorithm={"behaviour_policy": "recomputed"})["behaviour policy"].endswith("gives no correction")
