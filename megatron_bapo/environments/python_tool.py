"""Python environment: the reply to a turn that contains <python>print(3 + 4)</python> is what the program prints, 7.

Of several calls only the last one counts. Each is a program of its own that runs in a sandbox, and none sees the
variables of an earlier one.
"""

from __future__ import annotations

import signal
import textwrap
from typing import Any

from megatron_bapo.environments.tool_call import last_call
from megatron_bapo.functions.sandbox import PROGRAM_PATH, Ended, Limits, run_program

MAX_CHARACTERS = 2000
"""Length of a reply. Of a longer output the start and the end are shown, which has the error."""
OUT_OF_CPU_TIME = (128 + signal.SIGXCPU, 128 + signal.SIGKILL)
"""Exit statuses at the soft and at the hard limit of CPU time."""


async def reply(
    messages: list[dict[str, str]],
    data_source: str,
    ground_truth: str,
    extra_info: dict[str, Any] | None = None,
    *,
    cpu_s: float,
    memory_gib: float,
) -> str | None:
    """Return what the program prints, the errors last; None if the last message has no call.

    Raises RunError if there can be no sandbox.
    """
    call = last_call(messages[-1]["content"], "python")
    if call is None:
        return None
    program = textwrap.dedent(call).strip() + "\n"
    files = {PROGRAM_PATH: program.encode(errors="replace")}
    ended = await run_program([PROGRAM_PATH], files, Limits(cpu_s, memory_gib))
    return _shortened(_printed(ended, cpu_s))


def _printed(ended: Ended, cpu_s: float) -> str:
    parts = [output.decode(errors="replace").strip() for output in (ended.stdout, ended.stderr)]
    if ended.status is None:
        parts.append("error: too much output")
    elif ended.status in OUT_OF_CPU_TIME:
        parts.append(f"error: more than {cpu_s:g} s of CPU time")
    elif ended.status and not parts[1]:
        parts.append(f"error: exit status {ended.status}")
    return "\n".join(filter(None, parts)) or "(no output)"


def _shortened(text: str) -> str:
    if len(text) <= MAX_CHARACTERS:
        return text
    half = MAX_CHARACTERS // 2
    return f"{text[:half]}\n... ({len(text) - 2 * half} characters) ...\n{text[-half:]}"
