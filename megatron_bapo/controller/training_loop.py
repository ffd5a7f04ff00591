"""The training loop: every trainer rank runs it, from warm start to export.

    rank 0                        all ranks                                   Ray
    ------                        ---------                                   ---
    take() ──────────────────────────────────────────────────────► service ─► engines ─► rewards
      └─ groups ◄──────────────────────────────────────────────────────────────────────────┘
      └─ scatter ───────────────► examples ─► minibatches ─► for each: score ─► clip bounds ─► update
                                  publish weights ─► store (shared memory)
    load_weights(version) ───────────────────────────────────────► engines read the store
      └─ probe: the engines' log-probs must match the trainer's
    metrics, checkpoint

With --rollouts-from FOLDER instead of --ray, groups come from files and no weights are published.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from typing import TypeVar

from megatron_bapo.controller.evaluation import rollout_metrics, samples, validation_metrics
from megatron_bapo.controller.frozen_models import load_frozen_models
from megatron_bapo.controller.run import Run, Timer, checkpoint, checkpoint_is_due
from megatron_bapo.controller.warm_start import warm_start
from megatron_bapo.controller.weight_update import answered, probe, score_probe, update_weights
from megatron_bapo.metrics.cpu_time import family_cpu_s
from megatron_bapo.metrics.token_table import TokenTable
from megatron_bapo.metrics.values import Last, Metric, Sum, merge
from megatron_bapo.parallel.collectives import broadcast_object, on_main
from megatron_bapo.parallel.groups import seed_update
from megatron_bapo.parallel.platform import device_name, memory_snapshot, now_s, profiled
from megatron_bapo.records import Prompt, Trajectory, grouped
from megatron_bapo.rollout.generation import ScoredGroups
from megatron_bapo.run_directory import FINISHED
from megatron_bapo.trainer.batch_advantages import advantages_on_main
from megatron_bapo.trainer.export import export
from megatron_bapo.trainer.gpu_metrics import gpu_step_metrics
from megatron_bapo.trainer.learning_rate import learning_rate
from megatron_bapo.trainer.policy_update import reduce_updates, update_policy
from megatron_bapo.trainer.rollout_batch import make_examples, minibatch, minibatches, packed_together
from megatron_bapo.trainer.scatter_batch import scatter_batch
from megatron_bapo.trainer.token_reservoir import TokenReservoir
from megatron_bapo.trainer.utilization import MODEL_FLOPS, utilization_metrics

WEIGHT_UPDATE = "updating the engines' weights"
T = TypeVar("T")


def train(run: Run) -> None:
    """Warm start, RL steps with evaluation around them, export. Returns early when a stop is requested."""
    warm_start(run)
    if run.stop_requested():
        checkpoint(run, wait=True)
        return
    run.frozen = load_frozen_models(run.worker, run.directory, run.announce, is_new=run.state.step == 0)
    prepare_engines(run)
    if evaluation_is_due(run):  # a resumed run repeats an evaluation that was interrupted
        evaluate(run)
    for step in run.remaining_steps():
        train_step(run, step)
        if checkpoint_is_due(run):
            checkpoint(run)
        if evaluation_is_due(run):
            evaluate(run)
    if run.state.step < run.config.trainer.total_steps:
        checkpoint(run, wait=True)
        return
    evaluate(run)
    run.announce("exporting the model in Hugging Face format")
    with run.colocation.trainer_turn():
        export(run.worker, run.directory.export, run.directory.adapter)
    run.checkpoints.finish()
    run.announce(FINISHED)


def train_step(run: Run, step: int) -> None:
    """Train on the next rollout batch, and record the step. The batch is freed before the next one arrives."""
    timer = Timer()
    with profiling(run, step), timer.phase("step"):
        scored, trajectories = take_groups(run, timer)
        run.colocation.to_trainer()
        start_cpu_s = family_cpu_s() if run.recorder else 0.0
        with timer.phase("update"), snapshot(run, step):
            metrics, updates, tokens = update_on_batch(run, scored, trajectories)
        if run.recorder is not None:
            metrics["perf/cpu_s/update"] = Last(family_cpu_s() - start_cpu_s)
        with timer.phase("weight_sync"):
            metrics |= update_engine_weights(run)
        run.state.step = step
    metrics |= gpu_step_metrics(run.telemetry, run.worker.groups) | run.checkpoints.metrics()
    record_step(run, scored, metrics, timer)
    if run.recorder is not None:
        run.recorder.write_updates(step, updates)
        run.recorder.write_tokens(step, tokens)


def prepare_engines(run: Run) -> None:
    """Wait for the engines, which serve the model of `model_path` as version 0, and send them the trainer's weights.

    A new run sends them as version 1 if they are others (`has_new_weights`), and otherwise only compares the two. A
    resumed run sends its weights under their saved policy version, so that the ages of saved tokens stay the same.
    Without engines only the version is counted.
    """
    if run.transport is not None:
        run.announce("starting the engines")
        on_main(run.engines and run.engines.wait_for_engines, run.worker.groups)
        run.colocation.manage(run.worker, run.frozen.models)
    if run.state.policy_version > 0:
        send_weights(run)
    elif run.config.has_new_weights:
        update_engine_weights(run)
    elif run.transport is not None:
        scored = score_probe(run.worker, run.engines)
        probe(run.worker, run.engines, run.colocation, policy_version=0, scored=scored)


def update_engine_weights(run: Run) -> dict[str, Metric]:
    """Publish the trainer's weights to every engine as the next policy version."""
    run.state.policy_version += 1
    return send_weights(run)


