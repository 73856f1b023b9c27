"""Files and folders are whole or absent."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from dpbench.files import remove_torn, replacing, write_atomically, write_json


def test_atomic_write_leaves_the_old_file_on_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "f"
    write_atomically(path, "old")

    def broken(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", broken)
    with pytest.raises(OSError, match="No space left"):
        write_atomically(path, "new")
    assert path.read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["f"]


def test_json_refuses_what_other_readers_cannot_read(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="JSON"):
        write_json(tmp_path / "f", {"x": float("nan")})
    write_json(tmp_path / "f", {"x": 1})
    assert json.loads((tmp_path / "f").read_text()) == {"x": 1}


def test_a_folder_is_there_whole_or_not_at_all(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError), replacing(tmp_path / "f") as new:
        (new / "unmade").touch()
    assert not any(tmp_path.iterdir())
    (tmp_path / "f").mkdir()
    with replacing(tmp_path / "f") as new:
        new.mkdir()
        (new / "a").touch()
    assert [path.name for path in (tmp_path / "f").iterdir()] == ["a"]


def test_what_a_killed_process_was_writing_is_removed(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").mkdir()
    with replacing(tmp_path / "checkpoints" / "last.ckpt") as new:
        torn = new
        torn.touch()
    for name in (torn.name, ".lock", "last.ckpt.1"):
        (tmp_path / "checkpoints" / name).touch()
    remove_torn(tmp_path)
    assert {path.name for path in (tmp_path / "checkpoints").iterdir()} == {".lock", "last.ckpt", "last.ckpt.1"}


def test_an_error_names_the_file_that_was_asked_for(tmp_path: Path) -> None:
    (tmp_path / "f").mkdir()
    with pytest.raises(IsADirectoryError) as error:
        write_atomically(tmp_path / "f", "new")
    assert error.value.filename == str(tmp_path / "f") and ".f." not in str(error.value)
