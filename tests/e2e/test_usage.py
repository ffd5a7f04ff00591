"""What processes hold does not grow with the number of steps."""

from pathlib import Path

from tests.e2e.usage import watched_run

NUM_PROMPTS, NUM_STEPS = 24, 12
MIB_PER_STEP = 2.0
"""Metrics, caches and allocators settle, but for vLLM's, later than this run ends: `python -m tests.e2e.usage` goes on
for longer."""


def test_requests_processes_files_and_memory_do_not_pile_up(tmp_path: Path) -> None:
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
    for counts in (run.num_shared, run.num_processes):  # more only for a moment, such as in the middle of a sync
        assert min(counts[half:]) <= max(counts[:half])
