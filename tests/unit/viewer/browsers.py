"""The viewer in a real browser: Debian's Chromium, driven by Playwright.

With `SCREENSHOTS=FOLDER` the tests write the pictures of the documentation there.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Page

CHROMIUM = shutil.which("chromium")
SCREENSHOTS = os.environ.get("SCREENSHOTS")
IN_A_BROWSER = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="no chromium; tools/install_cluster_packages.sh installs it"),
]


def served(*runs: Path) -> Iterator[str]:
    """Run `megatron-bapo view` and yield its URL."""
    command = [sys.executable, "-m", "megatron_bapo", "view", *map(str, runs)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            yield server.stdout.readline().removeprefix("Open ").strip()
        finally:
            server.terminate()


def opened(page: Page, url: str, state: str = "") -> Page:
    """Open the page of rollouts and wait until a prompt is shown."""
    page.goto(f"{url}#{state}")
    page.locator("#prompt-text .id").wait_for()
    return page


def is_own(url: str) -> bool:
    return url.startswith(("http://127.0.0.1:", "file://", "blob:"))


def shoot(page: Page, name: str) -> None:
    if SCREENSHOTS:
        page.screenshot(path=Path(SCREENSHOTS) / f"{name}.png")
