"""The rooms of the house, who may enter them, and how large anything in them may be."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from tools import rooms

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "dpbench"
FILES = sorted(PACKAGE.rglob("*.py"))
OPTIONS_OF_USERS = {"strategies", "modules", "data"}  # rooms whose constructors take what a YAML of conf/ holds


def test_rooms_import_only_what_they_may() -> None:
    """The contracts stand in pyproject.toml; they hold for imports through others too."""
    command = "from importlinter.cli import lint_imports_command; lint_imports_command()"  # it changes logging
    words = [sys.executable, "-c", command, "--no-cache", "--no-logo"]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_contributing_shows_the_contracts() -> None:
    """`make rooms` writes the table."""
    text = rooms.PAGE.read_text(encoding="utf-8")
    assert rooms.page(text) == text
    assert text.count(rooms.BEGIN) == text.count(rooms.END) == 1


def functions(node: ast.AST) -> list[ast.FunctionDef]:
    return [found for found in ast.walk(node) if isinstance(found, ast.FunctionDef)]


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_files_classes_and_functions_stay_small(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert text.count("\n") <= 600
    for function in functions(ast.parse(text)):
        first = function.body[1] if ast.get_docstring(function) and len(function.body) > 1 else function.body[0]
        assert (function.end_lineno or 0) - first.lineno < 60, function.name
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ClassDef):
            assert (node.end_lineno or 0) - node.lineno < 300, node.name
            if path.parent.name not in OPTIONS_OF_USERS:
                for constructor in (own for own in functions(node) if own.name == "__init__"):
                    arguments = constructor.args
                    assert len(arguments.args) + len(arguments.kwonlyargs) - 1 <= 10, node.name
