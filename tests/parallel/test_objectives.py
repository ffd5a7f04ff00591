"""Every objective with its additional terms gives the same updates in every layout as in one process."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, PreTrainedModel

from megatron_bapo.config.architecture import read_architecture
from megatron_bapo.data.rollout_samples import LOWER, REJECTED, UPPER
from megatron_bapo.planning.flops import forward_pass_flops
from megatron_bapo.records import Trajectory
from tests.kept_sets import kept_sets, only_kept
from tests.parallel.examples import NUM_EXAMPLES, TRACED, make_examples
from tests.parallel.launching import launch
from tests.parallel.layouts import LAYOUTS, MODELS, TEACHER
from tests.parallel.tensors import largest, largest_difference, load_folder, save_random_model, without_flops
from tests.tolerances import GRADIENT, LOG_PROB, PARAMETER

ALGORITHMS: dict[str, dict[str, Any]] = {
    "gspo": {"objective": "gspo", "loss_agg_mode": "seq-mean-token-mean", "clip_ratio_c": 3.0},
    "cispo": {"objective": "cispo", "adv_estimator": "rloo", "loss_agg_mode": "seq-mean-token-sum-norm"},
    "sapo-masked": {
        "objective": "sapo",
        "loss_agg_mode": "seq-mean-token-mean",
        "off_policy_mask_threshold": 0.02,
        "kl_loss_coef": 0.2,
        "kl_loss_unbiased": True,
    },
    "functions": {
        "objective": "function",
        "function": "tests.user_functions:dppo",
        "adv_estimator": "function",
        "adv_function": "tests.user_functions:by_length",
        "kl_reward_coef": 0.05,
    },
    "bapo-masked": {"objective": "bapo", "off_policy_mask_threshold": 0.02},
    "kept-tokens": {"objective": "ppo", "keep_sampling_mask": True, "kl_loss_coef": 0.2, "entropy_coeff": 0.05},
    "kl-loss-entropy": {"objective": "ppo", "kl_loss_coef": 0.2, "entropy_coeff": 0.05},
    "corrected-grpo": {
        "objective": "bapo",
        "rollout_correction": {"rollout_is": "token", "rollout_rs": "sequence", "rollout_rs_threshold": 3.0},
        "behaviour_policy": "recomputed",
        "adv_estimator": "grpo",
        "kl_reward_coef": 0.05,
    },
    "decoupled": {
        "objective": "bapo",
        "behaviour_policy": "recomputed",
        "rollout_correction": {
            "rollout_is": "sequence",
            "rollout_is_threshold": 1.2,
            "rollout_rs": "token",
            "rollout_rs_threshold": 3.0,
        },
        "adv_estimator": "reinforce_plus_plus",
        "kl_reward_coef": 0.05,
        "min_positive_loss_share": 0.6,
        "overlong": {"mode": "filter"},
    },
    "share-corrected": {
        "objective": "ppo",
        "behaviour_policy": "recomputed",
        "rollout_correction": {"rollout_is": "token", "rollout_is_threshold": 1.2, "rollout_rs": "token"},
        "min_positive_loss_share": 0.6,
    },
    "rejecting-baseline": {
        "objective": "ppo",
        "behaviour_policy": "recomputed",
        "rollout_correction": {"rollout_rs": "token", "rollout_rs_threshold": 3.0},
        "adv_estimator": "reinforce_plus_plus_baseline",
    },
    "distill": {"objective": "distill", "distillation": {"max_ratio": 1.2}},
    "bapo-distill": {
        "objective": "bapo",
        "distillation": {"coef": 0.3},
        "behaviour_policy": "recomputed",
        "rollout_correction": {"rollout_is": "token", "rollout_rs": "sequence", "rollout_rs_threshold": 3.0},
    },
}
REPLICAS = ("dp2-distopt-overlap", "tp2-sp-dp2", "pp2-dp2", "cp2-dp2")
SEVERAL_RANKS = (*REPLICAS, "pp2-vpp2-cp2")
FAULTY = "gspo-cp2-sequence-mean-of-one-rank"
FAULTS = {FAULTY: "sequence-mean-of-one-rank"}


def case(algorithm: str, layout: str, fault: str | None = None) -> dict:
    return {"algorithm": ALGORITHMS[algorithm], "parallel": LAYOUTS[layout].parallel, "fault": fault}


EXPERTS, ENGINES = "student-with-experts", "distill-engines"
TAUGHT_BY_ENGINES = {"objective": "distill", "distillation": {"max_ratio": 1.2, "engines": {}}}
EQUAL_REWARDS = {
    "one-equal-group": [0.1, 0.9, 0.4, 0.4, *[0.7] * 4, 1.0, 0.0, 0.0, 0.0],
    "equal-groups": [*[0.1] * 4, *[0.7] * 4, *[1.0] * 4],
}
"""Rewards that give trajectories advantage 0."""
IDLE = "whole-groups"
LONG_PROMPTS = {"num_prompt_tokens": 40, "trainer": {"max_tokens_per_gpu": 128}}
"""Whole groups on three of four ranks compute fewer tokens than parts of the groups on all four."""
CASES = {
    **{f"{a}-{layout}": case(a, layout) for layout in ("one-process", *SEVERAL_RANKS) for a in ALGORITHMS},
    **{f"{EXPERTS}-{layout}": case("distill", layout) | {"student": EXPERTS} for layout in ("one-process", "ep2")},
    **{
        f"{ENGINES}-{layout}": case("distill", layout) | {"algorithm": TAUGHT_BY_ENGINES}
        for layout in ("one-process", *REPLICAS)
    },
    **{
        f"{name}-{'skip' if skip else 'train'}-{layout}": {
            "algorithm": {"overlong": {"mode": "filter"}},
            "parallel": LAYOUTS[layout].parallel,
            "fault": None,
            "rewards": rewards,
            "trainer": {"skip_zero_advantage": skip},
        }
        for name, rewards in EQUAL_REWARDS.items()
        for layout in ("one-process", *SEVERAL_RANKS)
        for skip in ((False, True) if layout == "one-process" else (True,))
    },
    **{f"{IDLE}-{layout}": case("corrected-grpo", layout) | LONG_PROMPTS for layout in ("one-process", "dp4-distopt")},
    FAULTY: case("gspo", "cp2", FAULTS[FAULTY]),
}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with `NAME/` for every case."""
    root = tmp_path_factory.mktemp("objectives")
    for seed, name in enumerate(("model", "reference")):
        save_random_model(AutoModelForCausalLM.from_config(MODELS["qwen3"]), root / name, seed)
    save_random_model(AutoModelForCausalLM.from_config(TEACHER), root / "teacher", 2)
    save_random_model(AutoModelForCausalLM.from_config(MODELS["qwen3_moe"]), root / EXPERTS, 3)
    folders = {name: str(root / name) for name in ("reference", "teacher")}
    save_file(teacher_log_probs(root / "teacher"), root / "scored.safetensors")
    folders["scored"] = str(root / "scored.safetensors")
    cases = [
        {**settings, **folders, "name": name, "model": str(root / settings.get("student", "model"))}
        for name, settings in CASES.items()
    ]
    launch("objective_ranks.py", cases, root, 4)
    return root


