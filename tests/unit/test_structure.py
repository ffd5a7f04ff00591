import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FILES = sorted(path for folder in ("megatron_bapo", "tools") for path in (ROOT / folder).rglob("*.py"))
MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def test_package_files_are_empty():
    packages = [path for path in FILES if path.name == "__init__.py"]

    assert len(packages) >= 10
    assert [name(path) for path in packages if path.read_text()] == []


def test_every_folder_with_modules_is_a_package():
    folders = {path.parent for path in FILES if "megatron_bapo" in path.parts}

    assert [name(folder) for folder in folders if not (folder / "__init__.py").exists()] == []


def test_what_prints_foreign_text_has_a_console_without_markup():
    folders = {"cli", "commands", "studies", "controller", "cluster", "tools"}
    printing = [path for path in FILES if folders & set(path.parts[len(ROOT.parts) :])]

    made = r"\b(Console|_Terminal)\("
    assert [name(path) for path in printing if re.search(made, path.read_text())] == [
        "megatron_bapo/controller/terminal.py"
    ]


@pytest.mark.parametrize("path", FILES, ids=name)
def test_files_and_functions_stay_short(path):
    text = path.read_text()

    assert len(text.splitlines()) <= MAX_FILE_LINES
    lengths = {
        node.name: (node.end_lineno or node.lineno) - node.lineno + 1
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }
    assert {function: length for function, length in lengths.items() if length > MAX_FUNCTION_LINES} == {}
