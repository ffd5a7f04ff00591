"""Memory, stalls and waits of rollouts at the size of a 32B run, as ratios to their limits.

python -m bench.rollout_scale          2,048 responses of up to 16,384 tokens, in 3 minutes on two cores
python -m bench.rollout_scale --full   16,384 responses of up to 65,536 tokens; `--full 0.25` a quarter of them
python -m bench.rollout_scale --short  16,384 responses of up to 256 tokens: what depends on their number

The scheduler, the rollout service, scoring, buffer, checkpointing and the hand-over to the trainer's ranks are the real
ones, in their own processes. Engines are modelled: they send real tokens and log-probs through Ray at the pace of a
millisecond per decoding step. Two batches are taken, with the state in flight saved and weights loaded after each. The
event loop's own stalls leave out the time for which it waited for a processor, as it does where all of these processes
share two cores.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Self

import psutil

from bench.report import option_parser, report
from bench.resident_bytes import anonymous_bytes
from bench.scale_engines import STEP_S, create_engines, create_model
from megatron_bapo.cluster.ray_cluster import create_actor, get_result, local_cluster, nodes
from megatron_bapo.config.loading import dump_config, load_config
from megatron_bapo.config.schema import Config
from megatron_bapo.controller.rollout_client import SERVICE
from megatron_bapo.controller.rollout_service import RolloutService
from megatron_bapo.freed_memory import HEAP_VARIABLES
from megatron_bapo.run_directory import RunDirectory
from megatron_bapo.simulation.response_lengths import lognormal_lengths

TOKEN_BYTES = 8
"""Bytes of a token's id and its log-prob."""
PROMPT_TOKENS = 512
LIMITS = {
    "service_bytes_per_token_bytes": 1.5,
    "rank_bytes_per_own_bytes": 1.5,
    "broadcast_bytes_per_trajectory": 1000.0,
    "broadcast_bytes_per_trajectory_turns": 1000.0,
    "broadcast_bytes_per_trajectory_turns_kl": 1000.0,
    "event_loop_stall_s": 0.1,
    "event_loop_own_stall_s": 0.1,
    "saving_s": 5.0,
    "running_sequences_at_cold_start": 0.9,
}
"""Limits by figure; a ratio above 1 exceeds its limit, except for the last figure, where one below 1 does."""
OF_TOKENS = ("service_bytes_per_token_bytes", "rank_bytes_per_own_bytes", "running_sequences_at_cold_start")
"""Figures that mean nothing for short responses."""


