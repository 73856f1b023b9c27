"""`dpbench new`: the package trains, is installed and passes its own test, as it was written."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from dpbench.code import _source_hash
from dpbench.harness.reproduce.jobs import Job, run_job, table_jobs
from dpbench.harness.reproduce.tables import read_table
from tests.support.cli import ROOT, dpbench

QUIET = """
from dpbench.privacy.mechanism.noise import add_gaussian_noise
from dpbench.privacy.mechanism.noise_process import Gaussian


class Quiet(Gaussian):
    independent = True

    def add_(self, total, plan, step, keys, state):
        return add_gaussian_noise(total, [(length, std / 4) for length, std in plan.segments], keys(step))


MyPaperStrategy.noise_process = lambda self, noise_multiplier, factors: Quiet(noise_multiplier)
"""
QUICK = ["logger=none", "trainer.max_steps=3"]


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("new")
    out, _ = dpbench(folder, "new", "my_paper")
    assert "dpbench train --config-dir my_paper/my_paper/conf experiment=my_paper/demo" in out
    return folder / "my_paper"


@pytest.fixture(autouse=True)
def forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a new process."""
    _source_hash.cache_clear()
    for name in list(sys.modules):
        if name.partition(".")[0] == "my_paper":
            monkeypatch.delitem(sys.modules, name)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("My_Paper", "'My_Paper' cannot name a package"),
        ("class", "'class' cannot name a package"),
        ("../paper", "'../paper' cannot name a package"),
        ("tests", "many projects have a folder or module tests"),
        ("torch", "a Python package torch is installed already"),
        ("digits", "data=digits exists already"),
        ("my_paper", "my_paper exists already"),
    ],
)
def test_names_that_are_taken_or_none(name: str, message: str, package: Path) -> None:
    before = sorted(package.parent.rglob("*"))
    _, err = dpbench(package.parent, "new", name, status=1)
    assert message in err and err.count("\n") == 1
    assert sorted(package.parent.rglob("*")) == before


def test_it_is_written_as_ruff_would_write_it(package: Path) -> None:
    rules = "--select E,F,W,I,B,UP,D --ignore D105,D107,D102,D103 --config lint.pydocstyle.convention='google'"
    for words in (f"check {rules}", "format --check"):
        command = [sys.executable, "-m", "ruff", *words.split(), "--isolated", "--no-cache", "--line-length=120", "."]
        done = subprocess.run(command, cwd=package, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr


def test_it_trains_where_it_lies(package: Path, tmp_path: Path) -> None:
    conf = package / "my_paper" / "conf"
    dpbench(tmp_path, "train", "--config-dir", str(conf), "experiment=my_paper/demo", *QUICK, "hydra.run.dir=run")
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert list(result["foreign_code"]) == ["my_paper"] and result["steps"] == 3
    assert "test/error" in result["metrics"] and result["privacy"]["epsilon"]["rdp"] > 0


def test_its_table_is_run_by_the_code_of_the_package(package: Path, tmp_path: Path) -> None:
    """An edit of it makes other jobs, also of one that has waited for its turn."""
    source = shutil.copytree(package, tmp_path / "my_paper") / "my_paper"

    def jobs() -> list[Job]:
        _source_hash.cache_clear()
        table = read_table("my_paper/noise", source / "conf").selected(("low",), (), 1)
        return table_jobs(table, tmp_path / "runs", config_dir=source / "conf")

    job, baseline = jobs()
    assert list(job.foreign_code) == ["my_paper"] == list(baseline.foreign_code)
    assert job.commands()[0][:3] == ["train", "--config-dir", str(source / "conf")]
    (source / "module.py").write_text((source / "module.py").read_text() + "# edited\n")
    assert jobs()[0].folder != job.folder
    run_job(job, 1)
    assert "the source of my_paper has changed since this table began" in job.attempt()["error"]
    assert not job.run.begun


@pytest.mark.long
@pytest.mark.parametrize(("more", "status", "said"), [("", 0, "2 passed"), (QUIET, 1, "NOT AS DECLARED")])
def test_its_own_tests_pass_and_refute_a_strategy_with_too_little_noise(
    more: str, status: int, said: str, package: Path, tmp_path: Path
) -> None:
    """Without an installation."""
    copy = shutil.copytree(package, tmp_path / "my_paper")
    with (copy / "my_paper" / "strategy.py").open("a") as file:
        file.write(more)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=copy, env=environment, capture_output=True, text=True)
    assert done.returncode == status and said in done.stdout, done.stdout


def test_a_rule_that_takes_squared_norms_for_norms_is_refused(package: Path, tmp_path: Path) -> None:
    source = shutil.copytree(package, tmp_path / "my_paper") / "my_paper"
    text = (source / "strategy.py").read_text()
    (source / "strategy.py").write_text(text.replace("norms = squared_norms.sqrt()", "norms = squared_norms"))
    # At a radius of 1 such a rule clips, too.
    words = ["--config-dir", str(source / "conf"), "experiment=my_paper/demo", *QUICK, "strategy.radius=0.5"]
    _, err = dpbench(tmp_path, "train", *words, status=1)
    assert "clip_factors=my_paper.strategy.clip_factors returns" in err
    assert "take squared_norms.sqrt() first" in err and err.count("\n") == 1
