"""Ray's library writes only what matters to stderr, and nothing of that is lost."""

import os
import subprocess
import sys

import pytest

SCRIPT = """
import os, sys
from megatron_bapo.cluster.quiet_ray import quiet_ray

with quiet_ray():
    os.write(2, b"Set ray log level from environment variable RAY_BACKEND_LOG_LEVEL to 3\\n")
    os.write(2, b"inside\\n")
    if "abort" in sys.argv:
        os.abort()
print("after", file=sys.stderr)
"""
TOLD = "Set ray log level from environment variable RAY_BACKEND_LOG_LEVEL to 3\n"


def stderr_of(*arguments: str, **environment: str) -> str:
    command = [sys.executable, "-c", SCRIPT, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, env={**os.environ, **environment}).stderr


@pytest.mark.parametrize(("argument", "expected"), [("end", "inside\nafter\n"), ("abort", "inside\n")])
def test_only_the_line_about_the_log_level_is_removed_also_if_the_process_aborts(argument: str, expected: str) -> None:
    assert stderr_of(argument) == expected


def test_a_log_level_of_the_users_choice_is_kept_and_told() -> None:
    assert stderr_of("end", RAY_BACKEND_LOG_LEVEL="info") == f"{TOLD}inside\nafter\n"