@dataclass(frozen=True)
class Size:
    num_groups: int
    n: int
    max_length: int
    mean_length: int
    num_engines: int
    max_num_seqs: int
    num_ranks: int

    @property
    def batch_bytes(self) -> int:
        return self.num_groups * self.n * self.mean_length * TOKEN_BYTES

    @property
    def kv_tokens(self) -> int:
        """KV cache of an engine, which holds `max_num_seqs` responses of mean length."""
        return self.max_num_seqs * (self.mean_length + PROMPT_TOKENS // self.n)

    @property
    def needed_gib(self) -> float:
        """Memory that the benchmark needs: the service and the engines have two batches each, the ranks another, and
        the store parts of one."""
        num_processes = self.num_ranks + 8
        return (6.5 * self.batch_bytes + num_processes * 400e6) / 2**30


SCALED_DOWN = Size(128, 16, 16_384, 4_096, num_engines=8, max_num_seqs=128, num_ranks=4)
SHORT = Size(1_024, 16, 256, 64, num_engines=64, max_num_seqs=256, num_ranks=4)
FULL = Size(1_024, 16, 65_536, 16_384, num_engines=64, max_num_seqs=256, num_ranks=8)


def part_of_full(share: float) -> Size:
    """Return the full size with a share of its prompts and engines, at least two engines."""
    num_engines = max(NUM_ENGINE_PROCESSES, round(share * FULL.num_engines))
    return replace(FULL, num_groups=num_engines * FULL.num_groups // FULL.num_engines, num_engines=num_engines)


CONFIG = """
model: {{path: {folder}/model, dtype: float32}}
run_dir: {folder}/run
data: {{chat_template: false, max_prompt_length: {prompt}, train: {{path: {folder}/prompts.jsonl}}}}
reward: {{type: function, function: "bench.scale_reward:score"}}
parallel: {{world_size: {size.num_ranks}}}
rollout: {{mode: async, max_staleness: 1, on_weight_update: abort_and_resume, n: {size.n},
          max_response_length: {size.max_length}, num_engines: {size.num_engines}, max_num_seqs: {size.max_num_seqs},
          health_check_interval_s: 2.0, object_store_mib: {store_mib}}}
trainer: {{total_steps: 2, train_batch_size: {batch}, ppo_mini_batch_size: {minibatch},
          max_tokens_per_gpu: {budget}}}
logging: {{tensorboard: false}}
"""
NUM_ENGINE_PROCESSES = 2
NUM_PROMPTS_PER_BATCH = 4
LIMIT_S = 3000.0


class ServiceMemory:
    """Watches the memory of the rollout service, with the objects that are in Ray's store, and the tokens it holds."""

    def __init__(self, service: Any) -> None:
        from ray._private.internal_api import node_stats  # Ray is configured before it is imported

        self._service, (node,) = service, nodes()
        self._stats = partial(node_stats, node["NodeManagerAddress"], node["NodeManagerPort"], False)
        self._pid = within(service, lambda _: psutil.Process().pid)
        self._done = threading.Event()
        self._base = self._bytes()
        self.peak_bytes = self.most_held_bytes = 0
        self._threads = [threading.Thread(target=self._watch_memory), threading.Thread(target=self._watch_tokens)]

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        for thread in self._threads:
            thread.join()

    def _bytes(self) -> int:
        return anonymous_bytes(self._pid) + self._stats().store_stats.object_store_bytes_used

    def _watch_memory(self) -> None:
        while not self._done.wait(0.05):
            self.peak_bytes = max(self.peak_bytes, self._bytes() - self._base)

    def _watch_tokens(self) -> None:
        while not self._done.wait(2.0):
            self.most_held_bytes = max(self.most_held_bytes, within(self._service, held_bytes))


def within(service: Any, function: Callable[[Any], Any]) -> Any:
    """Return the result of a function of the service's object, called in its process."""
    return get_result(service.__ray_call__.remote(function), SERVICE, LIMIT_S)


def held_bytes(service: Any) -> int:
    """Return the bytes of the responses that a service holds: their token ids and log-probs.

    It runs in a thread beside the event loop, which changes what is counted here: each container is copied at once. An
    error would have a traceback that keeps all of it.
    """
    scheduler = service._scheduler
    finished = sum(sum(entry.group.lengths) for entry in [*scheduler._buffer.groups()])
    growing = sum(sum(group.lengths) for group in [*scheduler._in_flight.values()])
    requests = [request for slot in [*scheduler._deps.router._slots.values()] for request in [*slot.requests.values()]]
    reported = sum(num for request in requests for num, _ in request.partial.lengths)
    return (finished + growing + reported) * TOKEN_BYTES


def write_inputs(folder: Path, size: Size) -> Config:
    """Write model, prompts and configuration, and return the configuration."""
    create_model(folder / "model", size.max_length)
    with (folder / "prompts.jsonl").open("w") as file:
        for index in range(NUM_PROMPTS_PER_BATCH * size.num_groups):
            prompt = f"task {index} ".ljust(PROMPT_TOKENS, ".")
            file.write(json.dumps({"prompt": prompt, "answer": str(index)}) + "\n")
    batch = size.num_groups * size.n
    text = CONFIG.format(
        folder=folder, size=size, prompt=PROMPT_TOKENS, batch=batch, minibatch=batch // 4,
        budget=size.max_length + PROMPT_TOKENS, store_mib=max(512, 3 * size.batch_bytes >> 20),
    )  # fmt: skip
    (folder / "config.yaml").write_text(text)
    config = load_config(folder / "config.yaml", [])
    directory = RunDirectory(config.run_dir)
    directory.create()
    directory.config.write_text(dump_config(config))
    return config


def measure(folder: Path, size: Size) -> tuple[dict[str, float], dict[str, float]]:
    """Run everything, and return the limited figures and others."""
    config = write_inputs(folder, size)
    lengths = lognormal_lengths(size.mean_length, 0.8, size.max_length)
    with local_cluster(NUM_ENGINE_PROCESSES + 1, config.rollout.object_store_mib, str(config.run_dir)) as address:
        handles, engines = create_engines(
            NUM_ENGINE_PROCESSES, size.num_engines, size.kv_tokens, size.max_num_seqs, lengths
        )
        service = create_actor(RolloutService, config, engines, name=SERVICE, environment=HEAP_VARIABLES)
        get_result(service.wait_for_engines.remote(), SERVICE, LIMIT_S)
        results = folder / "results.json"
        with ServiceMemory(service) as memory:
            command = [sys.executable, "-m", "bench.scale_ranks", str(config.run_dir), address, str(results)]
            ranks = subprocess.Popen(command)
            try:
                cold = running_at_cold_start(handles, size, ranks)
                if code := ranks.wait(LIMIT_S):
                    raise SystemExit(f"the trainer's ranks ended with exit code {code}")
            finally:
                ranks.kill()
    found = json.loads(results.read_text())
    return figures(found, memory, cold)


def running_at_cold_start(handles: list[Any], size: Size, ranks: subprocess.Popen[bytes]) -> float:
    """Return the sequences that engines run within the longest response's time, relative to what their caches hold.

    Returns 0 if the trainer's ranks have failed before they took a batch.
    """

    def most_running() -> int:
        return sum(sum(get_result(handle.most_running.remote(), "engines", LIMIT_S)) for handle in handles)

    while not most_running():
        if ranks.poll():
            return 0.0
        time.sleep(0.05)
    time.sleep(size.max_length * STEP_S)
    return most_running() / (size.num_engines * size.max_num_seqs)


def figures(found: Mapping[str, Any], memory: ServiceMemory, cold: float) -> tuple[dict[str, float], dict[str, float]]:
    steps = found["steps"]
    ranks = [rank for step in steps for rank in step]
    limited = {
        "service_bytes_per_token_bytes": memory.peak_bytes / memory.most_held_bytes,
        "rank_bytes_per_own_bytes": max(rank["peak_bytes"] / rank["own_bytes"] for rank in ranks),
        "broadcast_bytes_per_trajectory": max(rank["broadcast"] for rank in ranks),
        **{f"broadcast_bytes_per_trajectory_{name}": value for name, value in found["broadcast"].items()},
        "event_loop_stall_s": max(step[0]["stall_s"] for step in steps),
        "event_loop_own_stall_s": max(step[0]["own_stall_s"] for step in steps),
        "saving_s": max(step[0]["saved_s"] for step in steps),
        "running_sequences_at_cold_start": cold,
    }
    others = {
        "service_peak_gib": memory.peak_bytes / 2**30,
        "held_tokens_millions": memory.most_held_bytes / TOKEN_BYTES / 1e6,
        **{f"rank_{i}_bytes_per_own_bytes": rank["peak_bytes"] / rank["own_bytes"] for i, rank in enumerate(steps[-1])},
        **{f"{name}_{i}": step[0][name] for i, step in enumerate(steps) for name in
           ("taken_s", "prepared_s", "saved_s", "loaded_s", "stall_s", "own_stall_s", "service_cpu_s", "num_tokens")},
    }  # fmt: skip
    return limited, others


def main() -> None:
    parser = option_parser(__doc__)
    parser.add_argument(
        "--full", nargs="?", type=float, const=1.0, metavar="SHARE",
        help=f"responses of full length, and this share of the prompts and engines; all need {FULL.needed_gib:.0f} GiB",
    )  # fmt: skip
    parser.add_argument("--short", action="store_true", help="as many responses as a full batch has, but short ones")
    arguments = parser.parse_args()
    size = SHORT if arguments.short else SCALED_DOWN if arguments.full is None else part_of_full(arguments.full)
    available_gib = psutil.virtual_memory().available / 2**30
    if available_gib < size.needed_gib:
        raise SystemExit(f"this size needs {size.needed_gib:.0f} GiB of memory, and {available_gib:.0f} GiB are free")
    with tempfile.TemporaryDirectory() as folder:
        limited, others = measure(Path(folder), size)
    if arguments.short:
        limited = {name: value for name, value in limited.items() if name not in OF_TOKENS}
    ratios = {name: round(value / LIMITS[name], 3) for name, value in limited.items()}
    rows = [(name, value, LIMITS[name], ratios[name]) for name, value in limited.items()]
    rounded = {name: round(value, 3) for name, value in (limited | others).items()}
    report("rollout_scale", ("figure", "measured", "limit", "to the limit"), rows, ratios=ratios, figures=rounded)


if __name__ == "__main__":
    main()
