"""The documentation site: what `make docs` builds, without network."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCS_SITE = ROOT / "build" / "docs-site"
"""MkDocs and its theme, laid over the environment by the Makefile."""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built with warnings as errors and with a proxy that refuses every connection."""
    assert (DOCS_SITE / ".complete").is_file(), f"{DOCS_SITE} is not there; `make docs` makes it"
    built = tmp_path_factory.mktemp("docs") / "site"
    environment = {
        **os.environ,
        "PYTHONPATH": str(DOCS_SITE),
        "NO_MKDOCS_2_WARNING": "1",
        **dict.fromkeys(("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"), "http://127.0.0.1:9"),
    }
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(built)]
    built_by = subprocess.run(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=600
    )
    assert built_by.returncode == 0, built_by.stdout
    return built


def test_every_page_of_docs_is_in_the_site(site: Path) -> None:
    pages = {path.relative_to(ROOT / "docs").with_suffix(".html") for path in (ROOT / "docs").rglob("*.md")}
    built = {path.relative_to(site) for path in site.rglob("*.html")}
    assert pages <= built


def test_nothing_is_loaded_from_the_internet(site: Path) -> None:
    loaded = [
        (path.name, element)
        for path in site.rglob("*.html")
        for element in re.findall(r"<(?:script|img|iframe|link|source)\b[^>]*>", path.read_text())
        if re.search(r"""(?:src|href)=["']?(?:https?:)?//""", element) and 'rel="canonical"' not in element
    ]
    imported = [
        path for path in site.rglob("*.css") if re.search(r"@import|url\(['\"]?(?:https?:)?//", path.read_text())
    ]
    # The theme fetches Mermaid's script where a page has such a diagram.
    diagrams = [path for path in site.rglob("*.html") if "mermaid" in path.read_text()]

    assert (loaded, imported, diagrams) == ([], [], [])


def test_equations_are_rendered_when_the_site_is_built(site: Path) -> None:
    page = (site / "algorithms/bapo.html").read_text()
    assert page.count("<math") > 5
    assert set(re.findall("<mo[^>]*>&#x0007C;</mo>", page)) == {'<mo stretchy="false">&#x0007C;</mo>'}
    assert not [path for path in site.rglob("*.html") if "arithmatex" in path.read_text()]
