"""A release: source distribution and wheel, installed in a clean environment, and what says its version."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path

import pytest

import dpbench

ROOT = Path(__file__).parents[1]
_PYTHONS = ("python3.11", "python3.12", "python3.13", "python3.14")
_RUNNING = f"python{sys.version_info.major}.{sys.version_info.minor}"


def test_all_say_the_same_version() -> None:
    citation = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    changes = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    (cited,) = re.findall(r"^version: (.*)$", citation, re.MULTILINE)
    (dated,) = re.findall(r"^date-released: (.*)$", citation, re.MULTILINE)
    newest, date = re.findall(r"^## (\d\S*) – (\S+)$", changes, re.MULTILINE)[0]
    assert (cited, dated) == (newest, date) and newest == dpbench.__version__


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A source distribution of the checkout, and a wheel of that distribution."""
    folder = tmp_path_factory.mktemp("release")
    for name in _git("ls-files", "--cached", "--others", "--exclude-standard"):
        if (ROOT / name).is_file():
            (folder / "copy" / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / "copy" / name)
    _build("sdist", folder / "copy", folder)
    (source,) = folder.glob("dpbench_lightning-*.tar.gz")
    with tarfile.open(source) as archive:
        archive.extractall(folder / "unpacked", filter="data")
    (unpacked,) = (folder / "unpacked").iterdir()
    _build("wheel", unpacked, folder)
    shutil.rmtree(folder / "copy")
    (wheel,) = folder.glob("dpbench_lightning-*.whl")
    return source, wheel


def _git(*words: str) -> list[str]:
    done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=True)
    return done.stdout.splitlines()


def _build(target: str, of: Path, into: Path) -> None:
    subprocess.run([sys.executable, "-m", "hatchling", "build", "-t", target, "-d", str(into)], cwd=of, check=True)


@pytest.mark.slow
def test_the_wheel_holds_all_that_is_needed_and_nothing_else(built: tuple[Path, Path]) -> None:
    source, wheel = built
    assert source.stat().st_size < 3e6 and wheel.stat().st_size < 3e6
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    assert {name.removeprefix("src/") for name in _git("ls-files", "src")} <= names
    configurations = {f"dpbench/{path.relative_to(ROOT).as_posix()}" for path in (ROOT / "conf").rglob("*.yaml")}
    assert configurations <= names
    assert {name.split("/")[0].split("-")[0] for name in names} == {"dpbench", "dpbench_lightning"}


def _works(python: str) -> bool:
    found = shutil.which(python)  # perhaps a shim of a version that is not chosen
    return found is not None and subprocess.run([found, "--version"], capture_output=True, check=False).returncode == 0


@pytest.mark.parametrize(
    "python",  # another one than this gets all dependencies: six gigabytes and minutes
    [pytest.param(name, marks=[pytest.mark.slow] if name == _RUNNING else [pytest.mark.long]) for name in _PYTHONS],
)
def test_the_first_hour_from_the_wheel(python: str, built: tuple[Path, Path], tmp_path: Path) -> None:
    if python != _RUNNING and not _works(python):
        pytest.skip(f"there is no {python} here")
    subprocess.run([sys.executable if python == _RUNNING else python, "-m", "venv", str(tmp_path / "env")], check=True)
    own, env = tmp_path / "env" / "bin", _clean()
    words = [str(own / "python"), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", str(built[1])]
    if python == _RUNNING:  # its dependencies are here already: they are looked up where they lie
        (site,) = (tmp_path / "env").glob("lib/*/site-packages")
        (site / "dependencies.pth").write_text(sysconfig.get_paths()["purelib"] + "\n", encoding="utf-8")
        words.append("--no-deps")
    else:
        words += ["--constraint", str(ROOT / "constraints.txt")]
    subprocess.run(words, check=True, env=env)

    def run(*words: str) -> str:
        done = subprocess.run(words, cwd=tmp_path, env=env, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout

    where = run(str(own / "python"), "-c", "import dpbench; print(dpbench.__file__)")
    assert where.startswith(str(tmp_path / "env"))
    assert dpbench.__version__ in run(str(own / "dpbench"), "--version")
    command = str(own / "dpbench")
    short = ["trainer.max_steps=5", "logger=none"]
    run(command, "train", "experiment=demo", *short, "hydra.run.dir=demo")
    assert json.loads((tmp_path / "demo" / "result.json").read_text(encoding="utf-8"))["steps"] == 5
    run(command, "new", "mine")
    run(command, "train", "--config-dir", "mine/mine/conf", "experiment=mine/demo", *short, "hydra.run.dir=own")
    run(command, "train", "-m", "model=mlp", "optimizer.lr=0.1,0.2", *short, "hydra.sweep.dir=sweep")
    assert run(command, "account", "sweep").count("| sweep/") == 2
    run(command, "report", "demo", "own", "sweep", "--out", "report.html")
    assert "</html>" in (tmp_path / "report.html").read_text(encoding="utf-8")


def _clean() -> dict[str, str]:
    """Without what would lead back to the checkout."""
    gone = {"PYTHONPATH", "VIRTUAL_ENV", "PYTHONHOME"}
    return {**{key: value for key, value in os.environ.items() if key not in gone}, "CUDA_VISIBLE_DEVICES": ""}
