"""Overhead of Ray and serialization per trajectory, bytes per trajectory, and the trainer's waiting time for rollouts.

python -m bench.rollout_overhead

The same scheduler, rewards and real vLLM engine run twice: in this process, and as in a run, with the engine and the
service as Ray actors and the batch transferred to this process. Both take turns and generate the same tokens for the
same prompts. The waiting times are those of two short real runs with the model and lengths of `bench.rollout_modes`.
"""

from __future__ import annotations

import asyncio
import os
import pickle
import tempfile
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager, closing
from functools import partial
from pathlib import Path
from statistics import median
from time import perf_counter

import numpy as np

from bench.report import option_parser, report
from bench.rollout_modes import CONFIG, NUM_FIRST_STEPS, OTHERS, trained
from megatron_bapo.config.loading import load_config
from megatron_bapo.config.schema import Config
from megatron_bapo.controller.launcher import prepare
from megatron_bapo.controller.prompt_sets import load_task_prompts
from megatron_bapo.controller.rollout_client import RolloutClient
from megatron_bapo.controller.rollout_plane import rollout_plane
from megatron_bapo.data.prompt_stream import PromptStream
from megatron_bapo.metrics.sinks import read_rows
from megatron_bapo.model.weight_layouts import engine_route
from megatron_bapo.rewards.scorer import Scorer
from megatron_bapo.rollout.engine import Engine, engine_environment
from megatron_bapo.rollout.engine_spec import EngineSpec
from megatron_bapo.rollout.generation import ScoredGroups
from megatron_bapo.rollout.messages import Completion, Generated
from megatron_bapo.rollout.router import Router
from megatron_bapo.rollout.scheduler import RolloutScheduler
from megatron_bapo.rollout.scheduler_deps import SchedulerDeps
from megatron_bapo.rollout.scoring import score_group
from megatron_bapo.rollout.tokenization import load_tokenizer, tokenize
from megatron_bapo.run_directory import RunDirectory
from megatron_bapo.weight_sync.transport import WeightStore

NUM_BATCHES, NUM_FIRST_BATCHES = 15, 2
OVERRIDES = ("trainer.train_batch_size=64", "rollout.max_response_length=128", "trainer.ppo_mini_batch_size=64")
NUM_RUN_STEPS = 8


@asynccontextmanager
async def in_this_process(config: Config, store: Path) -> AsyncIterator[RolloutScheduler]:
    """Yield a scheduler with an engine that it calls without Ray."""
    os.environ |= engine_environment() | {"VLLM_LOGGING_LEVEL": "ERROR"}
    engine, router, tokenizer = Engine(), Router(), load_tokenizer(config.model_path)
    route = engine_route(config, 0, [(store, "127.0.0.1")])
    facts = await engine.start(EngineSpec.of(config), route)
    # Unlike the scheduler's interface, Engine.load_weights returns the bytes that were read.
    router.add("engine 0", engine, facts.kv_cache_tokens)  # pyright: ignore[reportArgumentType]
    prompts = load_task_prompts(config).train
    tokenized = {prompt.prompt.prompt_id: prompt for prompt in tokenize(prompts, tokenizer, config.data)}

    async def decode(token_ids: np.ndarray) -> str:
        return str(tokenizer.decode(token_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False))

    stream, scorer = PromptStream(prompts, seed=config.seed, shuffle=config.data.shuffle), Scorer(config.reward)
    deps = SchedulerDeps(stream, tokenized, router, partial(score_group, scorer=scorer), decode, print)
    try:
        yield RolloutScheduler(config.rollout, config.prompts_per_step, config.seed, deps)
    finally:
        scorer.close()
        await engine.shutdown()


