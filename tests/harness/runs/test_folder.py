"""The names of a run's files stand in one place."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

import dpbench
from dpbench.errors import ConfigurationError
from dpbench.harness.runs.folder import RunFolder, finished_runs_below

PACKAGE = Path(dpbench.__file__).parent


def test_finished_runs_are_found_at_any_depth_once_and_by_their_number(tmp_path: Path) -> None:
    names = ["", "2-run", "10-run", "b/c"]
    for name in names:
        (tmp_path / name).mkdir(parents=True, exist_ok=True)
        RunFolder(tmp_path / name).result.touch()
    found = finished_runs_below([tmp_path, tmp_path / "2-run"])
    assert [run.path for run in found] == [tmp_path / name for name in names]


def test_a_folder_with_a_name_of_a_file_and_a_file_with_that_of_a_folder(tmp_path: Path) -> None:
    RunFolder(tmp_path).refuse_misplaced()
    (tmp_path / "wandb").touch()
    with pytest.raises(ConfigurationError, match="wandb is a file instead of a folder: move it away"):
        RunFolder(tmp_path).refuse_misplaced()
    (tmp_path / "wandb").unlink()
    (tmp_path / "checkpoints/last.ckpt").mkdir(parents=True)
    with pytest.raises(ConfigurationError, match="last.ckpt is a folder instead of a file: move it away"):
        RunFolder(tmp_path).refuse_misplaced()


def test_a_run_that_may_not_be_read_is_not_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "closed").mkdir()
    scan = os.scandir

    def closed(path: str) -> object:  # a superuser may read everything
        if str(path).endswith("closed"):
            raise PermissionError(13, "Permission denied", str(path))
        return scan(path)

    monkeypatch.setattr(os, "scandir", closed)
    with pytest.raises(ConfigurationError, match="closed cannot be read .Permission denied.: make it readable"):
        finished_runs_below([tmp_path])
