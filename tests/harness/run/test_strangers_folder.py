"""The folder of a run that somebody else made: no command runs what lies in it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf

from dpbench.cli import main
from dpbench.harness.runs.folder import RunFolder
from tests.support.cli import FEW, dpbench
from tests.support.finished_runs import STEPS

Given = Callable[[str], RunFolder]
MORE = f"trainer.max_steps={STEPS + 1}"


class Attack:
    """Leaves a file when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return os.mkdir, (str(self.mark),)


@pytest.fixture
def given(trained: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Given:
    """Copies a run of a kind below the working directory."""
    monkeypatch.chdir(tmp_path)
    return lambda kind: RunFolder(Path(shutil.copytree(trained(kind), tmp_path / "given" / "run")))


def poison(run: RunFolder, mark: Path) -> None:
    state = torch.load(run.checkpoint, weights_only=True)
    torch.save({**state, "more": Attack(mark)}, run.checkpoint)


COMMANDS = {
    "resume": ("secure", f"resume given/run {MORE}"),
    "export": ("secure", "export given/run --out out"),
    "sample": ("gan", "sample given/run --num-samples 4 --out out"),
    "labels": ("noise", "audit given/run"),
}


@pytest.mark.parametrize("command", COMMANDS)
def test_no_command_unpickles_what_a_checkpoint_holds(
    command: str, given: Given, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kind, words = COMMANDS[command]
    run, mark = given(kind), tmp_path / "mark"
    ledger = run.ledger.read_bytes()
    poison(run, mark)
    assert main(words.split()) == 1
    err = capsys.readouterr().err
    assert err.startswith("dpbench: error: ") and err.count("\n") == 1
    assert f"{RunFolder.checkpoint} contains objects (posix.mkdir)" in err and "Add --trust" in err
    main(["table", "given/run"])
    assert not mark.exists() and run.ledger.read_bytes() == ledger
    main([*words.split(), "--trust"])
    assert mark.exists()
    for folder in ("given", "out"):
        shutil.rmtree(folder, ignore_errors=True)
    given(kind)  # what dpbench writes needs no trust
    assert main(words.split()) in (0, 3)  # 3: an audit of few steps accuses nobody reliably


def edited(run: RunFolder, **groups: Any) -> None:
    config: Any = OmegaConf.to_container(OmegaConf.load(run.config))
    for name, value in groups.items():
        config[name] = {**config["data"], **value} if name == "data" else value
    run.config.write_text(OmegaConf.to_yaml(OmegaConf.create(config)))


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        # Any class with matching options was called, to ask what it made whether it is a source of records.
        (
            {"records": {"_target_": "subprocess.Popen", "args": ["mkdir", "mark"]}},
            "records._target_=subprocess.Popen must be a class with the methods",
        ),
        ({"hydra": {"callbacks": {"x": {"_target_": "os.mkdir", "path": "mark"}}}}, "config.yaml sets hydra"),
        ({"defaults": ["other", "_self_"]}, "config.yaml sets defaults"),
    ],
)
def test_a_configuration_runs_nothing(groups: dict[str, Any], message: str, given: Given, tmp_path: Path) -> None:
    run = given("secure")
    edited(run, **groups)
    (run.path / "other.yaml").write_text("hydra: {}\n")
    _, err = dpbench(tmp_path, "resume", "given/run", MORE, status=1)
    assert err.count("\n") == 1 and message in err
    assert not (tmp_path / "mark").exists()


@pytest.mark.parametrize(
    ("command", "where", "module"),
    [("export", "given/run", "mine"), ("export", ".", "given.run.mine"), ("resume", "given", "run.mine")],
)
def test_no_class_is_imported_from_the_folder(
    command: str,
    where: str,
    module: str,
    given: Given,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In the folder, beside it and above it, where PYTHONPATH has Python look for modules."""
    run, mark = given("secure"), tmp_path / "mark"
    source = f"import os\nos.mkdir({str(mark)!r})\nfrom dpbench.data import ImageDataModule as Data\n"
    (run.path / "mine.py").write_text(source)
    edited(run, data={"_target_": f"{module}.Data"})
    monkeypatch.syspath_prepend(tmp_path / where)
    words = COMMANDS[command][1].replace("given/run", str(run.path))
    _, err = dpbench(tmp_path / where, *words.split(), status=1)
    assert err.count("\n") == 1 and "nothing is imported from the folder of a run" in err
    assert not mark.exists()


@pytest.mark.parametrize(
    "program",
    [
        "",
        # Workers of joblib, processes of a training and jobs of a queue are `python -m` and `python -c`.
        "import contextlib, subprocess, sys\nfrom dpbench.cli import main\n"
        "with contextlib.suppress(SystemExit): main()\n"
        "subprocess.run([sys.executable, '-c', 'import argparse'], check=True)\n",
    ],
    ids=["command", "what it starts"],
)
def test_no_module_is_imported_because_the_folder_is_the_working_directory(program: str, tmp_path: Path) -> None:
    """`python -m` would look there before it looks among installed packages and Python's own modules."""
    for name in ("argparse", "difflib", "logging"):
        (tmp_path / f"{name}.py").write_text(f"import os\nos.mkdir({str(tmp_path / 'mark')!r})\n")
    words = ["-P", "-c", program] if program else ["-m", "dpbench"]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONSAFEPATH"}
    subprocess.run([sys.executable, *words, "--version"], cwd=tmp_path, env=environment, check=True)
    assert not (tmp_path / "mark").exists()


def test_a_new_run_trusts_no_checkpoint_that_lies_in_its_folder(given: Given) -> None:
    run = given("secure")
    for path in (run.result, run.config, run.ledger):
        path.unlink()
    _, err = dpbench(run.path, "train", *FEW, "hydra.run.dir=.", status=1)
    assert "holds the checkpoint of another run: choose another folder" in err
