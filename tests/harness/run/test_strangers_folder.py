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
from dpbench.errors import ConfigurationError
from dpbench.harness.run.saved_config import read_config
from dpbench.harness.runs.folder import RunFolder
from dpbench.harness.runs.readers import read_checkpoint
from tests.support.cli import FEW
from tests.support.finished_runs import STEPS

MORE = f"trainer.max_steps={STEPS + 1}"


class Attack:
    """Leaves a file when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return os.mkdir, (str(self.mark),)


@pytest.fixture
def given(trained: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A classifier, a GAN, and a run on noise, below the working directory."""
    monkeypatch.chdir(tmp_path)
    # Classifiers of synthetic images read nothing of the folder, and take longer to train than all else here.
    monkeypatch.setattr("dpbench.capabilities.synthesis.evaluate.accuracies", lambda *_: {"accuracy_cnn": 0.1})
    for name, kind in (("classifier", "secure"), ("gan", "gan"), ("noise", "noise")):
        shutil.copytree(trained(kind), tmp_path / "given" / name)
    return tmp_path / "given"


def poison(run: Path, mark: Path) -> None:
    path = RunFolder(run).checkpoint
    state = torch.load(path, weights_only=True)
    torch.save({**state, "more": Attack(mark)}, path)


COMMANDS = {
    "resume": f"resume classifier {MORE}",
    "export": "export classifier --out out",
    "sample": "sample gan --num-samples 4 --out out",
    "evaluate": "evaluate gan --num-samples 100",
    "labels": "audit noise",
}
WITHOUT_CHECKPOINT = ("account classifier", "table classifier", "compare classifier noise", "report classifier")


def words_of(command: str, folder: Path) -> list[str]:
    return [str(folder / word) if word in ("classifier", "gan", "noise") else word for word in command.split()]