async def batch_seconds(folder: Path) -> tuple[dict[str, list[float]], ScoredGroups]:
    """Return the seconds of each batch by both paths, and the last batch."""
    (folder / "config.yaml").write_text(CONFIG)
    config = load_config(folder / "config.yaml", [f"run_dir={folder / 'rollouts'}", *OVERRIDES])
    directory, seconds = RunDirectory(config.run_dir), {"in one process": [], "through Ray": []}
    directory.create()
    prepare(config, directory, load_task_prompts(config), rollout_only=True)
    with ExitStack() as stack:
        store = stack.enter_context(closing(WeightStore.create()))
        stack.enter_context(rollout_plane(config, directory, store))
        client = RolloutClient(config)
        await asyncio.to_thread(client.wait_for_engines)
        async with in_this_process(config, store.folder) as scheduler:
            for _ in range(NUM_FIRST_BATCHES + NUM_BATCHES):
                start = perf_counter()
                ours = await scheduler.take()
                between = perf_counter()
                taken = await asyncio.to_thread(client.take)
                assert taken is not None, "the engines keep their first weights"
                scored, _ = taken
                seconds["in one process"].append(between - start)
                seconds["through Ray"].append(perf_counter() - between)
                check_equal(ours, scored)
    return {name: values[NUM_FIRST_BATCHES:] for name, values in seconds.items()}, scored


def check_equal(ours: ScoredGroups, theirs: ScoredGroups) -> None:
    for one, other in zip(ours.groups, theirs.groups, strict=True):
        for a, b in zip(one.trajectories, other.trajectories, strict=True):
            assert np.array_equal(a.response_token_ids, b.response_token_ids), "the two paths gave different tokens"


def size_of(value: object) -> int:
    return len(pickle.dumps(value, protocol=5))


def engine_bytes(scored: ScoredGroups) -> int:
    """Return the bytes of the engine's results for the batch."""
    return sum(
        size_of(
            Generated(
                0,
                tuple(
                    Completion(t.response_token_ids, t.behaviour_log_probs, t.finish_reason, t.text)
                    for t in group.trajectories
                ),
            )
        )
        for group in scored.groups
    )


def waiting_share(run_dir: Path) -> float:
    """Return the share of the trainer's time spent waiting for rollouts, after the first steps."""
    rows = [r for r in read_rows(run_dir / "metrics.jsonl") if r["phase"] == "train" and r["step"] > NUM_FIRST_STEPS]
    waited = sum(row["metrics"]["timing_s/generate"] + row["metrics"]["timing_s/transfer"] for row in rows)
    return waited / sum(row["metrics"]["timing_s/step"] for row in rows)


def main() -> None:
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        seconds, scored = asyncio.run(batch_seconds(folder))
        steps = f"trainer.total_steps={NUM_RUN_STEPS}"
        modes = {"sync": (), "async": OTHERS["async"]}
        waits = {name: waiting_share(trained(folder, name, [*overrides, steps])) for name, overrides in modes.items()}
    num = sum(len(group.trajectories) for group in scored.groups)
    num_tokens = sum(len(t.response_token_ids) for group in scored.groups for t in group.trajectories)
    pure_s, ray_s = (median(values) for values in seconds.values())
    # Paired differences, so that a slow period of the machine affects both.
    more_ms = median(b - a for a, b in zip(*seconds.values(), strict=True)) * 1e3 / num
    sizes = {"from the engine": engine_bytes(scored) / num, "to the trainer": size_of(scored) / num}
    rows: list[tuple[object, ...]] = [
        *(
            (f"{name}, ms per trajectory", s * 1e3 / num)
            for name, s in (("in one process", pure_s), ("through Ray", ray_s))
        ),
        ("Ray and serialization, ms per trajectory", more_ms),
        ("tokens per trajectory", num_tokens / num),
        *((f"bytes per trajectory {where}", size) for where, size in sizes.items()),
        *((f"{name}: trainer waits for rollouts", f"{share:.0%}") for name, share in waits.items()),
    ]
    ratios = {"through_ray_to_one_process": round(ray_s / pure_s, 3)}
    ratios |= {f"waiting_share_{name}": round(share, 3) for name, share in waits.items()}
    figures = {"overhead_ms_per_trajectory": round(more_ms, 3)}
    figures |= {f"bytes_{where.replace(' ', '_')}": round(size) for where, size in sizes.items()}
    report("rollout_overhead", ("", ""), rows, ratios=ratios, figures=figures)


if __name__ == "__main__":
    option_parser(__doc__).parse_args()
    main()
