"""The configuration of a run, as it is kept for a resume."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from dpbench.cli import main
from dpbench.errors import ConfigurationError
from dpbench.harness.run.saved_config import SCHEMA, read_config, require_resumable, write_config
from dpbench.harness.runs.folder import Run, RunFolder
from tests.support.cli import FEW

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


@pytest.mark.parametrize("target", ["dpbench.data.ImageDataModule", "dpbench.data.UserDataModule", "mine.Data"])
def test_runs_of_before_keep_who_they_held_out(target: str, tmp_path: Path) -> None:
    """Their settings say nothing of it, and a new run's are another split."""
    folder = RunFolder(tmp_path)
    for said, meant in (({}, "permutation"), ({"split": "hash"}, "hash"), ({"split": "permutation"}, "permutation")):
        write_config(Run(folder, {**CONFIG, "data": {"_target_": target, **said}}))
        read = read_config(folder)["data"]
        assert read.get("split") == (said.get("split") if target == "mine.Data" else meant)


def test_a_class_that_has_moved_is_known_by_its_old_place(tmp_path: Path) -> None:
    run = RunFolder(tmp_path / "run")
    words = ["experiment=digits_gan", "trainer.max_steps=1", "logger=none", f"hydra.run.dir={run.path}"]
    noise = ["strategy.target_epsilon=null", "strategy.noise_multiplier=1.0"]
    assert main(["train", *words, *noise]) == 0
    text = run.config.read_text()
    assert "dpbench.harness.run.samples." in text
    for steps, place in enumerate(("dpbench.synthesis.samples.", "dpbench.capabilities.synthesis.samples."), 2):
        run.config.write_text(text.replace("dpbench.harness.run.samples.", place))
        assert main(["resume", str(run.path), f"trainer.max_steps={steps}"]) == 0
        assert json.loads(run.result.read_text())["privacy"]["releases"] == steps


def test_a_run_of_before_goes_on_with_the_same_records(tmp_path: Path) -> None:
    run = RunFolder(tmp_path / "run")
    words = [*FEW, "data.val_size=200", f"hydra.run.dir={run.path}"]
    assert main(["train", *words, "data.split=permutation"]) == 0
    config = OmegaConf.load(run.config)
    del config.data.split
    run.config.write_text(OmegaConf.to_yaml(config))
    record = json.loads(run.result.read_text())
    del record["config"]["data"]["split"]
    run.result.write_text(json.dumps(record))
    assert main(["resume", str(run.path), "trainer.max_steps=4"]) == 0
    lines = [json.loads(line) for line in run.ledger.read_text().splitlines()]
    assert {line["population"] for line in lines if "population" in line} == {1237}
    assert json.loads(run.result.read_text())["privacy"]["sampling"]["population"] == 1237