def send_weights(run: Run) -> dict[str, Metric]:
    """Send the trainer's weights to every engine under the current policy version."""
    if run.transport is None:
        return {}
    run.announce(WEIGHT_UPDATE)
    return update_weights(run.worker, run.engines, run.transport, run.colocation, run.state.policy_version)


def take_groups(run: Run, timer: Timer) -> tuple[ScoredGroups | None, list[Trajectory]]:
    """Return the next rollout batch, None on all ranks but the main one, and this rank's share of its trajectories.

    The rollout batch, too, has only this share of the tokens, unless it is written to a file.
    """
    run.announce("reading rollouts" if run.transport is None else "generating responses")
    start, scored, seconds, own, batches = now_s(), None, dict[str, float](), None, []
    prompts: list[tuple[Prompt, int]] = []
    if (taken := waited_for(run, run.rollouts and run.rollouts.take)) is not None:
        (scored, seconds), taken = taken, None  # nothing else keeps the batch, which is freed as it is scattered
        own = [trajectory for group in scored.groups for trajectory in group.trajectories]
        batches = packed_together(run.config, own, run.state.step)
        run.sampler.choose(run.state.step + 1, scored)
        if not run.config.logging.dump_rollouts:
            prompts = [(group.prompt, len(group.trajectories)) for group in scored.groups]
            scored = replace(scored, groups=[])
    trajectories = scatter_batch(run.worker, own, batches)
    if scored is not None and prompts:
        scored = replace(scored, groups=grouped(prompts, trajectories))
    policy_version = broadcast_object(scored.policy_version if scored else None, run.worker.groups)
    timer.seconds |= {**seconds, "transfer": now_s() - start - sum(seconds.values())}
    if policy_version is not None:
        run.state.policy_version = policy_version
    run.announce("training")
    return scored, trajectories


def waited_for(run: Run, call: Callable[[], T | None] | None) -> T | None:
    """Return what the main rank's `call` of the rollouts returns; replaced engines get their weights meanwhile."""
    return answered(run.worker, run.engines, run.transport, run.state.policy_version, call)


def update_on_batch(
    run: Run, scored: ScoredGroups | None, trajectories: list[Trajectory]
) -> tuple[dict[str, Metric], list[dict[str, Metric]], TokenTable]:
    """Run all updates on one rollout batch.

    Returns the metrics of the batch and of each update, reduced over ranks, and a sample of the tokens.
    """
    config = run.config
    examples, batch_metrics = make_examples(run.worker, run.frozen.reference, trajectories, run.frozen.teacher)
    if config.logging.dump_rollouts:
        advantages = advantages_on_main(examples, run.worker.groups)
        if run.recorder is not None and scored is not None:
            run.recorder.write_rollouts(run.state, scored, advantages)
    parts: list[dict[str, Metric]] = []
    reservoir = TokenReservoir(config.logging.num_reservoir_tokens, seed=(config.seed, run.state.step))
    fresh_rollout = is_fresh(run, scored, trajectories)
    recomputed, num_steps = config.algorithm.behaviour_policy == "recomputed", run.worker.optimizer.num_steps
    trace = run.sampler.trace(run.state.step + 1, trajectories)
    for chosen in minibatches(config, trajectories, run.state.step):
        unchanged = run.worker.optimizer.num_steps == num_steps
        seed_update(config.seed, run.state.update + len(parts))
        parts.append(
            update_policy(
                run.worker,
                minibatch(config, trace.mark([examples[i] for i in chosen], chosen)),
                lr=_policy_lr(run, len(parts)),
                on_policy=unchanged and recomputed,
                fresh_rollout=unchanged and fresh_rollout,
                reservoir=reservoir,
                trace=trace,
            )
        )
    run.sampler.write(run.state, trace, examples)
    run.state.update += len(parts)
    updates = reduce_updates(parts, run.worker.groups)
    return merge([*updates, batch_metrics]), updates, reservoir.gather(run.worker.groups)


