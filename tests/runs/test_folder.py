"""The names of a run's files stand in one place."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import dpbench
from dpbench.runs.folder import RunFolder, finished_runs_below

PACKAGE = Path(dpbench.__file__).parent


def test_names_and_paths() -> None:
    folder = RunFolder(Path("a"))
    assert folder.checkpoint == Path("a/checkpoints/last.ckpt") and RunFolder.checkpoint == "checkpoints/last.ckpt"
    assert folder.checkpoint.parent == folder.checkpoints == folder.checkpoint_metrics.parent
    assert str(folder) == "a" and RunFolder(Path("a")) == folder != RunFolder(Path("b"))


def test_finished_runs_are_found_at_any_depth_and_once(tmp_path: Path) -> None:
    for name in ("", "a", "b/c"):
        (tmp_path / name).mkdir(parents=True, exist_ok=True)
        RunFolder(tmp_path / name).result.touch()
    found = finished_runs_below([tmp_path, tmp_path / "a"])
    assert [run.path for run in found] == [tmp_path, tmp_path / "a", tmp_path / "b" / "c"]
    assert all(run.finished for run in found)


def strings_of(path: Path) -> set[str]:
    """All string constants but docstrings, which tell people what a file is called."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    told = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    constants = (node for node in ast.walk(tree) if isinstance(node, ast.Constant) and id(node) not in told)
    return {node.value for node in constants if isinstance(node.value, str)}


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_no_other_file_spells_them(path: Path) -> None:
    if path.name in ("folder.py", "ledger.py"):
        return
    names = {str(getattr(RunFolder, key)) for key, value in vars(RunFolder).items() if type(value).__name__ == "_Entry"}
    files = {name.rpartition("/")[2] for name in names if "." in name.strip(".")}
    own = {"samples.png"} if path.name == "outputs.py" else set()  # a picture of a table's results
    assert not strings_of(path) & files - own
