"""The configuration of a run, as it is kept for a resume."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dpbench.errors import ConfigurationError
from dpbench.harness.run.saved_config import SCHEMA, read_config, require_resumable, write_config
from dpbench.harness.runs.folder import Run, RunFolder
from tests.support.cli import dpbench

CONFIG: dict[str, Any] = {"run": {"name": "x", "schema": SCHEMA}, "data": {}, "strategy": {}}


def test_a_run_knows_its_schema(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    write_config(Run(folder, CONFIG))
    assert read_config(folder)["run"] == CONFIG["run"]
    require_resumable(folder)
    folder.result.touch()
    with pytest.raises(ConfigurationError, match="holds a finished run, and there is nothing to resume"):
        require_resumable(folder)


@pytest.mark.parametrize("schema", [None, SCHEMA + 1])
def test_a_run_of_another_version_is_read_and_not_resumed(schema: int | None, tmp_path: Path) -> None:
    """Before the number was written down there was none."""
    folder = RunFolder(tmp_path)
    write_config(Run(folder, {**CONFIG, "run": {"name": "x"} | ({"schema": schema} if schema else {})}))
    assert read_config(folder)["run"]["name"] == "x"
    with pytest.raises(
        ConfigurationError, match=rf"started by an incompatible version of dpbench \(run.schema is {schema}"
    ):
        require_resumable(folder)


def test_runs_of_before_keep_who_they_held_out(tmp_path: Path) -> None:
    """Their settings say nothing of it, and a new run's are another split."""
    folder = RunFolder(tmp_path)
    for target in ("dpbench.data.ImageDataModule", "dpbench.data.UserDataModule", "mine.Data"):
        for said in (None, "hash"):
            data = {"_target_": target} | ({"split": said} if said else {})
            write_config(Run(folder, {**CONFIG, "data": data}))
            assert read_config(folder)["data"].get("split") == (said if said or "mine" in target else "permutation")


def test_a_class_that_has_moved_is_known_by_its_old_place(trained: Callable[[str], Path], tmp_path: Path) -> None:
    run = RunFolder(Path(shutil.copytree(trained("gan"), tmp_path / "run")))
    text = run.config.read_text()
    assert "dpbench.harness.run.samples." in text
    run.config.write_text(text.replace("dpbench.harness.run.samples.", "dpbench.synthesis.samples."))
    dpbench(tmp_path, "resume", "run", "trainer.max_steps=13", "strategy.target_epsilon=99")
    assert json.loads(run.result.read_text())["steps"] == 13
