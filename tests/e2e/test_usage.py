"""The resource usage of a run's processes does not grow with the number of steps."""

from pathlib import Path

from tests.e2e.usage import watched_run

NUM_PROMPTS, NUM_STEPS = 24, 12
MIB_PER_STEP = 2.0
"""Limit of the memory growth. Caches and allocators settle only after this run has ended; `python -m tests.e2e.usage`
runs longer."""


def test_requests_processes_files_and_memory_do_not_grow_over_time(tmp_path: Path) -> None:
    run = watched_run(tmp_path, NUM_PROMPTS, NUM_STEPS)
    growths = run.growths()
    assert [growth.role for growth in growths].count("engine") == 2
    assert [growth.role for growth in growths].count("trainer") == 2
    assert [growth.role for growth in growths].count("rollout service") == 1
    for growth in growths:
        assert growth.role == "vLLM's core" or growth.mib_per_step < MIB_PER_STEP, growth
        assert growth.files <= 2, growth
        assert growth.threads <= 2, growth
    half = NUM_STEPS // 2
    for counts in (
        run.num_shared,
        run.num_processes,
    ):  # the counts may rise for a moment, such as during a weight update
        assert min(counts[half:]) <= max(counts[:half])
