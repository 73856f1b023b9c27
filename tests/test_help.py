"""Every example that a `--help` shows runs as it stands there."""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import re
import shlex
from pathlib import Path

import pytest

from dpbench.cli import main, parser
from tests.support.cli import TINY
from tests.support.configs import composed
from tests.test_readme import commands

ROOT = Path(__file__).parents[1]


def helps() -> dict[str, str]:
    """The help of each subcommand, and of the whole."""
    whole = parser()
    (commands,) = (action for action in whole._actions if isinstance(action, argparse._SubParsersAction))
    texts = {name: command.format_help() for name, command in commands.choices.items() if command.add_help}
    return {"dpbench": whole.format_help(), **texts}


def examples() -> list[str]:
    pages = [ROOT / "docs" / "epsilon.md", ROOT / "docs" / "howto" / "commands.md", ROOT / "README.md"]
    texts = [*helps().values(), *(page.read_text(encoding="utf-8") for page in pages)]
    lines = [line.strip() for text in texts for line in text.splitlines()]
    return sorted({re.split(r"\s{2,}|\s#", line)[0] for line in lines if re.match(r"dpbench [a-z]+ ", line)})


def test_every_command_shows_an_example() -> None:
    for name, text in helps().items():
        assert re.search(rf"^  dpbench {'' if name == 'dpbench' else name + ' '}", text, re.M), name


# tests/cli/test_new.py trains the package of the examples.
TRAINED = {line for line in examples() if line.startswith("dpbench train ") and "--config-dir my_paper" not in line}


@pytest.mark.parametrize("line", sorted(TRAINED - {*commands()}))  # those of pages: test_readme.py
def test_training_examples_compose(line: str) -> None:
    words = [word for word in shlex.split(line)[2:] if "," not in word and not word.startswith("-") and word != "job"]
    composed(*words)


@pytest.mark.parametrize("line", [line for line in examples() if line.startswith("dpbench reproduce ")])
@pytest.mark.slow
def test_tables_of_the_examples_exist(line: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with contextlib.chdir(tmp_path):
        if "claims" not in line:  # that one is computed in test_claims.py
            assert main([*shlex.split(line)[1:], *(["--status"] if "list" not in line else [])]) == 0
            assert capsys.readouterr().out


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs of the names that the examples have."""
    folder = tmp_path_factory.mktemp("help")
    with contextlib.chdir(folder), contextlib.redirect_stdout(io.StringIO()):
        small = [*TINY, "logger=none", "trainer.max_steps=20"]
        assert main(["train", *small, "hydra.run.dir=runs/demo"]) == 0
        os.symlink("runs/demo", "tuned")
        assert main(["train", "-m", *small, "seed=0,1", "hydra.sweep.dir=runs/sweep"]) == 0
        os.rename("runs/sweep", "multirun")
        assert main(["train", "-m", *small, "seed=0,1", "hydra.sweep.dir=runs/sweep"]) == 0
    return folder


ASKING = [
    line for line in examples() if line.split()[1] in ("account", "calibrate", "table", "compare", "report")
]  # test_cli.py resumes runs


@pytest.mark.long
@pytest.mark.parametrize("line", [line for line in ASKING if line.split()[2] not in ("RUN", "RUN_OR_SWEEP")])
def test_examples_run(line: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = shlex.split(line)[1:]
    (folder / "runs" / "search").mkdir(exist_ok=True)
    with contextlib.chdir(folder):
        if "runs/search" in words:
            os.rename("runs/sweep", "runs/search/all")
        try:
            assert main(words) == 0, capsys.readouterr().err
        finally:
            if "runs/search" in words:
                os.rename("runs/search/all", "runs/sweep")
    assert capsys.readouterr().out