def teacher_log_probs(folder: Path) -> dict[str, torch.Tensor]:
    """Return transformers' log-probs of each trajectory, in the place of those that engines give."""
    model, examples = AutoModelForCausalLM.from_pretrained(folder), make_examples(MODELS["qwen3"].vocab_size)
    with torch.no_grad():
        return {str(index): sampled_log_probs(model, each.trajectory) for index, each in enumerate(examples)}


def gradient_difference(results: Path, name: str, algorithm: str) -> float:
    ours, theirs = (load_folder(results / n / "gradients") for n in (name, f"{algorithm}-one-process"))
    return largest_difference(ours, theirs) / largest(theirs)


def metrics(results: Path, name: str) -> dict[str, dict[str, float]]:
    return json.loads((results / name / "metrics.json").read_text())


@pytest.mark.parametrize("layout", SEVERAL_RANKS)
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_two_updates_match_one_process(results: Path, algorithm: str, layout: str) -> None:
    name, one = f"{algorithm}-{layout}", f"{algorithm}-one-process"
    assert gradient_difference(results, name, algorithm) < GRADIENT
    assert largest_difference(load_folder(results / name / "final"), load_folder(results / one / "final")) < PARAMETER


@pytest.mark.parametrize("layout", SEVERAL_RANKS)
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_batch_and_metrics_match_one_process(results: Path, algorithm: str, layout: str) -> None:
    names = f"{algorithm}-{layout}", f"{algorithm}-one-process"
    ours, theirs = (load_file(results / name / "examples.safetensors") for name in names)
    assert largest_difference(ours, theirs) < 10 * LOG_PROB
    ours, theirs = (metrics(results, name) for name in names)
    assert ours.keys() == theirs.keys()
    for part in theirs:
        assert without_flops(ours[part]) == pytest.approx(without_flops(theirs[part]), rel=1e-4, abs=1e-6, nan_ok=True)


