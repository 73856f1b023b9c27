"""The distribution is not called dpbench: that name belongs to another project on the package registry."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path

import pytest

import dpbench
from dpbench.code import versions
from dpbench.harness.run.search_path import installing

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def test_the_distribution_has_a_name_of_its_own() -> None:
    assert PROJECT["name"] == "dpbench-lightning"
    assert PROJECT["scripts"] == {"dpbench": "dpbench.cli:main"}
    assert PROJECT["version"] == dpbench.__version__


def test_no_hint_installs_the_other_project() -> None:
    found = subprocess.run(
        ["git", "grep", "-nE", r"dpbench\[(joblib|submitit|ray|dev|bench)|install +dpbench\b", "--", ":!tests"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert found.returncode == 1, found.stdout


def test_the_sweep_of_the_readme_needs_no_extra() -> None:
    assert any(line.startswith("hydra-joblib-launcher") for line in PROJECT["dependencies"])


def test_the_hint_names_the_distribution() -> None:
    assert installing("submitit") == 'pip install "dpbench-lightning[submitit]"'
    assert installing("ray") == "pip install ./plugins/dpbench-ray (in a checkout of dpbench)"


def test_our_version_is_our_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither a missing distribution nor a stranger's of the same name changes what a run records."""

    def version(name: str) -> str:
        if "dpbench" in name:
            raise metadata.PackageNotFoundError(name)
        return "9"

    monkeypatch.setattr("dpbench.code.version", version)
    assert versions()["dpbench"] == dpbench.__version__
    assert list(versions())[:2] == ["python", "dpbench"]


def test_the_other_project_in_the_environment_is_named(tmp_path: Path) -> None:
    """One line at import, where its distribution is installed, too; none elsewhere."""
    folder = tmp_path / "dpbench-0.2.1.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: dpbench\nVersion: 0.2.1\n", encoding="utf-8")
    places = {"without": "", "with": str(tmp_path)}
    said = {}
    for name, place in places.items():
        path = os.pathsep.join([place, *sys.path]).strip(os.pathsep)
        done = subprocess.run(
            [sys.executable, "-c", "import dpbench"],
            capture_output=True,
            text=True,
            check=True,
            env={**os.environ, "PYTHONPATH": path},
        )
        said[name] = done.stderr
    assert said["without"] == ""
    assert "the distribution dpbench 0.2.1 is another project" in said["with"]
    assert "pip uninstall -y dpbench, then install ours" in said["with"]
