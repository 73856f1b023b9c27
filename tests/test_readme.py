"""What the README promises runs as it stands there."""

from __future__ import annotations

import os
import re
import shlex
from pathlib import Path

import pytest

from tests.support import forks
from tests.support.cli import HANGS
from tests.support.configs import composed

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


SLOW = [pytest.param(page, marks=pytest.mark.slow) for page in ("docs/users.md", "docs/howto/from_opacus.md")]


@pytest.mark.parametrize("page", ["README.md", "docs/loop.md", *SLOW])
def test_python_snippet_runs(tmp_path: Path, page: str) -> None:
    snippets = re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(encoding="utf-8"), re.S)
    assert snippets
    for snippet in snippets:
        process = forks.start(tmp_path, "-c", [snippet], {**os.environ, "CUDA_VISIBLE_DEVICES": ""})
        out, err = process.communicate(HANGS)
        assert process.returncode == 0, err
        assert "epsilon" in out


def test_make_targets_and_pictures_exist() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.M))
    assert set(re.findall(r"^make ([a-z-]+)", README, re.M)) <= targets


PAGES = [path for pattern in ("*.md", "docs/**/*.md", "results/**/*.md") for path in sorted(ROOT.glob(pattern))]


def test_links_lead_somewhere() -> None:
    broken = []
    for page in PAGES:
        links = re.findall(r"\]\(([^)#:]+)\)", page.read_text(encoding="utf-8"))
        broken += [f"{page.relative_to(ROOT)}: {link}" for link in links if not (page.parent / link).exists()]
    assert not broken


def commands() -> list[str]:
    """Every `dpbench train` line of a code block; those with a folder of one's own run in the tests of that folder."""
    texts = [page.read_text(encoding="utf-8").replace("\\\n", " ") for page in PAGES]
    lines = [line for text in texts for line in text.splitlines()]
    trainings = [line for line in lines if line.startswith("dpbench train ")]
    return sorted({line.removesuffix(" &") for line in trainings if "--config-dir" not in line})


@pytest.mark.parametrize("command", commands())
def test_commands_compose(command: str) -> None:
    words = shlex.split(command, comments=True)[2:]
    if {"-m", "--help", "--cfg"} & set(words):
        words = [word for word in words if "," not in word and not word.startswith("-") and word != "job"]
    composed(*words)


def test_ci_runs_the_readme_test_command() -> None:
    assert "make test" in README
    assert "make test" in (ROOT / ".ci" / "run").read_text(encoding="utf-8")
