"""A self-contained page of one step: the viewer's files and the step's data in one HTML file."""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
import re
from pathlib import Path
from typing import Any

import pyarrow as pa

from megatron_bapo.errors import UserError
from megatron_bapo.files import unwritable
from megatron_bapo.viewer.answers import as_json
from megatron_bapo.viewer.samples import NO_SAMPLES, Samples, damaged
from megatron_bapo.viewer.server import ASSETS

_MODULES = ("text.js", "measures.js", "state.js", "source.js", "prompts.js", "response.js", "tooltip.js", "main.js")
"""The scripts, each after those that it imports."""


def export(samples: Samples, path: Path, step: int | None) -> int:
    """Write the page of a step, by default the last one, and return the step.

    Raises UserError without such a step, for damaged samples, and if the file cannot be written.
    """
    steps = samples.run()["steps"]
    if not steps:
        raise UserError(f"there is nothing to export: the run has {NO_SAMPLES}")
    if step is not None and step not in steps:
        raise UserError(f"step {step} has no sampled rollouts; the steps are {', '.join(map(str, steps))}")
    chosen = steps[-1] if step is None else step
    option = f"--export {path}"
    try:
        if path.is_dir():
            raise UserError(f"{option} is a folder; name a file in it, such as {path / f'step-{chosen}.html'}")
        if not path.parent.is_dir():
            raise UserError(f"{option} must be in a folder that exists; create {path.parent}, or choose another folder")
        try:
            text = page(samples, chosen)
        except (OSError, pa.ArrowException) as error:
            raise UserError(damaged(chosen, error)) from None
        path.write_text(text, encoding="ascii", errors="xmlcharrefreplace")
    except OSError as error:
        raise unwritable(option, error) from None
    return chosen


def page(samples: Samples, step: int) -> str:
    """Return the page, whose policy allows only its own script and style."""
    script, style = _script(), (ASSETS / "view.css").read_text()
    policy = (
        f"default-src 'none'; script-src '{_hash(script)}'; style-src '{_hash(style)}'; "
        "img-src data:; base-uri 'none'; form-action 'none'"
    )
    data = json.dumps(_data(samples, step), separators=(",", ":")).replace("<", "\\u003c")
    head = (
        f'<meta http-equiv="content-security-policy" content="{policy}">\n<style>{style}</style>\n'
        f'<script type="application/json" id="embedded">{data}</script>\n<script type="module">{script}</script>'
    )
    text = (ASSETS / "index.html").read_text()
    linked = text.index('<link rel="stylesheet"'), text.index("</head>")
    return text[: linked[0]] + head + "\n" + text[linked[1] :]


def _script() -> str:
    """Return the modules as one script, in ASCII so that its hash does not depend on the encoding."""
    parts = []
    for name in _MODULES:
        text = re.sub(r"^import .*\n", "", (ASSETS / name).read_text(), flags=re.MULTILINE)
        parts.append(re.sub(r"^export ", "", text, flags=re.MULTILINE))
    return re.sub(r"[^\x00-\x7f]", lambda match: f"\\u{ord(match[0]):04x}", "".join(parts))


def _hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _data(samples: Samples, step: int) -> dict[str, Any]:
    whole = samples.step(step)
    while whole["end"] < whole["total"]:
        more = samples.step(step, whole["end"])
        whole["end"] = more["end"]
        for name, values in more["columns"].items():
            whole["columns"][name] += values
    groups = whole["columns"]["group"]
    return {
        "run": {"name": samples.run()["name"], "steps": [step]},
        "step": whole,
        "prompts": {group: _packed(samples.response(step, groups.index(group))) for group in dict.fromkeys(groups)},
        "responses": [_packed(_tokens(samples, step, row)) for row in range(whole["total"])],
    }


def _tokens(samples: Samples, step: int, row: int) -> dict[str, Any]:
    whole = samples.tokens(step, row)
    while whole["end"] < whole["total"]:
        more = samples.tokens(step, row, whole["end"])
        whole["end"] = more["end"]
        for name, values in more["columns"].items():
            whole["columns"][name] += values
    return whole


def _packed(value: dict[str, Any]) -> str:
    return base64.b64encode(gzip.compress(as_json(value), mtime=0)).decode()
