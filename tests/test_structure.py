"""The rooms of the house and who may enter them."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "src" / "dpbench"
FILES = sorted(PACKAGE.rglob("*.py"))
HARNESS = {"pytorch_lightning", "hydra", "omegaconf", "wandb", "pandas", "matplotlib", "torchvision"}
FORBIDDEN = {
    "models": HARNESS
    | {
        "dpbench.privacy",
        "dpbench.strategies",
        "dpbench.data",
        "dpbench.training",
        "dpbench.results",
        "dpbench.errors",
    },
    "privacy": HARNESS
    | {
        "dpbench.strategies",
        "dpbench.data",
        "dpbench.modules",
        "dpbench.training",
        "dpbench.results",
        "dpbench.models",
    },
    "modules": {"hydra", "wandb", "dpbench.privacy", "dpbench.strategies", "dpbench.training"},
    "data": {"hydra", "omegaconf", "wandb", "dpbench.strategies", "dpbench.training", "dpbench.modules"},
    "strategies": {
        "hydra",
        "omegaconf",
        "wandb",
        "dpbench.training",
        "dpbench.results",
        "dpbench.modules",
        "dpbench.models",
    },
    "training": {"dpbench.synthesis", "dpbench.reproduce"},
    "synthesis": {"wandb", "dpbench.strategies", "dpbench.reproduce"},
    "results": {"hydra", "omegaconf", "wandb", "dpbench.training", "dpbench.strategies"},
}


def imports_of(path: Path) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module)
    return names


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_dependency_rule(path: Path) -> None:
    room = path.relative_to(PACKAGE).parts[0]
    for name in imports_of(path):
        broken = [bad for bad in FORBIDDEN.get(room, ()) if name == bad or name.startswith(bad + ".")]
        assert not broken, f"{path.name} imports {name}"


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_files_and_functions_stay_small(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert text.count("\n") <= 420
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef) and node.body:
            first = node.body[1] if ast.get_docstring(node) and len(node.body) > 1 else node.body[0]
            assert (node.end_lineno or 0) - first.lineno < 45, node.name
