"""docs/guides/coming_from.md is what its generator prints, and names keys that exist."""

import re
from pathlib import Path
from typing import get_args

from megatron_bapo.config.algorithm import AlgorithmConfig
from megatron_bapo.config.foreign_keys import projects, rows
from megatron_bapo.config.loading import dotted_keys
from megatron_bapo.config.schema import Config
from tools.coming_from import TEMPLATE, page

PAGE = Path(__file__).parents[2] / "docs" / "guides" / "coming_from.md"
SECTIONS = "|".join(Config.model_fields)


def test_the_page_is_what_its_command_prints() -> None:
    assert PAGE.read_text() == page()


def test_every_key_that_is_translated_has_a_line_and_the_keys_here_exist() -> None:
    lines = [line.strip("| ").split(" | ") for line in PAGE.read_text().splitlines() if line.startswith("| `")]
    here = {cells[0].split("`")[1]: set(re.findall(r"`([\w.]+)`", cells[1])) for cells in lines if len(cells) >= 2}
    translated = [row for project in projects() for row in rows(project) if row.ours]

    assert len(translated) > 400
    for row in translated:
        assert here[f"{projects()[row.project].prefix}{row.key}"] & set(row.ours)
    keys = {key for project in projects() for row in rows(project) for key in row.ours}
    assert keys <= set(dotted_keys(Config))


def test_the_page_names_every_objective_and_the_commit_of_each_project() -> None:
    text = PAGE.read_text()
    (objectives,) = re.findall(r"`algorithm.objective` is (.*?)\. The fixed", text, re.DOTALL)
    assert set(re.findall(r"`(\w+)`", objectives)) == set(
        get_args(AlgorithmConfig.model_fields["objective"].annotation)
    )
    sources = re.findall(r"^The keys are those of (.*)", text, re.MULTILINE)
    assert len(sources) == len(projects())
    assert [each for each in sources if not re.search(r"at commit `[0-9a-f]{7}` \(20\d\d-\d\d-\d\d\)", each)] == []


def test_keys_that_the_text_between_the_tables_names_exist() -> None:
    """A key that starts with one of our sections is ours, or another project's."""
    named = set(re.findall(rf"(?<![\w./])((?:{SECTIONS})\.\w+(?:\.\w+)*)", TEMPLATE.read_text()))
    theirs = {name for project in projects() for row in rows(project) for name in (row.key, *row.older)}

    assert len(named) > 10
    assert named - set(dotted_keys(Config)) - theirs == set()


def test_a_reason_names_keys_of_ours_that_exist() -> None:
    for project in projects():
        theirs = {name for row in rows(project) for name in (row.key, *row.older)}
        for row in rows(project):
            named = re.findall(rf"(?<![\w.])((?:{SECTIONS})\.\w+(?:\.\w+)*)", " ".join([row.reason, row.note]))
            assert set(named) - set(dotted_keys(Config)) - theirs == set(), row