def traces(results: Path, name: str) -> list[dict[str, dict[str, Any]]]:
    """Return the trace of each rank."""
    return [json.loads(file.read_text()) for file in sorted((results / name).glob("trace-*.json"))]


@pytest.mark.parametrize("layout", SEVERAL_RANKS)
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_only_the_main_rank_gathers_the_trace_of_one_process(results: Path, algorithm: str, layout: str) -> None:
    (one,) = traces(results, f"{algorithm}-one-process")
    ours, *others = traces(results, f"{algorithm}-{layout}")
    assert others == [{}] * (LAYOUTS[layout].world_size - 1)
    assert ours.keys() == one.keys() == {str(index) for index in TRACED}
    for index, trajectory in one.items():
        for name, values in trajectory.items():
            assert ours[index][name] == pytest.approx(values, rel=1e-4, abs=1e-5), (index, name)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_trace_has_the_first_update_of_each_trajectory(results: Path, algorithm: str) -> None:
    (trace,) = traces(results, f"{algorithm}-one-process")
    filtered = algorithm == "decoupled"  # its fifth trajectory is truncated, and no update uses it
    assert {index: found["update"] for index, found in trace.items()} == {
        str(index): int(not (filtered and index == 5)) for index in TRACED
    }
    assert all(len(found["log_probs"]) == len(found["marks"]) for found in trace.values())
    marks = [int(mark) for found in trace.values() for mark in found["marks"]]
    corrected = "rollout_correction" in ALGORITHMS[algorithm]  # its ratios are 1 in the first update
    is_marked = any(mark & (REJECTED if corrected else UPPER | LOWER) for mark in marks)
    assert is_marked == (ALGORITHMS[algorithm]["objective"] != "sapo")


def held(results: Path, name: str) -> list[list[int]]:
    """Return the trajectories of each replica, which all its ranks have."""
    ranks = [json.loads(file.read_text()) for file in sorted((results / name).glob("held-*.json"))]
    replicas = [next(rank["held"] for rank in ranks if rank["replica"] == replica) for replica in (0, 1)]
    assert [rank["held"] for rank in ranks] == [replicas[rank["replica"]] for rank in ranks]
    return replicas


@pytest.mark.parametrize("layout", REPLICAS)
def test_each_replica_has_the_tokens_of_its_own_trajectories(results: Path, layout: str) -> None:
    first, second = held(results, f"gspo-{layout}")
    assert 0 < len(second) < NUM_EXAMPLES
    assert first == sorted({*range(NUM_EXAMPLES)} - {*second})


@pytest.mark.parametrize("layout", REPLICAS)
def test_no_replica_has_the_whole_batch_where_tokens_have_advantages_of_their_own(results: Path, layout: str) -> None:
    first, second = held(results, f"decoupled-{layout}")
    assert {*first, *second} == {*range(NUM_EXAMPLES)}
    assert max(len(first), len(second)) < NUM_EXAMPLES


@pytest.mark.parametrize("layout", ["one-process", *SEVERAL_RANKS])
def test_updates_without_trajectories_of_advantage_0_match_updates_on_all(results: Path, layout: str) -> None:
    for rewards in EQUAL_REWARDS:
        skipped, trained = f"{rewards}-skip-{layout}", f"{rewards}-train-one-process"
        ours, theirs = (load_folder(results / name / "gradients") for name in (skipped, trained))
        assert largest_difference(ours, theirs) <= GRADIENT * largest(theirs)
        ours, theirs = (load_folder(results / name / "final") for name in (skipped, trained))
        assert largest_difference(ours, theirs) < PARAMETER
        ours, theirs = (metrics(results, name) for name in (skipped, trained))
        for update in ("update-0", "update-1"):
            for name in ("actor/loss", "actor/grad_norm", "actor/bapo_clip_low", "actor/bapo_clip_high"):
                assert ours[update][name] == pytest.approx(theirs[update][name], rel=1e-4, abs=1e-7), name
            assert ours[update]["perf/model_flops"] < theirs[update]["perf/model_flops"]


