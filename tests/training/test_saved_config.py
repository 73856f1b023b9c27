"""The configuration of a run, as it is kept for a resume."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dpbench.cli import main
from dpbench.errors import ConfigurationError
from dpbench.runs.folder import Run, RunFolder
from dpbench.training.saved_config import SCHEMA, read_config, require_resumable, write_config

CONFIG: dict[str, Any] = {"run": {"name": "x", "schema": SCHEMA}, "data": {}, "strategy": {}}


def test_a_run_knows_its_schema(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    write_config(Run(folder, CONFIG))
    assert read_config(folder)["run"] == CONFIG["run"]
    require_resumable(folder)
    folder.result.touch()
    with pytest.raises(ConfigurationError, match="holds a finished run, and there is nothing to resume"):
        require_resumable(folder)


@pytest.mark.parametrize("schema", [None, 0, SCHEMA + 1])
def test_a_run_of_another_version_is_read_and_not_resumed(
    schema: int | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before the number was written down there was none."""
    folder = RunFolder(tmp_path)
    write_config(Run(folder, {**CONFIG, "run": {"name": "x"} | ({} if schema is None else {"schema": schema})}))
    assert read_config(folder)["run"]["name"] == "x"
    before = folder.config.read_bytes()
    assert main(["resume", str(tmp_path)]) == 1
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and f"was begun by another version of dpbench (run.schema is {schema}" in err
    assert folder.config.read_bytes() == before and [path.name for path in tmp_path.iterdir()] == [folder.config.name]
