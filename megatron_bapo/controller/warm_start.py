"""The supervised updates on demonstrations that a run may begin with."""

from __future__ import annotations

from functools import partial

from megatron_bapo.config.optimizer import OptimizerConfig
from megatron_bapo.controller.run import Run, Timer, checkpoint
from megatron_bapo.parallel.collectives import on_main
from megatron_bapo.parallel.groups import seed_update
from megatron_bapo.trainer.learning_rate import learning_rate
from megatron_bapo.trainer.micro_batches import Example
from megatron_bapo.trainer.policy_update import reduce_metrics, supervised_update
from megatron_bapo.trainer.rollout_batch import with_token_weights
from megatron_bapo.trainer.scatter_batch import scatter_batch


def warm_start(run: Run) -> None:
    """Run the supervised updates on demonstrations."""
    settings = run.config.warm_start
    if settings is None or run.state.step > 0:
        return
    run.announce("warm start")
    while run.state.warm_start_step < settings.num_steps and not run.stop_requested():
        call = run.rollouts and partial(run.rollouts.sft_demonstrations, settings.batch_size)
        demonstrations = on_main(call, run.worker.groups)
        trajectories = scatter_batch(run.worker, demonstrations, [range(settings.batch_size)], in_groups=False)
        examples = with_token_weights(
            [Example(trajectory, advantage=0.0, weight=0.0) for trajectory in trajectories],
            "token-mean",
            run.config.rollout.max_response_length,
        )
        timer = Timer()
        with timer.phase("step"):
            num = settings.num_steps
            schedule = OptimizerConfig(lr=settings.lr, lr_warmup_steps=num // 10, lr_decay_style="cosine")
            lr = learning_rate(schedule, run.state.warm_start_step, num)
            seed_update(run.config.seed, run.state.update)
            metrics = reduce_metrics(supervised_update(run.worker, examples, lr), run.worker.groups)
        run.state.warm_start_step += 1
        run.state.update += 1
        if run.recorder is not None:
            run.recorder.write("warm_start", run.state.warm_start_step, metrics | timer.metrics())
    if run.state.warm_start_step == settings.num_steps:
        run.worker.optimizer.reset_moments()
        checkpoint(run)
