"""The names of a run's files stand in one place."""

from __future__ import annotations

import ast
import os
from pathlib import Path

import pytest

import dpbench
from dpbench.errors import ConfigurationError
from dpbench.harness.runs.folder import RunFolder, finished_runs_below

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


def test_numbers_in_names_are_sorted_by_their_size(tmp_path: Path) -> None:
    for number in (10, 2, 0, 1):
        (tmp_path / f"{number}-run").mkdir()
        RunFolder(tmp_path / f"{number}-run").result.touch()
    assert [run.path.name for run in finished_runs_below([tmp_path])] == ["0-run", "1-run", "2-run", "10-run"]


@pytest.mark.parametrize("name", ["config.yaml", "ledger.jsonl", "checkpoints/last.ckpt", "curves.png"])
def test_a_folder_with_a_name_of_a_file(name: str, tmp_path: Path) -> None:
    RunFolder(tmp_path).refuse_misplaced()
    (tmp_path / name).mkdir(parents=True)
    with pytest.raises(ConfigurationError, match=f"{name} is a folder, and a run has a file there: move it away"):
        RunFolder(tmp_path).refuse_misplaced()


@pytest.mark.parametrize("name", ["checkpoints", ".hydra", "wandb"])
def test_a_file_with_a_name_of_a_folder(name: str, tmp_path: Path) -> None:
    (tmp_path / name).touch()
    with pytest.raises(ConfigurationError, match=f"{name} is a file, and a run has a folder there: move it away"):
        RunFolder(tmp_path).refuse_misplaced()


def test_a_run_that_may_not_be_read_is_not_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "closed").mkdir()
    scan = os.scandir

    def closed(path: str) -> object:  # a superuser may read everything
        if str(path).endswith("closed"):
            raise PermissionError(13, "Permission denied", str(path))
        return scan(path)

    monkeypatch.setattr(os, "scandir", closed)
    with pytest.raises(ConfigurationError, match="closed cannot be read .Permission denied.: what is in it would be"):
        finished_runs_below([tmp_path])


def strings_of(path: Path) -> set[str]:
    """All string constants but docstrings, which tell people what a file is called."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    told = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    constants = (node for node in ast.walk(tree) if isinstance(node, ast.Constant) and id(node) not in told)
    return {node.value for node in constants if isinstance(node.value, str)}


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_no_other_file_spells_them(path: Path) -> None:
    if path.name in ("folder.py", "ledger.py", "file.py"):  # the last two name what Python users get without a run
        return
    names = {str(getattr(RunFolder, key)) for key, value in vars(RunFolder).items() if type(value).__name__ == "_Entry"}
    files = {name.rpartition("/")[2] for name in names if "." in name.strip(".")}
    own = {"samples.png"} if path.name == "_results.py" else set()  # a picture of a table's results
    assert not strings_of(path) & files - own
