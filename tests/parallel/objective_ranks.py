"""Run by `launch`: two updates on one rollout batch under each objective.

A case is {"name", "model", "reference", "teacher", "scored", "parallel", "algorithm", "fault"}, and may have "trainer"
settings, the "rewards" of the trajectories and the length "num_prompt_tokens" of their prompts. The main rank shares
the batch out. The algorithm's section `distillation` gets the teacher; if it has engines, trajectories get the
log-probs that are in the file `scored`. `out/NAME/` gets which trajectories' tokens each rank then has
(`held-RANK.json`), what the batch was found to be (`examples.safetensors`), the first update's gradients, the
parameters after the second, and metrics.
"""

import json
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
from examples import GROUP_SIZE, LEARNING_RATE, TRACED, make_config, make_examples
from faults import FAULTS
from running import run_cases
from safetensors.torch import load_file, save_file

from megatron_bapo.config.schema import Config
from megatron_bapo.kept_tokens import kept_tokens_of
from megatron_bapo.metrics.values import scalars
from megatron_bapo.model.hf_export import save_hugging_face, write_stage
from megatron_bapo.parallel.collectives import barrier, gather_objects
from megatron_bapo.parallel.groups import ParallelGroups
from megatron_bapo.records import Trajectory
from megatron_bapo.trainer import rollout_batch
from megatron_bapo.trainer.batch_advantages import advantages_on_main
from megatron_bapo.trainer.micro_batches import Example
from megatron_bapo.trainer.policy_update import reduce_metrics, update_policy
from megatron_bapo.trainer.scatter_batch import scatter_batch
from megatron_bapo.trainer.token_trace import TokenTrace, TracedTrajectory
from megatron_bapo.trainer.worker import create_reference, create_teacher, create_worker
from tests.kept_sets import kept_sets


def make_trajectories(vocab_size: int, rewards: list[float] | None) -> list[Trajectory]:
    """Return the trajectories of the matrix with rewards, random ones by default; one trajectory is truncated."""
    rewards = rewards or np.random.default_rng(1).random(12).round(1).tolist()
    return [
        replace(example.trajectory, reward=reward, finish_reason="length" if index == 5 else "stop")
        for index, (example, reward) in enumerate(zip(make_examples(vocab_size), rewards, strict=True))
    ]


def with_kept_tokens(trajectory: Trajectory, vocab_size: int) -> Trajectory:
    sampled = trajectory.response_token_ids.tolist()
    return replace(trajectory, kept_tokens=kept_tokens_of(sampled, kept_sets(sampled, vocab_size)))


def arrays(examples: list[Example]) -> dict[str, torch.Tensor]:
    """Return every per-token array of the batch, without placeholders."""
    names = ("proximal_log_probs", "reference_log_probs", "teacher_log_probs", "correction_weights")
    return {
        f"{name}.{index}": torch.from_numpy(np.array(value))
        for index, example in enumerate(examples)
        for name in names
        if (value := getattr(example, name)) is not None and getattr(value, "strides", None) != (0,)
    }


def described(found: TracedTrajectory) -> dict:
    """Return a traced trajectory as JSON values."""
    figures = {name: values.tolist() for name, values in found.figures.items()}
    return {"update": found.update, "bounds": [*found.clip_bounds], **figures}


def run_case(case: dict, out: Path, groups: ParallelGroups) -> None:
    config = make_config(Path(case["model"]), out / "run", case["parallel"], "float32", packing=True)
    algorithm = case["algorithm"]
    if "distillation" in algorithm:
        algorithm = algorithm | {"distillation": algorithm["distillation"] | {"teacher": case["teacher"]}}
    tree = config.model_dump() | {"algorithm": algorithm, "rollout": {"n": GROUP_SIZE, "temperature": 0.8}}
    config = Config.model_validate(tree | {"trainer": tree["trainer"] | case.get("trainer", {})})
    worker = create_worker(config, config.model_path, groups)
    reference = None
    if config.algorithm.needs_reference:
        reference = create_reference(config, Path(case["reference"]), groups)
    given, batches = None, []
    if groups.is_main:
        vocab_size = worker.model.architecture.vocab_size
        given = make_trajectories(vocab_size, case.get("rewards"))
        if config.algorithm.keep_sampling_mask:
            given = [with_kept_tokens(trajectory, vocab_size) for trajectory in given]
        if (num := case.get("num_prompt_tokens")) is not None:
            given = [replace(each, prompt_token_ids=np.resize(each.prompt_token_ids, num)) for each in given]
        if config.algorithm.teacher_engines is not None:
            scored = load_file(case["scored"])
            given = [replace(each, teacher_log_probs=scored[str(i)].numpy()) for i, each in enumerate(given)]
        batches = rollout_batch.packed_together(config, given, step=0)
    trajectories = scatter_batch(worker, given, batches)
    teacher = create_teacher(config, groups)
    examples, metrics = rollout_batch.make_examples(worker, reference, trajectories, teacher)
    held = [i for i, trajectory in enumerate(trajectories) if np.isfinite(trajectory.behaviour_log_probs).all()]
    (out / f"held-{groups.global_rank}.json").write_text(json.dumps({"replica": groups.data.rank, "held": held}))
    advantages = advantages_on_main(examples, groups)
    whole = {name: value for part in gather_objects(arrays(examples), groups.data) for name, value in part.items()}
    if groups.is_main:
        named = {f"advantage.{i}": torch.from_numpy(np.array(each)) for i, each in enumerate(advantages)}
        save_file(whole | named, out / "examples.safetensors")
        (out / "gradients").mkdir()
    barrier(groups)
    learned, found = rollout_batch.minibatches(config, trajectories, step=0)[0], {"batch": scalars(metrics)}
    chosen = [examples[i] for i in learned]
    trace = TokenTrace.of(trajectories, TRACED)
    with FAULTS[case["fault"]]():
        for number in range(2):
            on_policy = config.algorithm.behaviour_policy == "recomputed" and number == 0
            marked = rollout_batch.minibatch(config, trace.mark(chosen, learned))
            updated = update_policy(worker, marked, lr=LEARNING_RATE, on_policy=on_policy, trace=trace)
            found[f"update-{number}"] = scalars(reduce_metrics(updated, groups))
            if number == 0:
                read = partial(worker.optimizer.read, state="exp_avg")
                write_stage(out / "gradients", worker.model.trained, groups, read=read)
    save_hugging_face(worker.model, groups, config.model_path, out / "final")
    traced = {index: trace.gather(index, groups) for index in TRACED}
    found_here = {index: described(each) for index, each in traced.items() if each is not None}
    (out / f"trace-{groups.global_rank}.json").write_text(json.dumps(found_here))
    if groups.is_main:
        (out / "metrics.json").write_text(json.dumps(found))


if __name__ == "__main__":
    run_cases(run_case)
