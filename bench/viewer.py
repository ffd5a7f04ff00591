"""The rollout viewer on a step of 10,000 responses of 4,096 tokens: seconds until the page shows something.

python -m bench.viewer

The limits are those of a page that feels immediate: 1 s to the first paint, which Chromium measures itself, and 1 MB
for an answer of the server. The browser runs already; at the first opening neither it nor the server has read anything
of the viewer. It needs Chromium (tools/install_cluster_packages.sh).
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from urllib.parse import urljoin

import numpy as np

from bench.report import option_parser, report
from megatron_bapo.data.rollout_samples import SampledGroup, SampledResponse, SampleHeader, write_samples
from megatron_bapo.records import Group, Prompt, Trajectory, VersionSpan
from megatron_bapo.run_directory import RunDirectory

NUM_GROUPS, N, LENGTH = 1250, 8, 4096
NUM_OPENED = 5
FIRST_PAINT_LIMIT_S, ANSWER_LIMIT_BYTES = 1.0, 1e6
FIRST_PAINT_MS = "performance.getEntriesByName('first-contentful-paint')[0].startTime"


def response(rng: np.random.Generator) -> SampledResponse:
    """Return a response of `LENGTH` random tokens."""
    token_ids = rng.integers(0, 150_000, LENGTH).astype(np.int32)
    log_probs = -rng.exponential(0.5, LENGTH).astype(np.float32)
    log_ratio = 0.2 * rng.standard_normal(LENGTH).astype(np.float32)
    spans = (VersionSpan(1, 1000), VersionSpan(2, LENGTH - 1000))
    text = " ".join(map(str, token_ids))
    trajectory = Trajectory(token_ids[:200], token_ids, log_probs, spans, "stop", text, float(rng.integers(2)))
    figures = {
        "log_probs": log_probs + log_ratio,
        "entropy": rng.exponential(0.5, LENGTH).astype(np.float32),
        "ratio": np.exp(log_ratio),
        "correction": np.ones(LENGTH, np.float32),
        "marks": (log_ratio > 0.2).astype(np.float32),
    }
    return SampledResponse(trajectory, np.full(LENGTH, 0.5), None, 1, 0.8, 1.2, figures)


def write(root: Path) -> Path:
    """Write the step, of 64 different responses, and return its file."""
    rng = np.random.default_rng(0)
    known = [response(rng) for _ in range(64)]
    groups = []
    for index in range(NUM_GROUPS):
        own = tuple(known[i] for i in rng.integers(0, len(known), N))
        prompt = Prompt(f"p:{index}", ({"role": "user", "content": f"problem {index} " * 20},), "1", "p")
        groups.append(SampledGroup(index, Group(prompt, tuple(each.trajectory for each in own)), own))
    folder = RunDirectory(root).sampled_rollouts
    write_samples(folder, SampleHeader(1, 3, NUM_GROUPS, N, "bapo", 1.0), groups, lambda batch: [""] * len(batch))
    return folder / "step-00000001.parquet"


def measure(url: str) -> dict[str, float]:
    """Open the page `NUM_OPENED` times and search a prompt; return the figures."""
    from playwright.sync_api import sync_playwright

    tokens_s, paints_s, sizes = list[float](), list[float](), list[int]()
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        browser.new_page().goto(urljoin(url, "/"))  # refused without the token; starts Chromium's own processes
        for _ in range(NUM_OPENED):
            page = browser.new_page(viewport={"width": 1440, "height": 900})
            page.on("response", lambda answer: sizes.append(int(answer.headers.get("content-length", 0))))
            tokens_s.append(timed(lambda page=page: (page.goto(url), page.locator(".t").first.wait_for())))
            whole = timed(lambda page=page: page.get_by_text("1,250 prompts, 10,000 responses", exact=True).wait_for())
            paints_s.append(page.evaluate(FIRST_PAINT_MS) / 1000)
        page.locator("#text").fill("problem 1249")
        search = timed(lambda: page.get_by_text("1 prompts, 8 responses", exact=True).wait_for())
        browser.close()
    return {
        "first_paint_at_first_opening_s": paints_s[0],
        "first_paint_s": median(paints_s[1:]),
        "first_tokens_at_first_opening_s": tokens_s[0],
        "first_tokens_s": median(tokens_s[1:]),
        "all_listed_later_s": whole,
        "search_s": search,
        "largest_answer_bytes": float(max(sizes)),
        "requests": len(sizes) / NUM_OPENED,
    }


def timed(action: Callable[[], object]) -> float:
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def main() -> None:
    if shutil.which("chromium") is None:
        raise SystemExit("chromium is missing; tools/install_cluster_packages.sh installs it")
    with tempfile.TemporaryDirectory() as root:
        written_s = timed(lambda: write(Path(root)))
        size = (RunDirectory(Path(root)).sampled_rollouts / "step-00000001.parquet").stat().st_size
        command = [sys.executable, "-m", "megatron_bapo", "view", root]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
            try:
                assert server.stdout is not None
                url = server.stdout.readline().removeprefix("Open ").strip()
                figures = {"written_s": written_s, "file_mb": size / 1e6, **measure(url)}
            finally:
                server.terminate()
    ratios = {
        "first_paint_to_limit": figures["first_paint_s"] / FIRST_PAINT_LIMIT_S,
        "first_paint_at_first_opening_to_limit": figures["first_paint_at_first_opening_s"] / FIRST_PAINT_LIMIT_S,
        "largest_answer_to_limit": figures["largest_answer_bytes"] / ANSWER_LIMIT_BYTES,
    }
    report("viewer", ("figure", "value"), list(figures.items()), ratios=ratios, figures=figures)


if __name__ == "__main__":
    option_parser(__doc__).parse_args()
    main()