def test_a_rank_without_trajectories_takes_part_in_the_updates(results: Path) -> None:
    name, one = f"{IDLE}-dp4-distopt", f"{IDLE}-one-process"
    held = [json.loads(file.read_text())["held"] for file in (results / name).glob("held-*.json")]
    assert sorted(held) == [[], [0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]
    assert gradient_difference(results, name, IDLE) < GRADIENT
    assert largest_difference(load_folder(results / name / "final"), load_folder(results / one / "final")) < PARAMETER
    ours, theirs = metrics(results, name), metrics(results, one)
    for part in theirs:
        assert without_flops(ours[part]) == pytest.approx(without_flops(theirs[part]), rel=1e-4, abs=1e-6, nan_ok=True)


def test_a_trace_has_no_update_of_trajectories_with_advantage_0(results: Path) -> None:
    (trace,) = traces(results, "one-equal-group-skip-one-process")
    assert {index: found["update"] for index, found in trace.items()} == {"9": 1, "4": 0, "5": 0, "1": 1, "2": 1}


def test_a_sequence_mean_over_only_one_context_rank_is_detected(results: Path) -> None:
    assert gradient_difference(results, FAULTY, "gspo") > 100 * GRADIENT


def test_scores_of_the_reference_and_the_proximal_policy_match_transformers(results: Path) -> None:
    """Compare at the sampling temperature and over the whole vocabulary."""
    scored = load_file(results / "decoupled-pp2-vpp2-cp2" / "examples.safetensors")
    for kind, folder in (("proximal", "model"), ("reference", "reference")):
        model = AutoModelForCausalLM.from_pretrained(results / folder)
        for index, example in enumerate(make_examples(model.config.vocab_size)):
            with torch.no_grad():
                expected = sampled_log_probs(model, example.trajectory)
            assert (scored[f"{kind}_log_probs.{index}"] - expected).abs().max() < 10 * LOG_PROB


def sampled_log_probs(model: PreTrainedModel, trajectory: Trajectory) -> torch.Tensor:
    """Return transformers' log-probs of the response at the sampling temperature."""
    logits = sampling_logits(model, trajectory)
    return logits.log_softmax(-1).gather(1, torch.from_numpy(trajectory.response_token_ids).long()[:, None])[:, 0]


def sampling_logits(model: PreTrainedModel, trajectory: Trajectory) -> torch.Tensor:
    """Return transformers' logits of the response at the sampling temperature."""
    prompt, response = (
        torch.from_numpy(ids).long() for ids in (trajectory.prompt_token_ids, trajectory.response_token_ids)
    )
    return model(torch.cat([prompt, response])[None]).logits[0, len(prompt) - 1 : -1] / 0.8


@pytest.mark.parametrize("layout", ["one-process", *SEVERAL_RANKS])
def test_scores_of_a_teacher_of_another_family_and_size_match_transformers(results: Path, layout: str) -> None:
    scored = load_file(results / f"distill-{layout}" / "examples.safetensors")
    model = AutoModelForCausalLM.from_pretrained(results / "teacher")
    for index, example in enumerate(make_examples(MODELS["qwen3"].vocab_size)):
        with torch.no_grad():
            expected = sampled_log_probs(model, example.trajectory)
        assert (scored[f"teacher_log_probs.{index}"] - expected).abs().max() < 10 * LOG_PROB


def test_experts_of_student_and_teacher_on_different_ranks_are_distilled_as_in_one_process(results: Path) -> None:
    """Expert parallelism splits the experts of both models."""
    names = f"{EXPERTS}-ep2", f"{EXPERTS}-one-process"
    assert gradient_difference(results, names[0], EXPERTS) < GRADIENT
    ours, theirs = (load_folder(results / name / "final") for name in names)
    assert largest_difference(ours, theirs) < PARAMETER
    ours, theirs = (load_file(results / name / "examples.safetensors") for name in names)
    assert largest_difference(ours, theirs) < 10 * LOG_PROB
    ours, theirs = (metrics(results, name)["update-0"] for name in names)
    assert ours == pytest.approx(theirs, rel=1e-4, abs=1e-6, nan_ok=True)
    model = AutoModelForCausalLM.from_pretrained(results / "teacher")
    scored = load_file(results / names[0] / "examples.safetensors")
    for index, example in enumerate(make_examples(MODELS["qwen3_moe"].vocab_size)):
        with torch.no_grad():
            expected = sampled_log_probs(model, example.trajectory)
        assert (scored[f"teacher_log_probs.{index}"] - expected).abs().max() < 10 * LOG_PROB


def test_the_first_update_of_distillation_has_the_gradient_of_plain_torch(results: Path) -> None:
    """Differentiate the reverse KL's policy gradient through transformers' student, with transformers' teacher."""
    student, teacher = (AutoModelForCausalLM.from_pretrained(results / name) for name in ("model", "teacher"))
    examples = make_examples(MODELS["qwen3"].vocab_size)
    num_tokens, divergence = sum(example.trajectory.num_sampled for example in examples), 0.0
    for example in examples:
        log_p = sampled_log_probs(student, example.trajectory)
        with torch.no_grad():
            log_ratio = log_p - sampled_log_probs(teacher, example.trajectory)
            behaviour = torch.from_numpy(example.trajectory.behaviour_log_probs)
            importance = (log_p - behaviour).exp().clamp(max=1.2)
        divergence += log_ratio.sum().item() / num_tokens
        ((importance * log_ratio * log_p).sum() / num_tokens).backward()
    expected = {name: 0.1 * parameter.grad for name, parameter in student.named_parameters()}
    found = load_folder(results / "distill-one-process" / "gradients")
    assert largest_difference(found, expected) < GRADIENT * largest(expected)
    first = metrics(results, "distill-one-process")["update-0"]
    assert first["actor/teacher_kl"] == pytest.approx(divergence, rel=1e-5)
    assert 0 < first["actor/pg_clipfrac_upper"] < 1


def test_the_first_update_of_masked_sapo_has_the_gradient_of_plain_torch(results: Path) -> None:
    """Differentiate the paper's formulas, with the unbiased k3 KL, through transformers' models."""
    policy, reference = (AutoModelForCausalLM.from_pretrained(results / name) for name in ("model", "reference"))
    settings, num_masked = ALGORITHMS["sapo-masked"], 0
    examples = make_examples(MODELS["qwen3"].vocab_size)
    advantages = load_file(results / "sapo-masked-one-process" / "examples.safetensors")
    for index, example in enumerate(examples):
        log_p = sampled_log_probs(policy, example.trajectory)
        with torch.no_grad():
            log_reference = sampled_log_probs(reference, example.trajectory)
        log_ratio = log_p - torch.from_numpy(example.trajectory.behaviour_log_probs)
        (advantage,) = set(advantages[f"advantage.{index}"].tolist())
        masked = advantage < 0 and -log_ratio.mean().item() > settings["off_policy_mask_threshold"]
        tau = 1.0 if advantage > 0 else 1.05
        gain = (4 / tau * torch.sigmoid(tau * (log_ratio.exp() - 1)) * advantage * (not masked)).mean()
        x = log_reference - log_p
        divergence = (log_ratio.exp() * (x.exp() - 1 - x)).mean()
        ((settings["kl_loss_coef"] * divergence - gain) / len(examples)).backward()
        num_masked += masked * example.trajectory.num_sampled
    expected = {name: 0.1 * parameter.grad for name, parameter in policy.named_parameters()}
    found = load_folder(results / "sapo-masked-one-process" / "gradients")
    assert largest_difference(found, expected) < GRADIENT * largest(expected)
    first = metrics(results, "sapo-masked-one-process")["update-0"]
    num_tokens = sum(example.trajectory.num_sampled for example in examples)
    assert first["actor/off_policy_masked_share"] == pytest.approx(num_masked / num_tokens)
    assert 0 < num_masked < num_tokens


def test_the_first_update_over_kept_tokens_has_the_gradient_of_plain_torch(results: Path) -> None:
    """Differentiate PPO, the entropy and the k3 KL of distributions over the kept tokens, with transformers' models."""
    policy, reference = (AutoModelForCausalLM.from_pretrained(results / name) for name in ("model", "reference"))
    examples = make_examples(MODELS["qwen3"].vocab_size)
    advantages = load_file(results / "kept-tokens-one-process" / "examples.safetensors")
    num_tokens, entropy_sum = sum(example.trajectory.num_sampled for example in examples), 0.0
    for index, example in enumerate(examples):
        response = torch.from_numpy(example.trajectory.response_token_ids).long()
        sets = kept_sets(response.tolist(), policy.config.vocab_size)
        log_p, log_reference = (
            only_kept(sampling_logits(model, example.trajectory), sets).log_softmax(-1) for model in (policy, reference)
        )
        entropy = -(log_p.exp() * log_p.nan_to_num(neginf=0.0)).sum(-1)
        own, theirs = (each.gather(1, response[:, None])[:, 0] for each in (log_p, log_reference.detach()))
        ratio = (own - torch.from_numpy(example.trajectory.behaviour_log_probs)).exp()
        (advantage,) = set(advantages[f"advantage.{index}"].tolist())
        gain = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
        divergence = (theirs - own).exp() - 1 - (theirs - own)
        ((0.2 * divergence - gain - 0.05 * entropy).sum() / num_tokens).backward()
        entropy_sum += entropy.sum().item()
    expected = {name: 0.1 * parameter.grad for name, parameter in policy.named_parameters()}
    found = load_folder(results / "kept-tokens-one-process" / "gradients")
    assert largest_difference(found, expected) < GRADIENT * largest(expected)
    first = metrics(results, "kept-tokens-one-process")["update-0"]
    assert first["actor/entropy"] == pytest.approx(entropy_sum / num_tokens, rel=1e-5)


def test_masked_responses_do_not_count_in_the_search_for_bounds(results: Path) -> None:
    masked, plain = (metrics(results, f"{name}-one-process")["update-0"] for name in ("bapo-masked", "sapo-masked"))
    assert masked["actor/off_policy_masked_share"] == plain["actor/off_policy_masked_share"] > 0
    assert masked["actor/bapo_positive_share"] == pytest.approx(masked["actor/positive_loss_share"], rel=1e-6)


@pytest.mark.parametrize("layout", ["one-process", *REPLICAS])
def test_log_probs_of_a_teacher_on_engines_give_the_updates_of_a_teacher_in_the_trainer(
    results: Path, layout: str
) -> None:
    name, one = f"{ENGINES}-{layout}", "distill-one-process"
    assert gradient_difference(results, name, "distill") < GRADIENT
    assert largest_difference(load_folder(results / name / "final"), load_folder(results / one / "final")) < PARAMETER
    ours, theirs = metrics(results, name), metrics(results, one)
    for update in ("update-0", "update-1"):
        assert ours[update] == pytest.approx(theirs[update], rel=1e-4, abs=1e-6, nan_ok=True)
    assert ours["batch"]["perf/model_flops"] == 0  # the trainer runs no pass of a teacher


def test_every_additional_term_has_an_effect(results: Path) -> None:
    added = metrics(results, "kl-loss-entropy-one-process")["update-0"]
    assert added["actor/kl_loss"] > 0.01
    decoupled = metrics(results, "decoupled-one-process")
    batch = decoupled["batch"]
    assert abs(batch["actor/reward_kl_penalty"]) > 0.001
    assert 0 < batch["rollout_corr/rollout_rs_masked_fraction"] < 0.5
    assert 0 < batch["rollout_corr/rollout_is_ratio_fraction_high"] < 1
    assert decoupled["update-0"]["actor/ppo_kl"] == pytest.approx(0.0, abs=1e-6)
    assert abs(decoupled["update-1"]["actor/ppo_kl"]) > 1e-4
    assert math.isfinite(decoupled["update-1"]["actor/bapo_positive_share"])
    clipped = metrics(results, "gspo-one-process")["update-0"]
    assert 0 < clipped["actor/pg_clipfrac"] < 1
    weighted = metrics(results, "share-corrected-one-process")["update-0"]
    assert weighted["actor/positive_loss_share"] == pytest.approx(0.6, rel=1e-6)


@pytest.mark.parametrize("layout", ["one-process", *SEVERAL_RANKS])
def test_scoring_a_batch_counts_as_a_forward_pass_of_each_model(results: Path, layout: str) -> None:
    scored = {name: metrics(results, f"{name}-{layout}")["batch"]["perf/model_flops"] for name in ALGORITHMS}
    trained = metrics(results, f"kl-loss-entropy-{layout}")["update-0"]["perf/model_flops"]
    num_passes = {
        "functions": 1,
        "sapo-masked": 1,
        "kept-tokens": 1,
        "kl-loss-entropy": 1,
        "corrected-grpo": 2,
        "decoupled": 2,
        "share-corrected": 1,
        "rejecting-baseline": 1,
        "bapo-distill": 1,
    }
    lengths = [example.num_input_tokens for example in make_examples(MODELS["qwen3"].vocab_size)]
    taught = forward_pass_flops(read_architecture(results / "teacher"), lengths)
    expected = {
        name: num_passes.get(name, 0) * trained / 3 + taught * ("distillation" in algorithm)
        for name, algorithm in ALGORITHMS.items()
    }
    assert scored == pytest.approx(expected)