@pytest.mark.parametrize("command", COMMANDS)
def test_no_command_unpickles_what_a_checkpoint_holds(
    command: str, given: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mark = tmp_path / "mark"
    words = words_of(COMMANDS[command], given)
    poison(Path(words[1]), mark)
    ledger = RunFolder(Path(words[1])).ledger.read_bytes()
    assert main(words) == 1
    err = capsys.readouterr().err
    assert err.startswith("dpbench: error: ") and err.count("\n") == 1
    assert f"{RunFolder(Path(words[1])).checkpoint} holds objects (posix.mkdir)" in err and "add --trust" in err
    assert not mark.exists()
    assert RunFolder(Path(words[1])).ledger.read_bytes() == ledger
    main([*words, "--trust"])
    assert mark.exists()


@pytest.mark.parametrize("command", COMMANDS)
def test_what_dpbench_writes_needs_no_trust(command: str, given: Path) -> None:
    assert main(words_of(COMMANDS[command], given)) in (0, 3)  # 3: an audit of few steps accuses nobody reliably


@pytest.mark.parametrize("command", WITHOUT_CHECKPOINT)
def test_what_reads_results_unpickles_nothing(command: str, given: Path, tmp_path: Path) -> None:
    for name in ("classifier", "noise"):
        poison(given / name, tmp_path / "mark")
    main(words_of(command, given))
    assert not (tmp_path / "mark").exists()


def edited(run: Path, **groups: Any) -> None:
    path = RunFolder(run).config
    config = OmegaConf.to_container(OmegaConf.load(path))
    assert isinstance(config, dict)
    path.write_text(OmegaConf.to_yaml(OmegaConf.create({**config, **groups})))


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        # Any class with matching options was called, to ask what it made whether it is a source of records.
        (
            {"records": {"_target_": "subprocess.Popen", "args": ["mkdir", "mark"]}},
            "records._target_=subprocess.Popen must be a class with the methods",
        ),
        ({"hydra": {"callbacks": {"x": {"_target_": "os.mkdir", "path": "mark"}}}}, "config.yaml sets hydra"),
        ({"hydra": {"job_logging": {"formatters": {"x": {"()": "os.mkdir", "path": "mark"}}}}}, "sets hydra"),
        ({"defaults": ["other", "_self_"]}, "config.yaml sets defaults"),
    ],
)
def test_a_configuration_runs_nothing(
    groups: dict[str, Any], message: str, given: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    edited(given / "classifier", **groups)
    (given / "classifier" / "other.yaml").write_text("hydra: {}\n")
    assert main(["resume", str(given / "classifier"), MORE]) == 1
    err = capsys.readouterr().err
    assert err.startswith("dpbench: error: ") and err.count("\n") == 1 and message in err
    assert not (tmp_path / "mark").exists()


def with_a_class_of_its_own(given: Path, mark: Path, where: str) -> None:
    """A module in the folder of the run, which leaves a mark when it is imported, and a configuration that names it."""
    run = given / "classifier"
    (run / "mine.py").write_text(
        f"import os\nos.mkdir({str(mark)!r})\nfrom dpbench.data import ImageDataModule as Data\n"
    )
    module = {"given/classifier": "mine", "given": "classifier.mine", ".": "given.classifier.mine"}[where]
    config: Any = OmegaConf.to_container(OmegaConf.load(RunFolder(run).config))
    edited(run, data={**config["data"], "_target_": f"{module}.Data"})


@pytest.mark.parametrize("where", ["given/classifier", "given", "."])
@pytest.mark.parametrize("command", ["resume", "export"])
def test_no_class_is_imported_from_the_folder(
    command: str,
    where: str,
    given: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """In the folder, beside it and above it, where PYTHONPATH has Python look for modules."""
    mark = tmp_path / "mark"
    with_a_class_of_its_own(given, mark, where)
    monkeypatch.chdir(tmp_path / where)
    monkeypatch.syspath_prepend(tmp_path / where)
    assert main(words_of(COMMANDS[command], given)) == 1
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and "nothing is imported from the folder of a run" in err
    assert not mark.exists()


@pytest.mark.long
def test_no_class_is_imported_by_a_process_of_its_own(given: Path, tmp_path: Path) -> None:
    """With the working directory among the places where modules are looked for."""
    mark = tmp_path / "mark"
    with_a_class_of_its_own(given, mark, ".")
    words = [sys.executable, "-m", "dpbench", *words_of(COMMANDS["resume"], given)]
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "PYTHONPATH": path}
    done = subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 1 and done.stderr.count("\n") == 1, done.stderr
    assert "nothing is imported from the folder of a run" in done.stderr
    assert not mark.exists()


def test_no_module_is_imported_because_the_folder_is_the_working_directory(tmp_path: Path) -> None:
    """`python -m` would look there before it looks among installed packages and Python's own modules."""
    for name in ("argparse", "difflib", "logging"):
        (tmp_path / f"{name}.py").write_text(f"import os\nos.mkdir({str(tmp_path / 'mark')!r})\n")
    words = [sys.executable, "-m", "dpbench", "--version"]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and done.stdout.startswith("dpbench "), done.stderr
    assert not (tmp_path / "mark").exists()


def test_nor_by_what_a_command_starts(tmp_path: Path) -> None:
    """Workers of joblib, processes of a training and jobs of a queue are `python -m` and `python -c`."""
    (tmp_path / "argparse.py").write_text(f"import os\nos.mkdir({str(tmp_path / 'mark')!r})\n")
    program = (
        "import contextlib, subprocess, sys\nfrom dpbench.cli import main\n"
        "with contextlib.suppress(SystemExit): main()\n"
        "subprocess.run([sys.executable, '-c', 'import argparse'], check=True)\n"
    )
    words = [sys.executable, "-P", "-c", program, "--version"]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONSAFEPATH"}
    subprocess.run(words, cwd=tmp_path, env=environment, check=True)
    assert not (tmp_path / "mark").exists()


def test_a_class_of_a_package_elsewhere_is_imported(
    given: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "elsewhere"
    package.mkdir()
    (package / "of_my_own.py").write_text(
        "from dpbench.data import ImageDataModule\nclass Data(ImageDataModule): pass\n"
    )
    monkeypatch.syspath_prepend(package)
    run = given / "classifier"
    config: Any = OmegaConf.to_container(OmegaConf.load(RunFolder(run).config))
    edited(run, data={**config["data"], "_target_": "of_my_own.Data"})
    assert read_config(RunFolder(run))["data"]["_target_"] == "of_my_own.Data"
    RunFolder(run).result.unlink()
    assert main(["resume", str(run), MORE]) == 0


def test_a_damaged_checkpoint_is_not_called_untrusted(given: Path) -> None:
    path = RunFolder(given / "classifier").checkpoint
    path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(ConfigurationError, match="cannot be read"):
        read_checkpoint(path)


def test_a_new_run_trusts_no_checkpoint_that_lies_in_its_folder(
    given: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    planted = RunFolder(tmp_path / "new")
    planted.checkpoints.mkdir(parents=True)
    shutil.copy(RunFolder(given / "classifier").checkpoint, planted.checkpoint)
    assert main(["train", *FEW, "trainer.max_steps=3", f"hydra.run.dir={planted.path}"]) == 1
    assert "holds the checkpoint of another run: choose another folder" in capsys.readouterr().err