def is_fresh(run: Run, scored: ScoredGroups | None, trajectories: list[Trajectory]) -> bool:
    """Return whether the engines' log-probs should equal those of the current weights, so that a mismatch is a fault.

    The current version must have sampled all tokens, without truncation, which renormalizes the probabilities, unless
    the trainer does so, too, and a recorded batch must have been sampled as the configuration says. The versions of
    recorded batches are those of another run, of which only the first batch can have the weights of this one. With
    dropout no training pass computes the engines' log-probs, or those of another training pass. Collective.
    """
    sampling, lora = run.config.rollout.sampling, run.config.model.lora
    recorded = broadcast_object(scored.sampling if scored else None, run.worker.groups) or sampling
    has_engines, first_version = run.transport is not None, int(run.config.has_new_weights)
    return (
        recorded == sampling
        and (run.config.algorithm.keep_sampling_mask or not run.config.rollout.truncated)
        and not (lora is not None and lora.dropout)
        and (has_engines or run.state.step == 0)
        and all(
            span.policy_version == (run.state.policy_version if has_engines else first_version)
            for trajectory in trajectories
            for span in trajectory.version_spans
        )
    )


def snapshot(run: Run, step: int) -> AbstractContextManager[None]:
    """Record this rank's memory in the step `logging.memory_snapshot_step`."""
    if step != run.config.logging.memory_snapshot_step:
        return nullcontext()
    return memory_snapshot(run.directory.memory / f"rank-{run.worker.groups.global_rank}.pickle")


def profiling(run: Run, step: int) -> AbstractContextManager[None]:
    """Profile the ranks and steps that `logging` names."""
    rank, logging = run.worker.groups.global_rank, run.config.logging
    if step not in logging.profile_steps or rank not in logging.profile_ranks:
        return nullcontext()
    return profiled(run.directory.profile / f"step-{step}-rank-{rank}.json.gz")


def evaluation_is_due(run: Run) -> bool:
    """Return whether to evaluate now: before the first step and after every `evaluation.every_steps` steps."""
    step, every = run.state.step, run.config.evaluation.every_steps
    return step == 0 or (every > 0 and step % every == 0)


def evaluate(run: Run) -> None:
    """Measure and record held-out accuracy, unless the metrics already have this step's."""
    step, recorder, engines = run.state.step, run.recorder, run.engines
    if run.transport is None or run.config.data.validation is None:
        return
    if broadcast_object(recorder is not None and ("validation", step) in recorder.recorded, run.worker.groups):
        return
    run.announce("evaluating on held-out prompts")
    validated = waited_for(run, engines and partial(engines.validate, seed=run.config.seed))
    if validated is None or recorder is None:
        return
    scored, parts = validated
    recorder.write_validation(run.state, scored, parts)
    recorder.write("validation", step, validation_metrics(scored, run.config.evaluation.n) | scored.metrics)
    recorder.recorded.add(("validation", step))


def record_step(run: Run, scored: ScoredGroups | None, metrics: dict[str, Metric], timer: Timer) -> None:
    """Write the step's metrics and sampled responses, on the main rank."""
    if run.recorder is None or scored is None:
        return
    step = run.state.step
    metrics = metrics | rollout_metrics(scored) | scored.metrics | timer.metrics()
    num_tokens = metrics["perf/total_num_tokens"]
    assert isinstance(num_tokens, Sum), "the token count is a sum"
    metrics["perf/throughput"] = Last(num_tokens.value / timer.seconds["step"])
    metrics["training/policy_version"] = Last(run.state.policy_version)
    metrics |= utilization_metrics(
        metrics[MODEL_FLOPS], timer.seconds["update"], run.config.parallel.world_size, device_name()
    )
    run.recorder.write("train", step, metrics)
    run.recorder.write_samples(samples(scored.groups, step, run.config.logging.num_sample_responses))


def _policy_lr(run: Run, num_done_in_step: int) -> float:
    trainer = run.config.trainer
    update = run.state.step * trainer.updates_per_step + num_done_in_step
    return learning_rate(run.config.optimizer, update, trainer.total_steps * trainer.updates_per_step)
